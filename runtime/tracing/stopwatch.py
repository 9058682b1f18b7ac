"""When a rank did what: timestamps taken during training, stored in one file per rank.

A step takes the same marks every time, in the same order, so a mark is just a number stored in the next element of a
preallocated array: no names, no allocation, well under a microsecond. On a GPU a mark is an event in the compute
stream, and tells when the device got there, not the host; events are read between steps.

The first step of a run is not recorded: it allocates memory and uses connections for the first time. The next
`MAX_STEPS` are, and the file is written when they are done, or the run is.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from attrs import frozen

from partita.runtime.tracing.flight import clock_name

WARM_UP_STEPS, MAX_STEPS = 1, 20
# Marks of a step by index from its start or end: its batch is requested; it is ready for its instructions, each of
# which has a mark; its gradients are reduced, those of tied parameters exchanged, its statistics computed, those summed
# over all ranks, and its parameters updated.
BEGUN, READY = 0, 1
REDUCED, EXCHANGED, FINISHED, SUMMED, UPDATED = -5, -4, -3, -2, -1
MARKS_OF_A_STEP = 7


class Stopwatch:
    """Records the marks of one rank's steps: `begin` at the start of each, then `mark` while `recording`."""

    def __init__(self, path: Path, instructions: int, device: torch.device) -> None:
        self.path = path
        self.recording = False
        self._marks = instructions + MARKS_OF_A_STEP
        self._steps: list[int] = []
        self._begun = 0
        self._clock = _EventClock(self._marks) if device.type == "cuda" else _HostClock(self._marks)
        self.mark = self._clock.mark

    def begin(self, step: int) -> None:
        """Begin a step, and take its first mark if it is to be recorded."""
        if self.recording and len(self._steps) == MAX_STEPS:
            self.finish()
        self._begun += 1
        self.recording = WARM_UP_STEPS < self._begun <= WARM_UP_STEPS + MAX_STEPS
        if self.recording:
            self._steps.append(step)
            self._clock.begin()
            self.mark()

    def discard(self) -> None:
        """Forget the step that has begun: it begins again."""
        if self.recording:
            self._steps.pop()
            self._clock.discard()
        self._begun -= 1

    def finish(self) -> None:
        """Write the record, unless that is done already or there are no steps."""
        if self.recording:
            self.recording = False
            times = np.array(self._clock.read(), dtype=np.int64).reshape(len(self._steps), self._marks)
            Marks(tuple(self._steps), times, clock_name()).write(self.path)


class _HostClock:
    """Marks on the host's clock, which all processes of a machine share."""

    def __init__(self, marks: int) -> None:
        self._times = array("q", bytes(8 * marks * MAX_STEPS))
        self._next = self._begun = 0

    def begin(self) -> None:
        """Remember where the step begins."""
        self._begun = self._next

    def discard(self) -> None:
        """Forget the marks of the step that has begun."""
        self._next = self._begun

    def mark(self) -> None:
        """Take a mark."""
        self._times[self._next] = perf_counter_ns()
        self._next += 1

    def read(self) -> Sequence[int]:
        """All marks so far, in nanoseconds."""
        return self._times[: self._next]


class _EventClock:
    """Marks in the current stream of the GPU, mapped to the host's clock at a moment when the device was idle.

    Times between events are 32-bit floats, exact only within a step: so steps are chained by their first marks.
    """

    def __init__(self, marks: int) -> None:
        self._events = [_event() for _ in range(marks)]
        self._next = 0
        self._times: list[int] = []
        self._first = _event()  # at `_first_ns` of the host's clock
        torch.cuda.synchronize()
        self._first.record()
        self._first.synchronize()
        self._first_ns = perf_counter_ns()

    def begin(self) -> None:
        """Read the events of the previous step, to reuse them."""
        if self._next:
            self._events[-1].synchronize()
            first = self._events[0]
            self._first_ns += _ns(self._first, first)
            self._times.extend(self._first_ns + _ns(first, event) for event in self._events)
            self._first, self._events[0] = first, self._first
            self._next = 0

    def discard(self) -> None:
        """Forget the marks of the step that has begun."""
        self._next = 0

    def mark(self) -> None:
        """Record an event."""
        self._events[self._next].record()
        self._next += 1

    def read(self) -> Sequence[int]:
        """All marks so far, in nanoseconds."""
        self.begin()
        return self._times


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _ns(start: Any, end: Any) -> int:
    return round(float(start.elapsed_time(end)) * 1e6)


@frozen(eq=False)
class Marks:
    """One rank's record: `times[i, j]` is mark j of `steps[i]`, in nanoseconds of the clock named `clock`."""

    steps: tuple[int, ...]
    times: np.ndarray
    clock: str

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        aside = path.with_suffix(".new")
        with aside.open("wb") as file:
            np.savez(file, steps=np.array(self.steps, dtype=np.int64), times=self.times, clock=np.array(self.clock))
        os.replace(aside, path)

    @classmethod
    def read(cls, path: Path) -> Marks:
        """Read a file that `write` wrote. Raises FileNotFoundError."""
        with np.load(path, allow_pickle=False) as archive:
            return cls(tuple(archive["steps"].tolist()), archive["times"], str(archive["clock"]))


def path_of(directory: Path, rank: int) -> Path:
    """The file of a rank."""
    return directory / f"rank-{rank}.npz"
