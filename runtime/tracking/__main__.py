"""The process that follows a run for its trackers: `python -m partita.runtime.tracking DIRECTORY FILE NAME …`.

`FILE` is the `metrics.jsonl` of an earlier run, which is not followed. The process ends when its standard input does,
which the run holds open: then it hands over what is left, for at most `FINISH_SECONDS`.

`tracking.json` in the run's directory keeps under which identity each tracker knows the run, and the last step that it
was given, so that a resumed run goes on there, and no step is given twice: what a run that was killed computes again is
the same.
"""

from __future__ import annotations

import json
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from partita.runtime.metrics import MetricsReader, MetricsRecord, file_of, numbers
from partita.runtime.run_directory import RunDirectory
from partita.runtime.tracking.launch import FINISH_SECONDS, text_of
from partita.runtime.tracking.tracker import TRACKERS, TrackedRun, Tracker

KEPT = "tracking.json"
MAX_KEPT = 1 << 24
POLL_SECONDS = 1.0


@define(eq=False)
class Hand:
    """Hands records to one tracker, which is opened at the first. After its first failure, which is said, it is left
    alone. `after` and `evaluated` are the last step, and the last evaluation, that it was given.
    """

    name: str
    run: TrackedRun
    after: int = 0
    evaluated: int = 0
    failed: bool = False
    _tracker: Tracker | None = field(default=None, init=False)

    def take(self, records: Sequence[MetricsRecord]) -> None:
        """Hand over those that the tracker does not have."""
        if self.failed:
            return
        try:
            for record in records:
                self._take(record)
            if self._tracker is not None:
                self._tracker.flush()
        except Exception as error:  # whatever others have written may raise
            self._fail(error)

    def _take(self, record: MetricsRecord) -> None:
        step, late = record["step"], "eval_loss" in record
        if step <= (self.evaluated if late else self.after) or not numbers(record):
            return
        if self._tracker is None:
            self._tracker = TRACKERS[self.name].open(self.run)
            self.run = evolve(self.run, identity=self._tracker.identity)
        self._tracker.log(record)
        if late:
            self.evaluated = step
        else:
            self.after = step

    def close(self) -> None:
        """End the run at the tracker."""
        try:
            if self._tracker is not None and not self.failed:
                self._tracker.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failed = True
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"partita: tracking by {self.name} failed: {why}; the run continues", file=sys.stderr, flush=True)

    def kept(self) -> dict[str, Any]:
        """What is kept of it in `tracking.json`."""
        return {"identity": self.run.identity, "after": self.after, "evaluated": self.evaluated}


@define(eq=False)
class Following:
    """Follows the metrics of a directory's run for trackers."""

    directory: RunDirectory
    names: Sequence[str]
    _reader: MetricsReader = field(init=False)
    _hands: Sequence[Hand] = field(default=(), init=False)
    _first: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = MetricsReader(self.directory.path)

    def look(self) -> bool:
        """Hand over what is new; whether there was anything."""
        records = self._reader.read()
        if not records:
            return False
        if self._reader.first != self._first:  # another run, which has begun anew
            self.close()
            self._first = self._reader.first
            self._hands = self._begun()
        for hand in self._hands:
            hand.take(records)
        trackers = {**self._known(), **{hand.name: hand.kept() for hand in self._hands}}
        content = {"first": self._first, "trackers": trackers}
        self.directory.put(KEPT, json.dumps(content, indent=2).encode() + b"\n")
        return True

    def close(self) -> None:
        """End the run at the trackers."""
        for hand in self._hands:
            hand.close()

    def _begun(self) -> list[Hand]:
        """A hand for each tracker, which goes on if the tracker knows the run: its file has the same first line."""
        record = self.directory.record()
        origin = record.origin if record is not None else None
        facts = {} if record is None or origin is None else {"text": record.files.get(origin.file, "")}
        facts |= {"overrides": "\n".join(origin.overrides)} if origin is not None and origin.overrides else {}
        known = self._known()
        hands = []
        for name in self.names:
            saved = known.get(name, {})
            identity = saved.get("identity")
            run = TrackedRun(self.directory.path.resolve().name, self.directory.path, facts, identity)
            hands.append(Hand(name, run, *((saved["after"], saved["evaluated"]) if identity is not None else ())))
        return hands

    def _known(self) -> Mapping[str, Any]:
        """What `tracking.json` says of the trackers of this run; nothing if it is missing, not valid, or of another."""
        data = self.directory.read(KEPT, MAX_KEPT)
        try:
            content = json.loads(data) if data is not None else {}
            valid: bool = all(
                isinstance(each["identity"], str | None)
                and isinstance(each["after"], int)
                and isinstance(each["evaluated"], int)
                for each in content["trackers"].values()
            )
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            return {}
        return content["trackers"] if valid and content.get("first") == self._first else {}


def main(arguments: Sequence[str]) -> None:
    """Follow the run of a directory until standard input ends."""
    path, before, *names = arguments
    directory = Path(path)
    with RunDirectory.open(directory) as opened:
        following = Following(opened, names)
        ended = False
        while not ended:
            ended = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0])
            if ended:
                signal.alarm(FINISH_SECONDS)
            if text_of(file_of(directory)) != before:
                before = ""  # once it is replaced, its number may be another file's
                while following.look():
                    pass
        following.close()


if __name__ == "__main__":
    main(sys.argv[1:])
