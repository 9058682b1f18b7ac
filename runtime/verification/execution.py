"""Runs the proxy of a file on all its ranks and compares it with the single-device program (`experiment`).

If the two differ, both run again, traced, and the first value that differs is reported with its source line and layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from attrs import evolve, field, frozen

from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Spec
from partita.dsl.syntax.source import Span
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
from partita.runtime.verification.figures import BLUR, LEEWAY, TOLERANCE, TRIALS, Figure, Figures, compare, error_of
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
    errors: dict[str, float] = {}
    blurred_: dict[str, float] = {}
    try:
        actual = figures(plan, experiment.rates)
    # The partitioned program is under test: whatever it raises is a finding.
    except Exception as error:
        problems.append(_failure(experiment, error))
    else:
        if plan.training.spread is not None:
            # What is put together from the parts of an axis that all ranks share has a name of its own.
            expected = {what: each for what, each in expected.items() if what in actual or not read_by_updates(what)}
        errors = compare(actual, expected)
        wrong = [what for what, error in errors.items() if not error <= TOLERANCE]
        if wrong:
            changes = _changes(experiment, expected)
            wrong = [what for what in wrong if not errors[what] <= LEEWAY * changes[what]]
            blurred_ = {what: change for what, change in changes.items() if change > BLUR and what not in wrong}
            lost = [what for what in blurred_ if essential(what)]
            if wrong:
                problems.append(_difference(experiment, wrong, errors))
            elif lost:
                raise blurred(plan.spec, lost[0], changes[lost[0]])
    meaning = compare_meaning(experiment.point, HELP)
    compared = {what: error for what, error in errors.items() if what not in blurred_}
    worst = max(compared, key=lambda what: compared[what], default=None)
    return Execution(
        {name: axis.size for name, axis in plan.spec.axes.items()},
        plan.program.mesh.axes,
        plan.ranks,
        len(plan.program.stages),
        plan.program.microbatches,
        len(expected) - len(blurred_),
        compared[worst] if worst else 0.0,
        worst,
        perf_counter() - start,
        meaning,
        blurred_,
        tuple(problems),
        plan.program.slices,
    )


def _changes(experiment: Experiment, expected: Figures) -> dict[str, float]:
    """By how much of its scale each quantity on a single device changes with last digits, of the parameters and of what
    functions that jump read.
    """
    changes = dict.fromkeys(expected, 0.0)
    for trial in range(1, TRIALS + 1):
        try:
            errors = compare(figures(rounded(experiment, trial), experiment.rates, trial=trial), expected)
        except NotFinite:
            errors = dict.fromkeys(expected, float("inf"))
        changes = {what: max(change, errors[what]) for what, change in changes.items()}
    return changes


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


def _difference(experiment: Experiment, wrong: list[str], errors: Mapping[str, float]) -> Diagnostic:
    """Reports what differs, and the first value that does."""
    notes = [f"{what} differs by {errors[what]:.1e} of its scale" for what in wrong[:3]]
    if len(wrong) > 3:
        notes.append(f"and {len(wrong) - 3} more of {len(errors)}")
    culprit = _culprit(experiment)
    if culprit is None:
        # Each value is right, but not what the end of the step makes of them.
        message = f"{wrong[0]} differs from the single-device program"
        return Diagnostic("E0702", message, _place(experiment.plan.training, wrong[0]), tuple(notes), HELP)
    value = culprit.value
    laid = f"{value.name}: {value.type} on each rank, laid out as {value.layout}"
    if culprit.where:
        laid += f"; wrong at {culprit.where}"
    message = f"`{value.name}` is the first value that differs from the single-device program"
    return Diagnostic("E0702", message, culprit.node.span, (laid, *notes), HELP)


def _culprit(experiment: Experiment) -> Culprit | None:
    """Run both programs again, traced, and find the first value that differs."""
    recorders = Recorder(), Recorder()
    for plan, recorder in zip((experiment.plan, experiment.single), recorders, strict=True):
        figures(evolve(plan, training=traced(plan.training)), experiment.rates, recorder)

    def differs(actual: torch.Tensor, expected: torch.Tensor) -> bool:
        return not error_of(Figure(actual.double()), Figure(expected.double())) <= TOLERANCE

    actual, expected = (recorder.made for recorder in recorders)
    return first_difference(experiment.plan.training, actual, experiment.single.training, expected, differs)


def _place(state: Compilation, what: str) -> Span | None:
    """The location of the parameter or the value that a quantity is about."""
    named = {each.name: each.span for each in state.forward.parameters}
    named |= {value.name: node.span for node in state.forward.nodes for value in node.outputs}
    return next((span for name, span in named.items() if f"`{name}`" in what), None)
