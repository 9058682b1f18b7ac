"""The ranks that share this machine, and how one of them hands another a piece of memory.

Neighbours are ranks of one machine and network namespace, on Linux. They meet through a socket with a name that is no
file ("abstract", unix(7)); who knocks shows the 16 random bytes that all ranks were told over the process group, since
any process of the machine may knock. Memory is anonymous (memfd_create(2)): nothing remains of it, however a run ends.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_bytes

import torch
import torch.distributed as dist
from attrs import define, field

from partita.runtime.transports.failures import ConnectionLost, post

ROW = 2048  # bytes that a rank tells of itself
TOKEN = 16
PATIENCE_SECONDS = 60.0  # for a neighbour that has said that it would come
BOOT, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
# x86 shows a process's writes to others in the order in which they were made. Elsewhere it takes barriers, which Python
# has not.
ORDERED = ("x86_64", "AMD64")


@define(eq=False)
class Neighbours:
    """Which ranks share a machine, all over the run, and the doors of those that share this one.

    `spins`: each rank of this machine has cores of its own, so that who waits takes nothing from the others by looking
    again and again.
    """

    spins: bool = False
    _homes: Sequence[str] = ()  # by rank: its machine; nothing where memory cannot be shared
    _doors: Mapping[int, tuple[bytes, bytes]] = field(factory=dict, repr=False)  # by rank: name and token
    _door: socket.socket | None = field(default=None, repr=False)
    _token: bytes = field(default=b"", repr=False)
    _come: dict[str, tuple[socket.socket, mmap.mmap]] = field(factory=dict, repr=False)

    def near(self, a: int, b: int) -> bool:
        """Whether two ranks can share memory."""
        return bool(self._homes) and self._homes[a] == self._homes[b] != ""

    def offer(self, what: str, rank: int, size: int) -> tuple[socket.socket, mmap.mmap]:
        """Share so many bytes of new memory, all zeros, with a rank: a connection with it, and the memory.

        `what` is told the rank. Raises `ConnectionLost`.
        """
        name, token = self._doors[rank]
        with _patience(f"sharing memory for {what}"):
            handle = os.memfd_create("partita")
            connection = _socket()
            try:
                os.ftruncate(handle, size)
                memory = mmap.mmap(handle, size)
                connection.connect(name)
                socket.send_fds(connection, [token + what.encode()], [handle])
            finally:
                os.close(handle)
        connection.settimeout(None)
        return connection, memory

    def take(self, what: str) -> tuple[socket.socket, mmap.mmap]:
        """What a neighbour offers under that name: a connection with it, and the memory. Raises `ConnectionLost`."""
        assert self._door is not None
        while what not in self._come:
            with _patience(f"sharing memory for {what}"):
                connection, _ = self._door.accept()
            self._let_in(connection)
        return self._come.pop(what)

    def _let_in(self, connection: socket.socket) -> None:
        """Note what somebody offers, if it shows the token."""
        connection.settimeout(PATIENCE_SECONDS)
        said, handles = b"", list[int]()
        with suppress(OSError):
            said, handles, *_ = socket.recv_fds(connection, ROW, 1)
        if said[:TOKEN] == self._token and handles:
            self._come[said[TOKEN:].decode()] = connection, mmap.mmap(handles[0], 0)
            connection.settimeout(None)
        else:
            connection.close()
        for handle in handles:
            os.close(handle)

    def close(self) -> None:
        """Nobody else is to come."""
        if self._door is not None:
            self._door.close()


def meet(group: dist.ProcessGroup | None) -> Neighbours:
    """All ranks of a process group between CPUs tell each other where they are."""
    door, token = _door(), token_bytes(TOKEN)
    own = _described(door, token) if door is not None else {"machine": ""}
    rows = [torch.zeros(ROW, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    sent = torch.frombuffer(bytearray(json.dumps(own).encode().ljust(ROW)), dtype=torch.uint8)
    post("the meeting of all ranks", dist.all_gather, rows, sent, group=group)
    found = [json.loads(bytes(row.tolist())) for row in rows]
    homes = tuple(each["machine"] for each in found)
    if door is None:
        return Neighbours(False, homes)
    near = {rank: each for rank, each in enumerate(found) if each["machine"] == own["machine"]}
    cores = 0
    for each in near.values():
        cores |= int(each["cores"], 16)
    spins = sum(each["threads"] for each in near.values()) <= cores.bit_count()
    doors = {rank: (bytes.fromhex(each["name"]), bytes.fromhex(each["token"])) for rank, each in near.items()}
    return Neighbours(spins, homes, doors, door, token)


def _door() -> socket.socket | None:
    """A socket at which neighbours can knock; None where memory cannot be shared, or not in order."""
    if sys.platform != "linux" or platform.machine() not in ORDERED:
        return None
    with suppress(OSError):
        os.close(os.memfd_create("partita"))  # sandboxes may refuse it
        door = _socket()
        door.bind("")
        door.listen(socket.SOMAXCONN)
        return door
    return None


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(PATIENCE_SECONDS)
    return made


@contextmanager
def _patience(what: str) -> Iterator[None]:
    """The system's errors, of which one is that nobody has come in time, are `ConnectionLost`."""
    try:
        yield
    except OSError as error:
        raise ConnectionLost(f"{what} failed: {error}") from error


def _described(door: socket.socket, token: bytes) -> dict[str, object]:
    """What the others are told of this process. Its cores are bits of a number."""
    return {
        "machine": f"{BOOT.read_text().strip()} {NETWORK.stat().st_ino}",
        "name": door.getsockname().hex(),
        "token": token.hex(),
        "cores": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
        "threads": torch.get_num_threads(),
    }
