"""Memory that outlives the ranks of a machine: files without names, whose descriptors each attempt's ranks get.

The supervisor holds them and lets its ranks inherit them. Under torchrun a process of its own does (`memory_server`),
for as long as the agent that starts the ranks lives. Other launchers end with their ranks, or start them elsewhere, so
that there is no such memory.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from attrs import frozen

from partita.runtime.supervision import memory_server
from partita.runtime.supervision.identity import Identity
from partita.runtime.tracing.flight import machine

MEMORY = "PARTITA_MEMORY"  # descriptors
AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun
PAIR = 2  # slots that are filled in turn
TIMEOUT_SECONDS = 20.0  # for the memory server to start
POLL_SECONDS = 0.01


@frozen
class Memory:
    """The memory of a rank's host, as descriptors of files: pairs for what each place of a rank saves, and as many for
    what it receives. The rank has `place` of `count` there.
    """

    host: str
    place: int
    count: int
    slots: Sequence[int]

    @property
    def own(self) -> Sequence[int]:
        """The pair that this rank's shard is copied to."""
        return self.slots[PAIR * self.place : PAIR * (self.place + 1)]

    @property
    def received(self) -> Sequence[int]:
        """The pair for what a rank of another host sends."""
        start = len(self.slots) // 2 + PAIR * self.place
        return self.slots[start : start + PAIR]


@contextmanager
def created(ranks: int) -> Iterator[tuple[int, ...]]:
    """Memory for a host of so many ranks, until the end of the block. Raises OSError."""
    with ExitStack() as stack:
        slots = tuple(_file() for _ in range(2 * PAIR * ranks))
        for each in slots:
            stack.callback(os.close, each)
        yield slots


def _file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("partita-copies")
    with TemporaryFile() as file:
        return os.dup(file.fileno())


def memory_of(identity: Identity, variables: Mapping[str, str]) -> Memory | None:
    """The memory of this rank's host; None if there is none that outlives it."""
    if variables.get(MEMORY):
        slots: Sequence[int] = [int(each) for each in variables[MEMORY].split(",")]
        for each in slots:
            os.set_inheritable(each, False)
        return Memory("supervisor", identity.rank, identity.ranks, slots)
    if AGENT in variables and hasattr(os, "pidfd_open"):
        agent = os.getppid()
        with suppress(OSError):
            return Memory(
                f"{machine()} {agent}", identity.local_rank, identity.local_ranks, _kept(agent, identity.local_ranks)
            )
    return None


def _kept(agent: int, ranks: int) -> list[int]:
    """The memory server's descriptors; it is started if there is none yet. Raises OSError."""
    count = 2 * PAIR * ranks
    end = time.monotonic() + TIMEOUT_SECONDS
    started = False
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(memory_server.address_of(agent))
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                if not started:
                    started = True
                    _start_memory_server(agent, count)
                time.sleep(POLL_SECONDS)
                continue
            if memory_server.user_of(connection) != os.getuid():
                raise PermissionError("another user's process has the memory server's address")
            return _received(connection, count)


def _received(connection: socket.socket, count: int) -> list[int]:
    descriptors: list[int] = []
    while len(descriptors) < count:
        data, files, _, _ = socket.recv_fds(connection, 1, memory_server.AT_ONCE)
        if not data:
            raise ConnectionError("the memory server has ended")
        descriptors += files
    return descriptors


def _start_memory_server(agent: int, count: int) -> None:
    subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(memory_server.__file__).resolve()), str(agent), str(count)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
