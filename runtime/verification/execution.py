"""Runs the proxy of a file on all its ranks and compares it with the single-device program (`experiment`).

If the two differ, both run again, traced, and the first value that differs is reported with its source line and layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch
from attrs import evolve, field, frozen

from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Spec
from partita.runtime.bad_steps import NotFinite
from partita.runtime.tracing.recording import Culprit, Recorder, first_difference, traced
from partita.runtime.verification.experiment import (
    Experiment,
    Inconclusive,
    blurred,
    essential,
    experiments,
    figures,
    never_finite,
    read_by_updates,
    rounded,
)
from partita.runtime.verification.figures import TOLERANCE, Figure, Figures, Judged, error_of, judged, place_of
from partita.runtime.verification.meaning import Meaning, compare_meaning

HELP = "this is a bug in Partita, not in the file: please report it with the file"


@frozen(eq=False)
class Execution:
    """The result of running a proxy. `sizes` and `mesh` are the proxy's; `worst` names the tensor with the `largest`
    error, which is relative to its scale. `blurred` are quantities that rounding decides, with how much it changes
    them; they were not `compared`. `slices` are those of each part of the batch, which are counted as microbatches.
    `meaning` is what came of comparing the single device with what the file means.
    """

    sizes: Mapping[str, int]
    mesh: tuple[tuple[str, int], ...]
    ranks: int
    stages: int
    microbatches: int
    compared: int
    largest: float
    worst: str | None
    seconds: float
    meaning: Meaning
    blurred: Mapping[str, float] = field(factory=dict)
    differences: tuple[Diagnostic, ...] = field(default=())
    slices: int = 1

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Everything that is wrong."""
        return (*self.differences, *self.meaning.diagnostics)

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """The object `execution` of `verify --json`."""
        return {
            "passed": self.passed,
            "sizes": dict(self.sizes),
            "mesh": dict(self.mesh),
            "ranks": self.ranks,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "compared": self.compared,
            "largest_error": self.largest,
            "worst": self.worst,
            "seconds": self.seconds,
            "meaning": self.meaning.as_json(),
        }


def verify_execution(spec: Spec, hoist: bool = True, allow_python: bool = False) -> Execution:
    """Run the proxy of a file that compiles, and compare (E0702). `hoist`: the file gathers parameters once per step.

    Raises Refused (E0620) if it needs Python code that is not allowed, and Inconclusive if no proxy is conclusive.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: threads would wait for each other
    reason: Inconclusive | None = None
    try:
        for experiment in experiments(spec, hoist, allow_python):
            try:
                return executed(experiment)
            except Inconclusive as undecided:
                reason = reason or undecided
    finally:
        torch.set_num_threads(threads)
    assert reason is not None
    raise reason


def executed(experiment: Experiment) -> Execution:
    """Run both programs of an experiment, and compare.

    Raises Inconclusive if a step is not finite, or if rounding errors grow beyond what can be compared.
    """
    start = perf_counter()
    plan = experiment.plan
    try:
        expected = figures(experiment.single, experiment.rates)
    except NotFinite as error:
        raise never_finite(plan.spec) from error
    problems: list[Diagnostic] = []
    found = Judged({}, (), {})
    try:
        actual = figures(plan, experiment.rates)
    # The partitioned program is under test: whatever it raises is a finding.
    except Exception as error:
        problems.append(_failure(experiment, error))
    else:
        if plan.training.spread is not None:
            # What is put together from the parts of an axis that all ranks share has a name of its own.
            expected = {what: each for what, each in expected.items() if what in actual or not read_by_updates(what)}
        found = judged(actual, expected, partial(_again, experiment))
        lost = [what for what in found.blurred if essential(what)]
        if found.wrong:
            problems.append(_difference(experiment, found))
        elif lost:
            raise blurred(plan.spec, lost[0], found.blurred[lost[0]])
    meaning = compare_meaning(experiment.point, HELP)
    compared = found.compared
    worst = max(compared, key=lambda what: compared[what], default=None)
    return Execution(
        {name: axis.size for name, axis in plan.spec.axes.items()},
        plan.program.mesh.axes,
        plan.ranks,
        len(plan.program.stages),
        plan.program.microbatches,
        len(expected) - len(found.blurred),
        compared[worst] if worst else 0.0,
        worst,
        perf_counter() - start,
        meaning,
        found.blurred,
        tuple(problems),
        plan.program.slices,
    )


def _again(experiment: Experiment, trial: int) -> Figures:
    """The figures of a single device with other last digits, of the parameters and of what functions that jump read.
    There are none if a step is not finite.
    """
    try:
        return figures(rounded(experiment, trial), experiment.rates, trial=trial)
    except NotFinite:
        return {}


def _failure(experiment: Experiment, error: Exception) -> Diagnostic:
    layout = experiment.plan.spec.layout
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Diagnostic(
        "E0702",
        "the partitioned program fails where the single-device program runs",
        layout.span if layout else None,
        (f"{type(error).__name__}: {lines[0] if lines else 'no message'}", *lines[1:8]),
        HELP,
    )


def _difference(experiment: Experiment, found: Judged) -> Diagnostic:
    """Reports what differs, and the first value that does."""
    culprit = _culprit(experiment)
    if culprit is None:
        # Each value is right, but not what the end of the step makes of them.
        message = f"{found.wrong[0]} differs from the single-device program"
        return Diagnostic("E0702", message, place_of(experiment.plan.training, found.wrong[0]), found.notes, HELP)
    value = culprit.value
    laid = f"{value.name}: {value.type} on each rank, laid out as {value.layout}"
    if culprit.where:
        laid += f"; wrong at {culprit.where}"
    message = f"`{value.name}` is the first value that differs from the single-device program"
    return Diagnostic("E0702", message, culprit.node.span, (laid, *found.notes), HELP)


def _culprit(experiment: Experiment) -> Culprit | None:
    """Run both programs again, traced, and find the first value that differs."""
    recorders = Recorder(), Recorder()
    for plan, recorder in zip((experiment.plan, experiment.single), recorders, strict=True):
        figures(evolve(plan, training=traced(plan.training)), experiment.rates, recorder)

    def differs(actual: torch.Tensor, expected: torch.Tensor) -> bool:
        return not error_of(Figure(actual.double()), Figure(expected.double())) <= TOLERANCE

    actual, expected = (recorder.made for recorder in recorders)
    return first_difference(experiment.plan.training, actual, experiment.single.training, expected, differs)
