"""What a tracker is: it takes the numbers of a run's records (`partita.runtime.metrics`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import frozen

from partita.dsl.registry import Registry
from partita.runtime.metrics import MetricsRecord


@frozen
class TrackedRun:
    """What a tracker is told of a run: its name, its directory, facts in words (the file's text, and overrides), and
    the `identity` under which the tracker knows it already: None for a new run.
    """

    name: str
    directory: Path
    facts: Mapping[str, str]
    identity: str | None


class Tracker(ABC):
    """A tracker of one run. Its methods may raise anything, and take as long as they like."""

    identity: str  # what finds the run again when it is resumed

    @abstractmethod
    def log(self, record: MetricsRecord) -> None:
        """Take a record of `metrics.jsonl`; see `numbers` there."""

    def flush(self) -> None:
        """Keep what was taken, so that it survives a kill: by default, it is kept at once."""
        return

    @abstractmethod
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
