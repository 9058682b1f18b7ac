"""The ranks of a run whose number may change: which are gone for good, and how many there are to be.

A rank that fails more often than a run may restart it is gone: the next attempt has a mesh for the ranks that are left.
They return when somebody says how many there are: `echo 4 > DIR/ranks` in the run's directory. The ranks for the new
number are started and made ready while the others train; these then save, and nothing is lost. What the file says
counts from when it is written while the run goes on.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from attrs import define, field, frozen

from partita.runtime.run_directory import RunDirectory
from partita.runtime.supervision.watchdog import Watchdog

FILE = "ranks"
MAX_READ = 64  # bytes


@frozen(eq=False)
class WorkerGroup:
    """What ranks run: `command` as each of `ranks` ranks, watched by `watchdog`. `mesh` says how they are arranged."""

    command: Sequence[str]
    ranks: int
    watchdog: Watchdog | None = None
    mesh: str = ""


@define(eq=False)
class ElasticGroup:
    """The ranks that may run: from `least` to `most`, of which each may fail `restarts` times.

    `crew_of` gives the crew for at most that many ranks; None if no mesh fits.
    """

    least: int
    most: int
    restarts: int
    crew_of: Callable[[int], WorkerGroup | None]
    directory: RunDirectory
    size: int = field(init=False)
    _failures: Counter[int] = field(factory=Counter, init=False)
    _crews: dict[int, WorkerGroup | None] = field(factory=dict, init=False)
    _seen: tuple[int, ...] | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.size = self.most
        self._seen = self._identity()

    def crew(self, ranks: int) -> WorkerGroup | None:
        """The crew for at most that many ranks, if there are at least the least."""
        if ranks < self.least:
            return None
        if ranks not in self._crews:
            self._crews[ranks] = self.crew_of(ranks)
        return self._crews[ranks]

    def likely(self) -> WorkerGroup | None:
        """The crew after the next failure, as far as that can be known."""
        return self.crew(self.size if self.restarts else self.size - 1)

    def lose(self, ranks: Iterable[int]) -> list[int]:
        """Count a failure of these ranks; returns those that are gone for good by it."""
        self._failures.update(ranks)
        lost = [rank for rank, count in sorted(self._failures.items()) if count > self.restarts]
        if lost:
            self.size -= len(lost)
            self._failures.clear()  # the others get new numbers
        return lost

    def asked(self) -> tuple[int | None, str]:
        """The number of ranks that somebody has asked for since the last time, else None; or why it cannot be."""
        identity = self._identity()
        if identity is None or identity == self._seen:
            return None, ""
        data = self.directory.read(FILE, MAX_READ)
        text = (data or b"").decode(errors="replace").strip()
        if not text:
            return None, ""  # the shell makes the file before the number is in it
        self._seen = identity
        where = self.directory.path / FILE
        if not text.isdecimal() or not self.least <= int(text) <= self.most:
            return None, f"{where} must be a number of ranks from {self.least} to {self.most}, not {text!a}"
        self.size = int(text)
        self._failures.clear()
        if self.crew(self.size) is None:
            return None, f"no mesh of {self.least} to {text} ranks fits the file"
        return self.size, ""

    def _identity(self) -> tuple[int, ...] | None:
        """Which version of the file there is; None if there is none."""
        with suppress(OSError):
            status = os.stat(FILE, dir_fd=self.directory.handle, follow_symlinks=False)
            return status.st_ino, status.st_size, status.st_mtime_ns
        return None
