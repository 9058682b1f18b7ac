"""The flight recorder: what each rank is doing, in a small file that outlives it.

A rank takes a mark whenever it has done something (the same marks in every step, see `stopwatch`): a counter and the
time are written to a memory-mapped file, which costs a fraction of a microsecond and no system call. A watcher reads
the file, and sees how far a rank is even if it hangs, is stopped or is dead: the system keeps pages that were written
to.

On a GPU the host runs ahead, and a mark is one that the device has come to (`follow`).

The file is 64-bit integers: a header (below), then the times of the last `RING` marks, mark n at n modulo `RING`; and
the text of what a device had not done when it last stood still.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import platform
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from time import monotonic_ns, sleep

from attrs import frozen

RING = 256
BOOT = Path("/proc/sys/kernel/random/boot_id")
# The header: the activity, marks so far, marks before this step, the step, the process id, collectives begun so far
# (which tell what rank is behind among ranks of one program at the same mark), the number of activities begun (all
# ranks begin the same ones in the same order, so this can be compared between ranks), and the machine. Times are of the
# machine's clock.
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
NUMBERS, TEXT = 8 * (HEAD + RING), 2048
SIZE = NUMBERS + TEXT
LOOK_SECONDS = 0.05  # between two looks at what a device has done
QUIET_SECONDS = 3.0  # after which a device that has something to do stands still


def path_of(directory: Path, rank: int) -> Path:
    """The file of a rank."""
    return directory / f"flight-{rank}"


class Flight:
    """One rank's recorder. Without a path it records into private memory: nobody watches.

    The path is relative to the open directory `parent`, if given. Raises OSError, also if the disk is full: a page that
    could not be written would end the process.
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
        self._view = memoryview(self._memory)[:NUMBERS].cast("q")
        self._next = self._written = 0
        self._behind: Callable[[], Callable[[], bool]] | None = None
        self._pending: deque[Callable[[], bool]] = deque()
        self._view[PROCESS], self._view[MACHINE] = os.getpid(), machine()
        self.mark()

    @property
    def marks(self) -> int:
        """The number of marks taken."""
        return self._next

    def mark(self) -> None:
        """Take a mark: the rank has done something."""
        self._next += 1
        if self._behind is None:
            self._write()
        else:
            self._pending.append(self._behind())

    def _write(self) -> None:
        view, number = self._view, self._written
        view[HEAD + number % RING] = monotonic_ns()
        view[MARKS] = self._written = number + 1

    def follow(self, behind: Callable[[], Callable[[], bool]], undone: Callable[[], str] = str) -> None:
        """From now on take each mark when a device has come to it. `behind` returns what tells whether all is done that
        was enqueued before, `undone` what is not, for those who read it after the device has stood still.
        """
        self._behind = behind
        Thread(target=self._look, args=(undone,), name="flight", daemon=True).start()

    def _look(self, undone: Callable[[], str]) -> None:
        came = monotonic_ns()
        while True:
            sleep(LOOK_SECONDS)
            while self._pending and self._pending[0]():
                self._pending.popleft()
                self._write()
                came = monotonic_ns()
            if self._pending and monotonic_ns() - came > QUIET_SECONDS * 1e9:
                text = undone().encode()[:TEXT]
                self._memory[NUMBERS:] = text + bytes(TEXT - len(text))
                came = monotonic_ns()

    def collective(self) -> None:
        """Count a collective that the rank begins."""
        self._view[COLLECTIVES] += 1

    def begin(self, activity: int, step: int = 0) -> None:
        """Begin another activity, such as a training step or an evaluation; its marks are counted from here."""
        view = self._view
        view[STEP], view[BEGUN], view[ACTIVITY] = step, self._next, activity
        view[TURN] += 1
        self.mark()

    @contextmanager
    def within(self, activity: int) -> Iterator[None]:
        """Do another activity for a while, then return to the previous one."""
        before, step = self._view[ACTIVITY], self._view[STEP]
        self.begin(activity, step)
        yield
        self.begin(before, step)


@frozen
class Position:
    """How far a rank is: it has taken `marks` marks of the `activity`, the last one `seconds` ago.

    `ages` are those of the last marks, latest first; `total` counts all marks that the rank ever took, `collectives`
    those it has begun, and `turn` the activities it has begun. `undone` is what its device had not done when it last
    stood still.
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
    undone: str = ""


@cache
def machine() -> int:
    """An id of this machine since its boot: processes that read the same one share its clock and process ids."""
    return int.from_bytes(hashlib.sha256(clock_name().encode()).digest()[:8], "little", signed=True)


def clock_name() -> str:
    """The name of this machine's clock: times of processes that read the same name are comparable."""
    return BOOT.read_text().strip() if BOOT.exists() else platform.node()


def read(directory: Path, rank: int) -> Position | None:
    """The position of a rank of this machine; None before it has a recorder.

    What is read while the rank writes may be one mark old but is never torn: each number is an aligned word.
    """
    try:
        data = path_of(directory, rank).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < SIZE:
        return None
    words = memoryview(data)[:NUMBERS].cast("q")
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
        data[NUMBERS:].rstrip(b"\0").decode(errors="ignore"),
    )
