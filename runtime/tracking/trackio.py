"""Trackio: a local database in `TRACKIO_DIR`; `trackio show` shows it, `TRACKIO_SPACE_ID` syncs it to a Space."""

from __future__ import annotations

import os
import secrets

import trackio

from partita.runtime.metrics import MetricsRecord, numbers
from partita.runtime.tracking.tracker import TrackedRun, Tracker, TrackerKind, register


class Trackio(Tracker):
    """One run there, by name, which a resumed run continues."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "partita"),
            name=run.identity or f"{run.name}-{secrets.token_hex(3)}",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config=dict(run.facts),
            resume="never" if run.identity is None else "allow",
            embed=False,
        )
        self.identity = str(self._run.name)

    def log(self, record: MetricsRecord) -> None:
        """One row."""
        self._run.log(numbers(record), step=record["step"])

    def close(self) -> None:
        """End the run, and wait until it is written."""
        self._run.finish()


register(TrackerKind("trackio", Trackio))
