"""An experiment on a file: shrunken, with values that hide nothing, run and measured; the material of `verify`.

The copy (`partita.compiler.shrinking.shrink`) runs on the virtual cluster, at its least helpful, in float64; so does
the same model on one device, in one piece. Parameters begin with random values of order 1, dropout is active, and
gradients that are clipped are so at half their norm: nothing is hidden behind zeros, tiny numbers or a limit that is
never met.

Compared are, of two steps, the loss, the metrics, the gradient norm, every gradient, every parameter after both, and
the loss and metrics of an evaluation. A tensor `a` equals its reference `b` where every element satisfies

    |a - b| <= 1e-10 * max(largest |b|, 1e-4 * unit)

with 1 for the unit, or, for a gradient, the norm of all gradients: one that is zero in exact arithmetic is rounding
noise of the others. Where that does not hold, and the model on one device changes as much when its parameters change by
their last digits, the experiment shows nothing.
"""

from __future__ import annotations

from math import isfinite

import torch
from attrs import evolve, frozen

from partita.compiler.lowering.resized import Initial, as_declared, of_order_one, unless_zero
from partita.compiler.program import Program
from partita.compiler.shrinking.shrink import shrink, single
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.spec import Call, Spec
from partita.runtime.data.dataset import Input
from partita.runtime.data.random import Noise
from partita.runtime.faults import NotFinite
from partita.runtime.tracing.recording import Recorder
from partita.runtime.training import Plan, VirtualRun, prepare

TOLERANCE, LEAST = 1e-10, 1e-4
# A change of parameters by their last digits, and how much more than it does rounding may do.
LAST_DIGITS, LEEWAY = 1e-15, 10.0
# Integers that index nothing are drawn below this.
SMALL_INTEGERS = 3
# The length of an update beside parameters of order 1: long enough to be seen, short enough to stay there.
UPDATE = 0.05
# Adam divides by the root of the second moment; where a gradient is rounding noise, so would be the update. This,
# beside the gradient norm, keeps it from that.
ADAM_EPSILON = 1e-3


@frozen
class Figure:
    """A tensor that is compared, and the unit of its tolerance."""

    value: torch.Tensor
    unit: float = 1.0


Outcome = dict[str, Figure]


@frozen(eq=False)
class Experiment:
    """A shrunken file, compiled as it is laid out and for one device, and the rate of its updates."""

    plan: Plan
    single: Plan
    rate: float


# ---------------------------------------------------------------- the experiment


def experiment_of(given: Spec, hoist: bool = True) -> Experiment:
    """Shrink a file and compile it, with values at which everything is finite. Raises Refused (E0703)."""
    values: tuple[Initial, ...] = (of_order_one, unless_zero, as_declared)
    for initial in values:
        small = shrink(given, initial, hoist)
        experiment = settled(small)
        if experiment is not None:
            return experiment
    raise never_finite(small)


def never_finite(small: Spec) -> Refused:
    """The refusal (E0703) of a model that comes to no finite loss and gradient."""
    return refuse(
        "E0703",
        f"on random data, model `{small.model.name if small.model else ''}` has no finite loss and gradient",
        small.model.loss_span if small.model else None,
        help="`log`, `sqrt`, `exp` and divisions need values in range: see that they get them",
    )


def settled(small: Spec) -> Experiment | None:
    """An experiment on a file as it is, but that it clips, if it does, at half the norm of its first gradient, and
    that updates neither vanish nor explode; None where that norm is zero or not finite."""
    train = small.train
    assert train is not None
    norm = _norm(_compiled(_plain(evolve(small, train=evolve(train, eval=None)))))
    if not (norm > 0 and isfinite(norm)):
        return None
    optimizer, rate = train.optimizer, UPDATE
    if "eps" in optimizer.arguments:
        least = max(float(optimizer.arguments["eps"]), ADAM_EPSILON * norm)
        optimizer = Call(optimizer.name, {**optimizer.arguments, "eps": least})
    else:
        rate /= norm
    clip = None if train.clip is None else norm / 2
    small = evolve(small, train=evolve(train, clip=clip, optimizer=optimizer))
    return Experiment(_compiled(small), _compiled(_plain(small)), rate)


def _plain(small: Spec) -> Spec:
    """The file on one device, nothing of it compiled by torch: what all is held against."""
    assert small.train is not None
    return single(evolve(small, train=evolve(small.train, compile=False)))


