"""Weights & Biases: `WANDB_PROJECT`, `WANDB_MODE` and its other variables say where to."""

from __future__ import annotations

import os

import wandb

from partita.runtime.metrics import MetricsRecord, numbers
from partita.runtime.tracking.tracker import TrackedRun, Tracker, TrackerKind, register

# In its metrics: steps of its own would have to grow, and an evaluation has the number of the step before it.
STEP = "step"


class Wandb(Tracker):
    """One run there, which a resumed run continues."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "partita"),
            name=run.name,
            id=run.identity,
            resume=None if run.identity is None else "allow",
            dir=str(run.directory),
            config=dict(run.facts),
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric=STEP)
        self.identity = str(self._run.id)

    def log(self, record: MetricsRecord) -> None:
        """One row."""
        self._run.log({STEP: record["step"], **numbers(record)})

    def close(self) -> None:
        """End the run, and wait until it is uploaded."""
        self._run.finish()


register(TrackerKind("wandb", Wandb))
