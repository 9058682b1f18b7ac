"""MLflow: `MLFLOW_TRACKING_URI` says where to, `MLFLOW_EXPERIMENT_NAME` under which experiment."""

from __future__ import annotations

import os
import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from partita.runtime.metrics import MetricsRecord, numbers
from partita.runtime.tracking.tracker import TrackedRun, Tracker, TrackerKind, register

MAX_METRICS = 1000  # in one request, by MLflow's REST API
LONGEST_PARAM = 6000  # characters


class Mlflow(Tracker):
    """One run there, which a resumed run continues. Records are sent together."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        if run.identity is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "partita")
            existing = self._client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing else self._client.create_experiment(name)
            self.identity = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
            facts = [Param(name, text[:LONGEST_PARAM]) for name, text in run.facts.items()]
            self._client.log_batch(self.identity, params=facts)
        else:
            self.identity = run.identity
            self._client.update_run(self.identity, status="RUNNING")
        self._metrics: list[Metric] = []

    def log(self, record: MetricsRecord) -> None:
        """Its numbers, to be sent."""
        milliseconds = int(record.get("unix_time", time.time()) * 1000)
        for name, value in numbers(record).items():
            self._metrics.append(Metric(name, value, milliseconds, record["step"]))
            if len(self._metrics) == MAX_METRICS:
                self.flush()

    def flush(self) -> None:
        """Send what is collected."""
        if self._metrics:
            self._client.log_batch(self.identity, metrics=self._metrics)
            self._metrics = []

    def close(self) -> None:
        """Send the rest, and end the run."""
        self.flush()
        self._client.set_terminated(self.identity)


register(TrackerKind("mlflow", Mlflow))