def _compiled(small: Spec) -> Plan:
    try:
        return prepare(small)
    except Refused as refused:
        sizes = ", ".join(str(axis) for axis in small.axes.values())
        raise refuse(
            "E0703",
            "the shrunken copy of the file does not compile",
            notes=[f"its axes: {sizes}", *(diagnostic.message for diagnostic in refused.diagnostics)],
            help="`partita run --transport virtual` runs the file as it is",
        ) from refused


def _norm(plan: Plan) -> float:
    """The gradient norm of the first step; not a number where that, or the loss, is not finite."""
    try:
        _, norm = VirtualRun(plan).step(1, batches(plan.program, plan.train.seed)[0])
    except NotFinite:
        return float("nan")
    except (IndexError, RuntimeError) as error:
        raise refuse(
            "E0703",
            "the model cannot be run on random data",
            plan.spec.model.span if plan.spec.model else None,
            notes=[str(error).strip().splitlines()[0]],
            help="integers are drawn within the axis that they index; those that index none are 0, 1 or 2",
        ) from error
    return norm


def batches(program: Program, seed: int) -> list[dict[str, torch.Tensor]]:
    """Random batches for two steps and an evaluation."""
    inputs = []
    for each in program.inputs:
        limit = each.limit.size if each.limit else SMALL_INTEGERS
        batch = program.batch if each.type.has(program.batch) else None
        inputs.append(Input(each.name, each.type, batch, limit))
    noise = Noise(tuple(inputs), seed)
    drawn = [noise.batch(1), noise.batch(2), noise.holdout_batch(0)]
    return [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in drawn]


# ---------------------------------------------------------------- running and comparing


def outcome(plan: Plan, rate: float, recorder: Recorder | None = None, nudge: float = 0.0) -> Outcome:
    """All that is compared, in the order in which it is made. With a recorder, the first step alone is run.

    `nudge`: parameters begin with values that differ by about so much of themselves.
    """
    run = VirtualRun(plan)
    if nudge:
        run.set_parameters({name: _nudged(tensor, nudge) for name, tensor in run.parameters().items()})
    first, second, held_out = batches(plan.program, plan.train.seed)
    found: Outcome = {}

    def add(what: str, value: float | torch.Tensor, unit: float = 1.0) -> None:
        found[what] = Figure(torch.as_tensor(value, dtype=torch.float64), unit)

    for rank in run.ranks if recorder else ():
        assert recorder is not None
        rank.training.context.record = recorder.of(rank.rank, rank.training.context)
    for step, batch in ((1, first), (2, second)):
        loss, norm = run.step(step, batch, rate)
        add(f"loss of step {step}", loss)
        for name, number in run.metrics().items():
            add(f"metric `{name}` of step {step}", number)
        for name, gradient in run.gradients().items():
            add(f"gradient of `{name}` in step {step}", gradient, norm)
        add(f"gradient norm of step {step}", norm)
        if recorder is not None:
            return found
    for name, tensor in run.parameters().items():
        add(f"`{name}` after two updates", tensor)
    loss, metrics = run.evaluate(held_out)
    add("evaluation loss", loss)
    for name, number in metrics.items():
        add(f"metric `{name}` of the evaluation", number)
    return found


def _nudged(tensor: torch.Tensor, nudge: float) -> torch.Tensor:
    """The tensor with every other element larger by a small part of itself."""
    every_other = torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) % 2
    return tensor * (1.0 + nudge * every_other)


def compare(found: Outcome, expected: Outcome) -> dict[str, float]:
    """The error of each figure, relative to its scale; infinite where one is missing or not a number."""
    return {what: error_of(found.get(what), figure) for what, figure in expected.items()}


def error_of(found: Figure | None, expected: Figure) -> float:
    """The largest difference of any element, relative to the scale of the whole.

    Metrics may be infinite or no number on random data: then they must be so in both.
    """
    if found is None or found.value.shape != expected.value.shape:
        return float("inf")
    if not expected.value.numel():
        return 0.0
    a, b = found.value, expected.value
    same = (a == b) | (a.isnan() & b.isnan())
    error = float((a - b).abs().masked_fill(same, 0.0).max())
    scale = max(float(b.abs().masked_fill(~b.isfinite(), 0.0).max()), LEAST * expected.unit)
    return error / scale if isfinite(error) else float("inf")
