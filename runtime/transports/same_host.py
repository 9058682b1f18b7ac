"""Same-host peers, and how one rank passes a piece of memory to another.

Same-host peers are ranks of one machine, network namespace and user, on Linux. They connect through a socket in the
abstract namespace (unix(7)); since any process of the machine can connect, each connection has to show 16 random bytes
that the ranks were told over the process group. Memory is anonymous (memfd_create(2)), so nothing remains of it.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_bytes
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field

from partita.runtime.supervision.memory_server import user_of
from partita.runtime.transports.failures import ConnectionLost, post

ROW = 4096  # size of a rank's message about itself in bytes, most of them bit sets of ranks or cores
TOKEN = 16
TIMEOUT_SECONDS = 86_400.0  # for an expected peer: stalls are the watchdog's to report
GREETING_SECONDS = 60.0  # for a connected peer to say what it offers
# The namespaces that peers share: of abstract sockets (network) and of user ids.
PLACES = (Path("/proc/self/ns/net"), Path("/proc/self/ns/user"))
BOOT = Path("/proc/sys/kernel/random/boot_id")
# x86 makes a process's writes visible to others in program order. Other architectures need barriers, which Python does
# not have.
ORDERED = ("x86_64",)


@define(eq=False)
class SameHostPeers:
    """Which ranks of the run can share memory, and the sockets of those on this machine.

    `spins`: each rank of this machine has its own cores, so that busy waiting takes nothing from the others.
    """

    spins: bool = False
    _reached: Sequence[int] = ()  # by rank: bit set of the ranks whose sockets it has reached
    _doors: Mapping[int, tuple[bytes, bytes]] = field(factory=dict, repr=False)  # by rank: name and token
    _door: socket.socket | None = field(default=None, repr=False)
    _token: bytes = field(default=b"", repr=False)
    _come: dict[str, tuple[socket.socket, mmap.mmap]] = field(factory=dict, repr=False)

    def is_local(self, a: int, b: int) -> bool:
        """Whether two ranks can share memory; the same on every rank."""
        return bool(self._reached) and bool(self._reached[a] >> b & self._reached[b] >> a & 1)

    def offer(self, what: str, rank: int, size: int) -> tuple[socket.socket, mmap.mmap]:
        """Share `size` bytes of new, zeroed memory with a rank: returns a connection to it, and the memory.

        The rank is told `what`. Raises `ConnectionLost`.
        """
        name, token = self._doors[rank]
        with _told(what), ExitStack() as failing:
            handle = os.memfd_create("partita")
            failing.callback(os.close, handle)
            connection = failing.enter_context(_socket())
            os.ftruncate(handle, size)
            memory = mmap.mmap(handle, size)
            connection.connect(name)
            socket.send_fds(connection, [token + what.encode()], [handle])
            failing.pop_all()
            os.close(handle)
        return connection, memory

    def take(self, what: str) -> tuple[socket.socket, mmap.mmap]:
        """What a peer offers under that name: a connection to it, and the memory. Raises `ConnectionLost`."""
        assert self._door is not None
        while what not in self._come:
            with _told(what):
                connection, _ = self._door.accept()
            self._accept(connection)
        return self._come.pop(what)

    def _accept(self, connection: socket.socket) -> None:
        """Record what a peer offers, if it runs as our user and shows the token."""
        connection.settimeout(GREETING_SECONDS)
        greeting, handles = b"", list[int]()
        with suppress(OSError):
            if user_of(connection) != os.geteuid():
                connection.close()
                return
            greeting, handles, *_ = socket.recv_fds(connection, ROW, 1)
        if greeting[:TOKEN] == self._token and handles:
            self._come[greeting[TOKEN:].decode()] = connection, mmap.mmap(handles[0], 0)
            connection.settimeout(None)
        else:
            connection.close()
        for handle in handles:
            os.close(handle)

    def close(self) -> None:
        """Accept no more connections."""
        if self._door is not None:
            self._door.close()


def find_same_host_peers(group: dist.ProcessGroup | None) -> SameHostPeers:
    """Exchange between all ranks of a CPU process group where they are, and which peers they can reach."""
    token = token_bytes(TOKEN)
    listener, own = _own(token)
    messages = _everywhere(own, group)
    is_local = {rank: each for rank, each in enumerate(messages) if each["home"] == own["home"] != ""}
    doors = {rank: (bytes.fromhex(each["name"]), bytes.fromhex(each["token"])) for rank, each in is_local.items()}
    reached = sum(1 << rank for rank, (name, _) in doors.items() if _reaches(name))
    cores = 0
    for each in is_local.values():
        cores |= int(each["cores"], 16)
    spins = sum(each["threads"] for each in is_local.values()) <= cores.bit_count()
    everybodys = [int(each["reached"], 16) for each in _everywhere({"reached": f"{reached:x}"}, group)]
    return SameHostPeers(spins, everybodys, doors, listener, token)


def _everywhere(own: Mapping[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Gather each rank's message, by rank."""
    rows = [torch.zeros(ROW, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    text = json.dumps(own).encode()
    assert len(text) <= ROW, f"{len(rows)} ranks are too many to exchange their addresses"
    sent = torch.frombuffer(bytearray(text.ljust(ROW)), dtype=torch.uint8)
    post("the rendezvous", dist.all_gather, rows, sent, group=group)
    return [json.loads(bytes(row.tolist())) for row in rows]


def _own(token: bytes) -> tuple[socket.socket | None, dict[str, Any]]:
    """A socket on which peers can connect, and this process's message to all; nothing if memory cannot be shared, or
    writes are not seen in order. Cores are a bit set.
    """
    # Interpreters built for old systems lack memfd_create.
    if sys.platform == "linux" and platform.machine() in ORDERED and hasattr(os, "memfd_create"):
        with suppress(OSError), ExitStack() as failing:  # sandboxes may forbid any of this
            os.close(os.memfd_create("partita"))
            listener = failing.enter_context(_socket())
            listener.settimeout(TIMEOUT_SECONDS)
            listener.bind("")
            listener.listen(socket.SOMAXCONN)
            spaces = " ".join(str(each.stat().st_ino) for each in PLACES)
            message = {
                "home": f"{BOOT.read_text().strip()} {spaces} {os.geteuid()}",
                "name": listener.getsockname().hex(),
                "token": token.hex(),
                "cores": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}",
                "threads": torch.get_num_threads(),
            }
            failing.pop_all()
            return listener, message
    return None, {"home": ""}


def _reaches(name: bytes) -> bool:
    """Whether a peer's socket is reachable: security modules may forbid it, and a cloned machine looks the same."""
    with _socket() as probe:
        try:
            probe.connect(name)
        except OSError:
            return False
    return True


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise the system's errors, including timeouts, as `ConnectionLost`."""
    try:
        yield
    except OSError as error:
        raise ConnectionLost(f"sharing memory for {what} failed: {error}") from error
