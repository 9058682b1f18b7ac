"""Ranks that are forked are as those that are started: children, in a group, with descriptors, cores and a status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita.runtime.supervision.fork_server import COMMAND, NAME, Forked, ForkServer, serving
from partita.runtime.supervision.identity import RANK

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")
TEXT = "axis a = 1\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with serving({**os.environ, "OMP_NUM_THREADS": "1"}) as found:
        assert found is not None
        yield found


def forked(
    server: ForkServer, *arguments: str, inherited: tuple[int, ...] = (), group: int = 0, **variables: str
) -> Forked:
    command = [*COMMAND, *arguments]
    assert server.can_start(command, inherited)
    own = {**os.environ, RANK: "3", **variables}
    return server.start(command, own, inherited, group or os.getpgid(0), sorted(os.sched_getaffinity(0))[:1])


def until_forked(process: Forked) -> None:
    while process.pid == process.server.process.pid:
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.soak
def test_it_is_a_child_with_what_it_was_given(server: ForkServer, tmp_path: Path) -> None:
    read, write = os.pipe()
    (tmp_path / "m.par").write_text(TEXT)
    process = forked(server, "check", str(tmp_path / "m.par"), inherited=(write,), PARTITA_MARK="here")
    waiting = forked(server, "lsp")
    until_forked(waiting)
    status = Path(f"/proc/{waiting.pid}/status")
    assert f"PPid:\t{os.getpid()}\n" in status.read_text()
    while f"Name:\t{NAME}3\n" not in status.read_text():  # the last thing it does before it runs
        assert waiting.poll() is None
        time.sleep(0.01)
    assert os.getpgid(waiting.pid) == os.getpgid(0)
    assert os.sched_getaffinity(waiting.pid) == {min(os.sched_getaffinity(0))}
    assert process.wait() == 0
    os.close(write)
    assert os.read(read, 1) == b""  # nobody else has the other end
    os.close(read)
    waiting.send_signal(signal.SIGKILL)
    assert waiting.wait() == -signal.SIGKILL


@pytest.mark.soak
def test_what_it_says_comes_by_its_own_pipe(server: ForkServer) -> None:
    process = forked(server, "check")
    assert process.wait() == 2
    assert b"required: FILE" in process.stderr.read()


@pytest.mark.soak
def test_one_whose_group_is_gone_ends_without_a_word(server: ForkServer) -> None:
    leader = subprocess.Popen([sys.executable, "-c", ""], process_group=0)
    leader.wait()
    process = forked(server, "check", group=leader.pid)
    assert process.wait() == 1
    assert process.stderr.read() == b""


def test_one_that_is_killed_before_it_is_forked_ends_the_server() -> None:
    with serving({**os.environ}) as server:
        assert server is not None
        first, second = forked(server, "lsp"), forked(server, "lsp")
        first.kill()
        assert first.wait() == -signal.SIGKILL
        assert second.wait() in (1, -signal.SIGKILL)
        server.process.wait()
        assert not server.can_start(COMMAND, ())


@pytest.mark.soak
def test_only_ranks_are_forked(server: ForkServer) -> None:
    assert not server.can_start([sys.executable, "-c", "pass"], ())
    assert not server.can_start(COMMAND, range(1000))


PROBE = """
import sys
import partita.cli.training.standalone as standalone
standalone.launch = lambda *_, **__: print("torch" in sys.modules) or 0
from partita.cli.main import main
main(["run", "specs/tiny.par", "--run-dir", sys.argv[1]])
"""


@pytest.mark.soak
def test_the_supervisor_does_without_torch(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, str(tmp_path / "run")], capture_output=True, text=True)
    assert done.stdout == "False\n", done
