"""Another user of the machine at the ports by which ranks connect: out of reach, or noticed before anything is sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.fault_injection.processes import PROC, listening, marked, opened, private_networks
from tests.fault_injection.runs import Run
from tests.marks import soak

pytestmark = pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")


@pytest.fixture
def run(runs: Callable[..., Run]) -> Run:
    return runs("zero3")


class UntrustedPeer:
    """Connects to whatever a run's processes listen on that can be reached from here, and speaks first."""

    def __init__(self, run: Run, said: bytes, most: int) -> None:
        self.run, self.said, self.most = run, said, most
        self.reached = 0
        self.heard = b""
        self._connections: list[socket.socket] = []
        self._met = set[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> UntrustedPeer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for each in self._connections:
            each.close()

    def _work(self) -> None:
        while not self._over.is_set():
            sockets = listening()
            own = {name for process in marked(self.run.mark) for name in opened(process)}
            for inode, address in sockets.items():
                if f"socket:[{inode}]" in own and inode not in self._met and self.reached < self.most:
                    self._met.add(inode)
                    self._visit(int(address.rpartition(":")[2], 16))
            for each in self._connections:
                with suppress(OSError):
                    self.heard += each.recv(1 << 16, socket.MSG_DONTWAIT)
            self._over.wait(0.001)

    def _visit(self, port: int) -> None:
        connection = socket.socket()
        with suppress(OSError):
            connection.connect(("127.0.0.1", port))
            connection.sendall(self.said)
            self.reached += 1
        self._connections.append(connection)


@pytest.mark.soak
@pytest.mark.parametrize("said", [bytes(8), *soak(b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 16)], ids=len)
def test_nobody_reaches_what_ranks_listen_on(run: Run, said: bytes) -> None:
    if not private_networks():
        pytest.skip("this system forbids networks of one's own")
    run.start()
    with UntrustedPeer(run, said, 1000) as stranger:
        ended = run.finish()
    assert (ended.status, ended.errors) == (0, "")
    assert stranger.reached == 0


@pytest.mark.parametrize("said", soak(bytes(8), b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 16), ids=len)
def test_where_anybody_reaches_them_a_start_is_tried_again(
    run: Run, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the system allows no network of their own. Two of three starts are spoilt."""
    monkeypatch.setenv("PARTITA_PRIVATE_NETWORK", "0")
    run.start("--stall-timeout", "10")
    with UntrustedPeer(run, said, 4) as stranger:
        ended = run.finish()
    assert stranger.reached > 0
    assert ended.status == 0, ended
    assert "Fatal Python error" not in ended.errors
    assert "terminate called" not in ended.errors
    run.check_nothing_runs()
