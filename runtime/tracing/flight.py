"""The flight recorder: what each rank is doing, in a small file that outlives it.

A rank takes a mark whenever it has done something (the same marks in every step, see `stopwatch`): a
counter and the time go into a file that is mapped into memory, which costs a fraction of a microsecond and no system
call. Whoever watches maps the file too, and sees how far a rank is though it hangs, is stopped or is dead: the system
keeps a page that was written to.

The file is 64-bit integers: a head (below), then the times of the last `RING` marks, mark n at n modulo `RING`.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import monotonic_ns

from attrs import frozen

RING = 256
BOOT = Path("/proc/sys/kernel/random/boot_id")
# The head: what the rank is about, marks so far, marks before this step, the step, the process, collectives begun so
# far: where ranks of one program are at the same mark, that says who is behind. All ranks turn to the same things in
# the same order, so their turns can be compared, whatever they do. Times are those of the machine's clock.
ACTIVITY, MARKS, BEGUN, STEP, PROCESS, COLLECTIVES, TURN, MACHINE, HEAD = range(9)
STARTING, TRAINING, EVALUATING, BETWEEN, ENDED, LOADING, SAVING, AGREEING, READY, CONNECTING = range(10)
ACTIVITIES = (
    "starting",
    "training",
    "evaluating",
    "between steps",
    "ending",
    "reading a checkpoint",
    "saving a checkpoint",
    "agreeing on a checkpoint",
    "waiting for its turn",
    "connecting to other ranks",
)
SIZE = 8 * (HEAD + RING)


def path_of(directory: Path, rank: int) -> Path:
    """The file of a rank."""
    return directory / f"flight-{rank}"


class Flight:
    """One rank's recorder. Without a path it records into memory of its own: nobody watches.

    The path is relative to the open directory `parent`, where there is one. Raises OSError, also where the file has no
    room: a page of it that the disk could not take would end the process.
    """

    def __init__(self, path: Path | str | None, parent: int | None = None) -> None:
        if path is None:
            self._memory: mmap.mmap | bytearray = bytearray(SIZE)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent)
            try:
                if os.write(descriptor, bytes(SIZE)) < SIZE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._memory = mmap.mmap(descriptor, SIZE)
            finally:
                os.close(descriptor)
        self._view = memoryview(self._memory).cast("q")
        self._next = 0
        self._view[PROCESS], self._view[MACHINE] = os.getpid(), machine()
        self.mark()

    @property
    def marks(self) -> int:
        """How many it has taken."""
        return self._next

    def mark(self) -> None:
        """The rank has done something."""
        view, number = self._view, self._next
        view[HEAD + number % RING] = monotonic_ns()
        view[MARKS] = self._next = number + 1

    def collective(self) -> None:
        """The rank begins a collective."""
        self._view[COLLECTIVES] += 1

    def begin(self, activity: int, step: int = 0) -> None:
        """The rank turns to something else: to a training step or an evaluation, whose marks are counted from here."""
        view = self._view
        view[STEP], view[BEGUN], view[ACTIVITY] = step, self._next, activity
        view[TURN] += 1
        self.mark()

    @contextmanager
    def within(self, activity: int) -> Iterator[None]:
        """The rank does something else for a while, and then goes on with what it did."""
        before, step = self._view[ACTIVITY], self._view[STEP]
        self.begin(activity, step)
        yield
        self.begin(before, step)


@frozen
class Position:
    """How far a rank is: `marks` of the `activity` are taken, the last one `seconds` ago.

    `ages` are those of the last marks, latest first; `total` counts all marks of the rank, ever, `collectives` those
    that it has begun, and `turn` how often it has turned to something else.
    """

    rank: int
    process: int
    activity: int
    step: int
    marks: int
    total: int
    seconds: float
    ages: tuple[float, ...]
    collectives: int = 0
    turn: int = 0


@cache
def machine() -> int:
    """A number of this machine since it was started: who reads the same one shares its clock and its processes."""
    return int.from_bytes(hashlib.sha256(clock_name().encode()).digest()[:8], "little", signed=True)


def clock_name() -> str:
    """Names the clock of this machine: processes that give the same name can compare their times as they are."""
    return BOOT.read_text().strip() if BOOT.exists() else platform.node()


def read(directory: Path, rank: int) -> Position | None:
    """Where a rank of this machine is; None before it has a recorder.

    What is read while the rank writes may be a mark old, never torn: each number is one aligned word.
    """
    try:
        data = path_of(directory, rank).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < SIZE:
        return None
    words = memoryview(data).cast("q")
    total = words[MARKS]
    if total == 0 or words[MACHINE] != machine():
        return None
    now = monotonic_ns()
    last = range(total - 1, max(total - RING, 0) - 1, -1)
    ages = tuple((now - words[HEAD + number % RING]) / 1e9 for number in last)
    return Position(
        rank,
        words[PROCESS],
        words[ACTIVITY],
        words[STEP],
        total - words[BEGUN],
        total,
        max(0.0, ages[0]),
        ages,
        words[COLLECTIVES],
        words[TURN],
    )
