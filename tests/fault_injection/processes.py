"""The processes of a run, found by a mark in their environment, and what of the machine they hold.

Whatever a run starts inherits its environment, so nothing that it leaves behind can hide: neither a process whose
parent is gone, nor what such a process listens on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from attrs import define, field

from partita.runtime.supervision import reaper as reapers
from partita.runtime.supervision.fork_server import NAME
from partita.runtime.supervision.identity import RANK

TIMEOUT = 200.0  # seconds that a busy machine may take for what has no limit of its own
PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
LISTEN = "0A"


@cache
def private_networks() -> bool:
    """Whether this system lets the ranks of a run have a network of their own."""
    reaper = subprocess.Popen(
        [sys.executable, "-I", "-S", reapers.__file__, "private"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    said, _ = reaper.communicate()
    return said.split()[1:] == [b"private"]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = TIMEOUT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain until {what}"
        time.sleep(0.005)


def marked(mark: str) -> dict[int, str]:
    """The processes that have a mark in their environment, with their command lines."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended, or is somebody else's
                continue
    return found


def variable(process: int, name: str) -> str | None:
    """A variable of a process's environment; None where it has none, or has ended."""
    with suppress(OSError):
        for each in (PROC / str(process) / "environ").read_bytes().decode(errors="replace").split("\0"):
            if each.startswith(f"{name}="):
                return each.partition("=")[2]
    return None


def parent_of(process: int) -> int:
    """The parent of a process; 0 if it has ended."""
    with suppress(OSError):
        found = re.search(r"^PPid:\s+(\d+)", (PROC / str(process) / "status").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def rank_of(process: int) -> int | None:
    """The rank that a process of a supervisor is, whether it was forked or started; None if it is none."""
    found = None
    with suppress(OSError):  # it has ended
        found = re.fullmatch(rf"{NAME}(\d+)", (PROC / str(process) / "comm").read_text().strip())
    text = found[1] if found else variable(process, RANK)
    return None if text is None else int(text)


def launched(mark: str) -> dict[int, int]:
    """The processes of ranks that torchrun has started, by rank."""
    ranks = {process for process, command in marked(mark).items() if "torch.distributed" not in command}
    return {int(rank): process for process in ranks if (rank := variable(process, "RANK")) is not None}


def listening(process: int | str = "self") -> dict[str, str]:
    """The sockets that listen in the network of a process, by inode: their addresses."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in (PROC / str(process) / "net" / name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                found[fields[9]] = fields[1]
    return found


@define
class Held:
    """Sockets that listened, by inode, and files in shared memory that some processes have been seen to have."""

    sockets: set[str] = field(factory=set)
    reachable: set[str] = field(factory=set)  # those that any process of the machine can connect to
    files: set[Path] = field(factory=set)

    def look(self, processes: Iterable[int]) -> None:
        """Add what processes have now."""
        names = set[str]()
        for process in processes:
            names |= (own := set(opened(process)))
            inodes = {match[1] for name in own if (match := re.fullmatch(r"socket:\[(\d+)\]", name))}
            with suppress(OSError):  # it has ended
                self.sockets |= inodes & listening(process).keys()
            self.reachable |= inodes & listening().keys()
        self.files |= {Path(name) for name in names if name.startswith(f"{SHARED_MEMORY}/")}

    def remaining(self) -> list[str]:
        """What of it is still there."""
        sockets = listening()
        found = [f"something listens on {sockets[inode]}" for inode in self.sockets & sockets.keys()]
        return found + [f"{path} remains" for path in self.files if path.exists()]


def opened(process: int) -> list[str]:
    """What a process has open or mapped."""
    found = []
    with suppress(OSError):  # it has ended
        for entry in (PROC / str(process) / "fd").iterdir():
            with suppress(FileNotFoundError):  # it is closed by now
                found.append(os.readlink(entry))
        found += [line.split()[-1] for line in (PROC / str(process) / "maps").read_text().splitlines()]
    return found
