"""Training from Python: runs a file with all ranks in this process, and returns the results; and trained models."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from partita.dsl.config.python_calls import called_from_python, in_python
from partita.dsl.diagnostic import Diagnostic, refuse
from partita.dsl.reprs import Pictured, count, outline
from partita.dsl.spec import Spec
from partita.runtime.addresses import PathOrUrl, place_of
from partita.runtime.bad_steps import BadStep
from partita.runtime.checkpoint.checkpoints import Resumed
from partita.runtime.checkpoint.settings import run_directory, settings_of
from partita.runtime.data.binding import bind
from partita.runtime.in_process import run_in_process
from partita.runtime.inference.predicting import Predictor
from partita.runtime.inference.weights import Weights, load_weights
from partita.runtime.outputs import names_of
from partita.runtime.rank import prepare
from partita.runtime.run_directory import RunDirectory
from partita.runtime.start import begin
from partita.runtime.supervision.statuses import going_on
from partita.runtime.supervision.termination import Termination
from partita.runtime.telemetry import Recorder
from partita.runtime.training import Observer, StepResult


class Trained(Pictured, list[dict[str, Any]]):
    """The records of the steps done, and their results.

    `parameters` are the trained model's full tensors, by full name. `checkpoints` is the directory of the run's
    checkpoints, None if the file asks for none. `resumed` is the step after which the run resumed, None if it began at
    the first; records are of later steps only.

    `outputs` computes outputs of the model with these parameters.
    """

    def __init__(
        self,
        records: Iterable[dict[str, Any]],
        parameters: Mapping[str, torch.Tensor],
        checkpoints: PathOrUrl | None,
        resumed: int | None,
        spec: Spec,
        allow_python: bool,
    ) -> None:
        super().__init__(records)
        self._given = spec
        self._allow_python = allow_python
        self._predictors: dict[tuple[str, ...], Predictor] = {}
        self.parameters = parameters
        self.checkpoints = checkpoints
        self.resumed = resumed

    def __repr__(self) -> str:
        last = self[-1].get("loss") if self else None
        loss = f"loss {last:.4g}" if isinstance(last, float) else None
        return outline("Training of", self._given.source.name, (count(len(self), "step"), loss))

    @called_from_python
    def outputs(self, inputs: Mapping[str, torch.Tensor], names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """The model's outputs of these `names`, or all, for inputs by name, with any number of rows.

        Raises Refused if there are none, and ValueError or TypeError for inputs that are missing or do not fit.
        """
        requested = names_of(names)
        if requested not in self._predictors:
            self._predictors[requested] = Predictor(self._given, requested, self._allow_python)
            self._predictors[requested].outputs.set_parameters(self.parameters)
        return self._predictors[requested](inputs)


class TrainedModel:
    """A trained model as a function of its inputs by name. `parameters` are the tensors that it needs, by full name;
    they are from the `checkpoint` of a `step`.
    """

    def __init__(self, predictor: Predictor, weights: Weights) -> None:
        self._predictor = predictor
        (rank,) = predictor.outputs.ranks.ranks
        self.parameters: Mapping[str, torch.Tensor] = dict(rank.memory.masters)
        self.checkpoint = weights.path
        self.step = weights.step
        self._name = predictor.outputs.model.name

    def __repr__(self) -> str:
        return outline("Trained model", self._name, (f"step {self.step}", count(len(self.parameters), "parameter")))

    @called_from_python
    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs by name, for any number of rows. Raises ValueError or TypeError for inputs that are missing or do
        not fit.
        """
        return self._predictor(inputs)


def load_model(
    spec: Spec,
    folder: Path,
    run: str | Path | None = None,
    names: Sequence[str] = (),
    weights: str = "trained",
    allow_python: bool = False,
) -> TrainedModel:
    """The model of a file of a folder, with the weights of its run or those in `run`. Raises Refused."""
    predictor = Predictor(spec, names, allow_python)
    place = place_of(str(run)) if run is not None else None
    return TrainedModel(predictor, load_weights(spec, folder, predictor.outputs.ranks, _warn_of, place, weights))


def train(
    spec: Spec,
    folder: Path,
    run_dir: str | Path | None = None,
    allow_python: bool = False,
    changed_data: bool = False,
    on_step: Callable[[dict[str, Any]], object] | None = None,
) -> Trained:
    """Train a file of a folder, with checkpoints as `partita run` makes them. `on_step` gets each step's record.

    Without checkpoints, nothing is written except to a `run_dir`. Raises Refused and BadStep.
    """
    plan = prepare(spec, allow_python=allow_python)
    directory = run_directory(spec.name, run_dir)
    settings = settings_of(spec, directory, folder)
    if settings is not None:
        settings = evolve(settings, changed_data=changed_data)
    data = bind(plan.program, plan.train, folder, allow_python)
    plan = plan.evaluating(data.rows).writing(folder).answering(data.dataset, folder, allow_python=allow_python)
    for doubt in (*data.warnings, *plan.warnings):
        _warn_of(doubt)
    with ExitStack() as stack:
        observer = _Records(None, on_step)
        if run_dir is not None or settings is not None:
            try:
                opened = stack.enter_context(RunDirectory.open(directory))
                warning = begin(opened, spec, plan.program, settings, data.files, None)
            except OSError as error:
                raise refuse("E0802", f"cannot write to {directory}: {error.strerror}") from error
            if warning is not None:
                _warn_of(warning)
            observer = _Records(opened, on_step)
        stack.callback(observer.recorder.close)
        with Termination(settings is not None, numbers=(signal.SIGINT,)) as termination:
            try:
                run, _ = run_in_process(
                    plan,
                    data.dataset,
                    settings,
                    observer,
                    _warn_of,
                    data.files,
                    strict=False,
                    stop_requested=termination.stop_requested,
                )
            except BadStep as wrong:
                if observer.recorder.directory is not None:
                    observer.recorder.directory.fail(str(wrong))
                raise
    if termination.stop_requested():
        saved = run.ranks[0].saved
        raise KeyboardInterrupt(*([going_on(saved, "call")] if saved is not None else []))
    path = settings.path if settings else None
    return Trained(observer.records, run.trained(), path, observer.after, spec, allow_python)


class _Records(Observer):
    """An `Observer` that keeps a record of each step, and writes it if there is a directory."""

    def __init__(
        self, directory: RunDirectory | None, on_step: Callable[[dict[str, Any]], object] | None = None
    ) -> None:
        self.on_step = on_step
        self.recorder = Recorder(directory, _warn)
        self.records: list[dict[str, Any]] = []
        self.after: int | None = None

    def resumed(self, checkpoint: Resumed) -> None:
        """Records begin after a checkpoint."""
        self.after = checkpoint.step
        self.recorder.resumed(checkpoint.step)

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
        if self.on_step is not None:
            self.on_step(self.records[-1])

    def evaluation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Add the evaluation to its step's record."""
        self.recorder.evaluation(step, loss, metrics)
        self.records[-1] |= {"eval_loss": loss, **{f"eval_{name}": value for name, value in metrics.items()}}

    def sample(self, step: int, text: str) -> None:
        """Add the text to its step's record."""
        self.recorder.sample(step, text)
        self.records[-1]["sample"] = text


def _warn_of(diagnostic: Diagnostic) -> None:
    _warn(in_python(diagnostic).render())


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
