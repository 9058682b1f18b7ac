"""`partita watch` answers who has its address, and nobody else."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from partita.cli.page.run import Run
from partita.cli.page.server import Server
from tests.cli.page.runs import append, step, written
from tests.commands import here


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    run = Run(written(tmp_path))
    with Server(run) as found:
        thread = Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def asked(
    server: Server, path: str = "/", host: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.headers)
    connection.close()
    return found


def test_the_page_and_what_is_newer(server: Server, tmp_path: Path) -> None:
    token = f"token={server.token}"
    status, text, headers = asked(server, f"/?{token}")
    assert (status, text[:15]) == (200, "<!doctype html>")
    assert headers["Cache-Control"] == "no-store"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert server.token not in text
    assert asked(server, f"/?{token}", host=f"localhost:{server.server_port}")[0] == 200
    status, text, headers = asked(server, f"/content?{token}&version=0")
    assert (status, text[:8]) == (200, "<header>")
    version = headers["X-Version"]
    assert asked(server, f"/content?{token}&version={version}")[:2] == (204, "")
    append(tmp_path / "run", step(5))
    status, text, headers = asked(server, f"/content?{token}&version={version}")
    assert status == 200
    assert "5 of 6" in text
    assert headers["X-Version"] != version
    assert asked(server, f"/?{token}", method="HEAD")[:2] == (200, "")
    assert server.server_address[0] == "127.0.0.1"


def test_who_is_not_meant_is_refused(server: Server) -> None:
    good, port = f"/?token={server.token}", server.server_port
    own = f"http://127.0.0.1:{port}"
    assert asked(server, good, Origin=own, Sec_Fetch_Site="same-origin")[0] == 200
    for path in ("/", "/?token=", f"/?token={server.token[:-1]}", f"/?token={server.token}&token=x", "/?token=%ff"):
        assert asked(server, path)[:2] == (403, "the address needs the token that `partita watch` has printed\n")
    for path in ("/content?version=0", "/favicon.ico", "/run.json", "/../run.json", "//x", "/[", "http://[/"):
        assert asked(server, path)[0] == 403, path
    for host in ("", "evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"[::1]:{port}"):
        assert asked(server, good, host=host)[:2] == (403, "this server has another name\n"), host
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", f"http://localhost:{port}"):
        assert asked(server, good, Origin=origin)[:2] == (403, "the request comes from another page\n"), origin
    for site in ("cross-site", "same-site"):
        assert asked(server, good, Sec_Fetch_Site=site)[0] == 403
    assert asked(server, f"/other?token={server.token}")[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked(server, good, method=method)[0] == 501


def test_a_run_that_cannot_be_read_is_said_and_read_later(server: Server, tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.rename(tmp_path / "away")
    metrics.symlink_to(tmp_path / "away")
    status, text, _ = asked(server, f"/?token={server.token}")
    assert (status, text[:24]) == (503, "the run cannot be read: ")
    metrics.unlink()
    assert asked(server, f"/?token={server.token}")[0] == 200


@pytest.mark.soak
def test_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    written(tmp_path)
    command = [sys.executable, "-m", "partita", "watch", "run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("watching run at http://127.0.0.1:")
        port = line.partition("127.0.0.1:")[2].partition("/")[0]
        taken = here("watch", "run", "--port", port, cwd=tmp_path)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert taken.returncode == 2
    assert taken.stderr == f"partita: cannot listen on port {port}: Address already in use\n"


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_a_port_that_there_is_not(port: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        here("watch", "run", "--port", port, cwd=tmp_path)
    assert stopped.value.code == 2
