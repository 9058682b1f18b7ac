"""The numbers of a run, gathered from the records of `metrics.jsonl`."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from math import isfinite
from statistics import median

from attrs import define, field, frozen

from partita.runtime.metrics import MetricsRecord, number_of, numbers

EVAL = "eval_"
BY_RANK = "peak_memory_by_rank"
MOST_EVENTS = 200
# Steps whose median is the usual one: the last that many.
RECENT = 50


@define(eq=False)
class Series:
    """A number by step. What is not finite is NaN."""

    steps: array[int] = field(factory=lambda: array("q"))
    values: array[float] = field(factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        self.steps.append(step)
        self.values.append(value)

    @property
    def last(self) -> float | None:
        """The last value; None if there is none, or it is not finite."""
        return self.values[-1] if self.values and isfinite(self.values[-1]) else None

    @property
    def usual(self) -> float | None:
        """The median of the last values."""
        finite = [value for value in self.values[-RECENT:] if isfinite(value)]
        return median(finite) if finite else None


@frozen
class Event:
    """Something that happened in a run in words, or a text that it has written."""

    step: int
    text: str


@define(eq=False)
class History:
    """All numbers of a run by name, its evaluations, what it has written, and what happened."""

    series: dict[str, Series] = field(factory=dict)
    evaluations: list[MetricsRecord] = field(factory=list)
    samples: list[Event] = field(factory=list)
    events: list[Event] = field(factory=list)
    peaks: list[int] = field(factory=list)  # bytes by rank
    step: int = 0
    began: float | None = None  # Unix times
    last: float | None = None
    recent: deque[tuple[int, float]] = field(factory=lambda: deque(maxlen=RECENT))  # steps and their times
    left_out: int = 0  # events

    def add(self, records: Iterable[MetricsRecord]) -> None:
        """Add records, in their order."""
        for record in records:
            self._add(record)

    def _add(self, record: MetricsRecord) -> None:
        step = record["step"]
        self.step = max(self.step, step)
        time = number_of(record.get("unix_time"))
        if time is not None and isfinite(time):
            self.began = time if self.began is None else self.began
            self.last = time
            self.recent.append((step, time))
        for name, value in numbers(record).items():
            if not name.startswith(BY_RANK):
                self.series.setdefault(name, Series()).add(step, value)
        if f"{EVAL}loss" in record:
            self.evaluations.append(record)
        if isinstance(record.get("sample"), str):
            self.samples.append(Event(step, record["sample"]))
        peaks = record.get(BY_RANK)
        if isinstance(peaks, list) and all(isinstance(each, int) and 0 <= each < 1 << 60 for each in peaks):
            self.peaks = peaks
        for text in _happened(record):
            if len(self.events) < MOST_EVENTS:
                self.events.append(Event(step, text))
            else:
                self.left_out += 1

    def seconds_left(self, steps: int) -> float | None:
        """How long the other ones of `steps` take, if they are as fast as the last ones; None if that is not known."""
        (first, since), (last, now) = (self.recent[0], self.recent[-1]) if self.recent else ((0, 0.0), (0, 0.0))
        return (now - since) / (last - first) * (steps - last) if first < last < steps and since < now else None

    @property
    def names(self) -> list[str]:
        """The names of training's numbers, in the order of the file; those of evaluations alone come last."""
        named = [name for name in self.series if not name.startswith(EVAL)]
        alone = [name.removeprefix(EVAL) for name in self.series if name.startswith(EVAL)]
        return list(dict.fromkeys((*named, *alone)))


def _happened(record: MetricsRecord) -> Iterable[str]:
    """What a record says besides numbers."""
    if isinstance(record.get("bad"), str):
        rows = record.get("rows")
        batch = ", ".join(map(str, rows[:8])) if isinstance(rows, list) else ""
        yield f"left out: {record['bad']}" + (f"; its batch: {batch}" if batch else "")
    if isinstance(record.get("rewound_to"), int):
        yield f"back to step {record['rewound_to']}"
    slow = record.get("slow_ranks")
    for each in slow if isinstance(slow, list) else ():
        if isinstance(each, Mapping):
            cost = number_of(each.get("cost")) or 0.0
            yield f"rank {each.get('rank')} is slow in {each.get('action')} and cost {cost:.0%} of the time"
