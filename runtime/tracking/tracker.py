"""What a tracker is: it takes the numbers of a run's records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import nan
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from partita.dsl.registry import Registry
from partita.runtime.metrics import MetricsRecord

NOT_NUMBERS = ("step", "unix_time")


@frozen
class TrackedRun:
    """What a tracker is told of a run: its name, its directory, facts in words (the file's text, and overrides), and
    the `identity` under which the tracker knows it already: None for a new run.
    """

    name: str
    directory: Path
    facts: Mapping[str, str]
    identity: str | None


class Tracker(Protocol):
    """A tracker of one run. Its methods may raise anything, and take as long as they like."""

    @property
    def identity(self) -> str:
        """What finds the run again when it is resumed."""

    def log(self, record: MetricsRecord) -> None:
        """Take a record of `metrics.jsonl`; see `numbers`."""

    def flush(self) -> None:
        """Keep what was taken, so that it survives a kill."""

    def close(self) -> None:
        """End the run."""


@frozen
class TrackerKind:
    """A tracker by name, which is that of the extra that it needs, too."""

    name: str
    open: Callable[[TrackedRun], Tracker]


TRACKERS: Registry[TrackerKind] = Registry(
    "tracker", "partita.runtime.tracking", ("tensorboard", "wandb", "mlflow", "trackio")
)
register = TRACKERS.register


def numbers(record: MetricsRecord) -> dict[str, float]:
    """The numbers of a record by name, those of a list as `NAME.0`, and NaN for what was not finite."""
    return dict(_numbers(record))


def _numbers(record: MetricsRecord) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name in NOT_NUMBERS:
            continue
        if isinstance(value, list):
            yield from ((f"{name}.{i}", each) for i, each in enumerate(map(_number, value)) if each is not None)
        else:
            number = _number(value)
            if number is not None:
                yield name, number


def _number(value: Any) -> float | None:
    if value is None:
        return nan
    return float(value) if isinstance(value, int | float) else None
