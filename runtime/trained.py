"""Training from Python: runs a file with all ranks in this process, and returns the results."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.spec import Spec
from partita.runtime.checkpoint.checkpoints import Resumed
from partita.runtime.checkpoint.settings import run_directory, settings_of
from partita.runtime.data.binding import bind
from partita.runtime.in_process import run_in_process
from partita.runtime.pace import Slow
from partita.runtime.rank import prepare
from partita.runtime.run_directory import RunDirectory
from partita.runtime.start import begin
from partita.runtime.telemetry import Recorder
from partita.runtime.training import StepResult


class Trained(list[dict[str, Any]]):
    """The records of the steps done, and their results.

    `parameters` are the trained model's full tensors, by full name. `checkpoints` is the directory of the run's
    checkpoints, None if the file asks for none. `resumed` is the step after which the run resumed, None if it began at
    the first; records are of later steps only.
    """

    def __init__(
        self,
        records: Iterable[dict[str, Any]],
        parameters: Mapping[str, torch.Tensor],
        checkpoints: Path | None,
        resumed: int | None,
    ) -> None:
        super().__init__(records)
        self.parameters = parameters
        self.checkpoints = checkpoints
        self.resumed = resumed


def train(given: Spec, folder: Path, run_dir: str | Path | None = None, allow_python: bool = False) -> Trained:
    """Train a file of a folder, with checkpoints as `partita run` makes them.

    Without checkpoints, nothing is written except to a `run_dir`. Raises Refused and BadStep.
    """
    plan = prepare(given, allow_python=allow_python)
    directory = run_directory(given.name, run_dir)
    settings = settings_of(given, directory, folder)
    data = bind(plan.program, plan.train, folder)
    plan = plan.evaluating(data.rows)
    for doubt in data.doubts:
        _warn_of(doubt)
    with ExitStack() as stack:
        told = _Records(None)
        if run_dir is not None or settings is not None:
            try:
                opened = stack.enter_context(RunDirectory.open(directory))
                warning = begin(opened, given, plan.program, settings, data.files, None)
            except OSError as error:
                raise refuse("E0802", f"cannot write to {directory}: {error.strerror}") from error
            if warning is not None:
                _warn_of(warning)
            told = _Records(opened)
        stack.callback(told.recorder.close)
        run, _ = run_in_process(plan, data.dataset, settings, told, _warn_of, data.files, strict=False)
    return Trained(told.records, run.parameters(), settings.path if settings else None, told.after)


class _Records:
    """An `Observer` that keeps a record of each step, and writes it if there is a directory."""

    def __init__(self, directory: RunDirectory | None) -> None:
        self.recorder = Recorder(directory, _warn)
        self.records: list[dict[str, Any]] = []
        self.after: int | None = None

    def resumed(self, found: Resumed) -> None:
        """Records begin after a checkpoint."""
        self.after = found.step
        self.recorder.resumed(found.step)

    def step(self, result: StepResult) -> None:
        """Add a record."""
        self.recorder.step(result)
        self.records.append(
            {
                "step": result.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": result.learning_rate,
                **result.metrics,
                **result.more,
            }
        )

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Add the evaluation to its step's record."""
        self.recorder.evaluation(step, loss, metrics)
        self.records[-1] |= {"eval_loss": loss, **{f"eval_{name}": value for name, value in metrics.items()}}

    def slow(self, step: int, ranks: Sequence[Slow]) -> None:
        """Never called: no rank is slow if all are in one process."""


def _warn_of(diagnostic: Diagnostic) -> None:
    _warn(diagnostic.render())


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
