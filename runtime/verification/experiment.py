"""The experiments of `verify`: the proxy of a file, with values that hide no errors, run and measured.

The proxy (`partita.compiler.verify.proxy`) runs in float64 on the virtual cluster in strict mode, and so does the same
model, unpartitioned, on one device. Parameters start with random values of order 1, dropout is active, and gradients
that are clipped are clipped at half their norm: nothing hides behind zeros, tiny numbers or a limit that is never
reached.

The comparison covers two steps (loss, metrics, gradient norm, every gradient, what updates of buffers read of the
batch, every parameter after each update) and the loss and metrics of an evaluation of two batches. What updates read is
compared itself since they may hide it: the signs of what one microbatch has counted are often those of the batch. Where
groups train apart, the comparison covers four steps of each group, with two averages. Where a tensor differs
(`figures`), the model runs again on one device with parameters that differ in their last digits: whatever changes as
much by that is decided by rounding, and not by the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import isfinite

import torch
from attrs import evolve, frozen

from partita.compiler.optimizers.registry import OPTIMIZERS
from partita.compiler.passes.resized import Initial, as_declared, of_order_one, unless_zero
from partita.compiler.program import Program
from partita.compiler.verify.proxy import proxy_of, single
from partita.compiler.verify.rounding import JUMPING, perturbed
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.spec import BEFORE, OPERATION, Apply, Model, Spec, applications, bodies
from partita.dsl.types import INDICES
from partita.runtime.bad_steps import NotFinite
from partita.runtime.data.dataset import Input
from partita.runtime.data.noise import Noise
from partita.runtime.executor import Rates
from partita.runtime.inputs import Batch
from partita.runtime.instructions import Coroutine
from partita.runtime.python_files import OperationFailed, require_allowed
from partita.runtime.rank import CompiledRun, Rank, prepare
from partita.runtime.tracing.recording import Recorder
from partita.runtime.training import VirtualRun
from partita.runtime.verification.figures import LAST_DIGITS, Figure, Figures, nudged
from partita.runtime.verification.point import NO_NORM, Point

# Integers that index nothing are drawn below this.
SMALL_INTEGERS = 3
# The length of an update relative to parameters of order 1: large enough to be seen, small enough to keep that order.
UPDATE = 0.05
# How many seeds are tried before an experiment is called inconclusive.
SEEDS = 3
# How often parameters were updated, in words.
UPDATES = ("an update", "two updates")
# What a figure is that updates of buffers read, in words.
READ = "what updates read of"
# How much longer inputs are where no small proxy is finite: a mean may be over few of their elements, or over none.
LONGER = 8


class Inconclusive(Exception):
    """No experiment tells whether a file's program is right. The diagnostic (W0702) says why."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic
        super().__init__(diagnostic.render())


@frozen(eq=False)
class Experiment:
    """A proxy, compiled for its mesh and for one device, and the learning rates of its updates. `point` is where the
    single device begins.
    """

    plan: CompiledRun
    single: CompiledRun
    rates: Rates
    point: Point


# ---------------------------------------------------------------- the experiment


def experiments(spec: Spec, hoist: bool = True, allow_python: bool = False) -> Iterator[Experiment]:
    """Shrink a file and compile it, with values at which everything is finite: for each seed with parameters of order
    1, then with zeros replaced only, then as declared; at last with longer inputs. Raises Inconclusive if there
    are none.

    Axes of the file's own operations keep their sizes if these do not run at smaller ones.
    """
    fixed: frozenset[str] = frozenset()
    if spec.model is not None and spec.model.operations:
        small = proxy(spec, of_order_one, hoist)
        try:
            settled(small, allow_python)
        except OperationFailed:
            fixed = _axes_of_operations(spec.model)
    values: tuple[Initial, ...] = (of_order_one, unless_zero, as_declared)
    found = False
    for longer, seed, initial in (*product([1], range(SEEDS), values), *product([LONGER], range(SEEDS), values[:1])):
        small = proxy(spec, initial, hoist, fixed, longer)
        _, train = small.trained
        experiment = settled(evolve(small, train=evolve(train, seed=train.seed + seed)), allow_python)
        if experiment is not None:
            found = True
            yield experiment
    if not found:
        raise never_finite(small)


def _axes_of_operations(model: Model) -> frozenset[str]:
    """The axes over which a model calls its own operations."""
    axes: set[str] = set()
    for body in bodies(model.body):
        for step in body.steps:
            if isinstance(step, Apply) and step.function == OPERATION:
                types = [body.types[operand] for operand in step.operands if isinstance(operand, int)]
                axes.update(name for type in (*types, step.type) for name in type.names)
    return frozenset(axes)


def proxy(spec: Spec, initial: Initial, hoist: bool, fixed: frozenset[str] = frozenset(), longer: int = 1) -> Spec:
    """The proxy of a file. Raises Inconclusive if there is none."""
    try:
        return proxy_of(spec, initial, hoist, fixed, longer)
    except Refused as refused:
        raise Inconclusive(refused.diagnostics[0]) from refused


def never_finite(small: Spec) -> Inconclusive:
    """The verdict on a model whose loss or gradient is never finite."""
    return _undecided(
        f"on random data, model `{small.model.name if small.model else ''}` has no finite loss and gradient",
        small,
        help="`log`, `sqrt`, `exp` and divisions need arguments within range",
    )


def _undecided(message: str, small: Spec, notes: Iterable[str] = (), help: str | None = None) -> Inconclusive:
    span = small.model.loss_span if small.model else None
    return Inconclusive(Diagnostic("W0702", message, span, tuple(notes), help))


def blurred(small: Spec, what: str, change: float) -> Inconclusive:
    """The verdict on a model in which the last digits of its parameters change as much as anything else."""
    return _undecided(
        "rounding errors grow so much in this model that execution is inconclusive",
        small,
        [f"other last digits ({LAST_DIGITS:.0e}) change {what} by {change:.0e} of its scale"],
        "normalized activations, or smaller initial values, keep them small; they would grow in training too. What "
        "chooses among equal elements, as `top_k` and `sign` may, is decided by rounding as well",
    )


def settled(small: Spec, allow_python: bool = False) -> Experiment | None:
    """An experiment on a file as it is, except that it clips, if it does, at half the norm of its first gradient, and
    that updates neither vanish nor explode; None if that norm is not finite.
    """
    require_allowed(small.model, allow_python)
    _, train = small.trained
    step = _compiled(_plain(evolve(small, train=evolve(train, eval=None, sync=None))), allow_python)
    try:
        point = Point(step, batches(step.program, step.train.seed)[0])
    except NotFinite:
        return None
    if not isfinite(point.norm):
        return None
    # Nothing can be scaled to a gradient of zero.
    norm = point.norm if point.norm > NO_NORM else 1.0
    rules, rates = [], []
    for rule in train.optimizer.rules:
        if rule.call is not None:
            known = OPTIMIZERS[rule.call.name]
            rates.append(UPDATE if known.scaled else UPDATE / norm)
            rule = evolve(rule, call=evolve(rule.call, arguments=known.proxy(rule.call.arguments, norm)))
        rules.append(rule)
    clip = None if train.clip is None else norm / 2
    optimizer = evolve(train.optimizer, rules=tuple(rules))
    small = evolve(small, train=evolve(train, clip=clip, optimizer=optimizer))
    return Experiment(_compiled(small, allow_python), _compiled(_plain(small), allow_python), tuple(rates), point)


def _plain(small: Spec) -> Spec:
    """The file on one device, with all rows of gradients, without torch.compile, where every update waits for its norm:
    the reference.
    """
    _, train = small.trained
    return single(evolve(small, train=evolve(train, compile=False, dense=True, validate=BEFORE)))


def rounded(experiment: Experiment, trial: int) -> CompiledRun:
    """The reference of an experiment with other last digits where its functions jump."""
    plan = experiment.single
    model, _ = plan.spec.trained
    if not any(step.function in JUMPING for step in applications(model.body)):
        return plan
    return prepare(perturbed(plan.spec, LAST_DIGITS, trial), allow_python=True)  # the experiment was allowed to


def _compiled(small: Spec, allow_python: bool) -> CompiledRun:
    try:
        return prepare(small, allow_python=allow_python)
    except Refused as refused:
        sizes = ", ".join(str(axis) for axis in small.axes.values())
        raise _undecided(
            "the proxy of the file does not compile",
            small,
            [f"its axes: {sizes}", *(diagnostic.message for diagnostic in refused.diagnostics)],
            "`partita run --transport virtual` runs the file itself",
        ) from refused


def batches(program: Program, seed: int) -> list[dict[str, torch.Tensor]]:
    """Random batches for two steps, and two for an evaluation."""
    inputs = []
    for each in program.inputs:
        limit = each.limit.size if each.limit else SMALL_INTEGERS if each.type.dtype in INDICES else None
        batch = program.batch if each.type.has(program.batch) else None
        inputs.append(Input(each.name, each.type, batch, limit))
    noise = Noise(tuple(inputs), seed)
    ignored = {each.name: each.ignored[0] for each in program.inputs if each.ignored}
    drawn = [noise.batch(1), noise.batch(2), noise.holdout_batch(0), noise.holdout_batch(1)]
    for arrays in drawn:
        for input_name, target in ignored.items():
            arrays[input_name].flat[::3] = target
    return [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in drawn]


# ---------------------------------------------------------------- running and comparing


def figures(plan: CompiledRun, rates: Rates, recorder: Recorder | None = None, trial: int = 0) -> Figures:
    """Everything that is compared, in the order in which it is made. With a recorder, only the first step is run.

    In a `trial`, parameters start with different last digits, other ones in each trial.
    """
    run = VirtualRun(plan)
    if trial:
        run.set_parameters({name: nudged(tensor, trial) for name, tensor in run.parameters().items()})
    first, second, *held_out = batches(plan.program, plan.train.seed)
    measured: Figures = {}
    count = plan.program.groups
    groups = {group: f" of group {group}" if count > 1 else "" for group in range(count)}

    def add(what: str, value: float | torch.Tensor, unit: float = 1.0) -> None:
        measured[what] = Figure(torch.as_tensor(value, dtype=torch.float64).clone(), unit)

    if plan.train.late and recorder is None:
        # Whatever is not put back makes all that follows another run.
        run.cluster.run([_taken_back(rank, second, rates) for rank in run.ranks])
    for rank in run.ranks:
        if recorder is not None:
            rank.training.context.record = recorder.of(rank.rank, rank.training.context)
    for step in range(1, plan.train.steps + 1):
        batch = first if step % 2 else second
        loss, norm = run.step(step, batch, *rates)
        add(f"loss of step {step}", loss)
        for name, number in run.metrics().items():
            add(f"metric `{name}` of step {step}", number)
        for guard, number in run.outside().items():
            add(f"{guard.name} of step {step}", number)
        for group, of in groups.items():
            for name, gradient in run.gradients(group).items():
                add(f"gradient of `{name}`{of} in step {step}", gradient, max(norm, 1.0))
            for name, total in run.step_metrics(group).items():
                add(f"{READ} `{name}`{of} in step {step}", total)
        add(f"gradient norm of step {step}", norm)
        if recorder is not None:
            return measured
        updates = UPDATES[step - 1] if step <= len(UPDATES) else f"{step} updates"
        for group, of in groups.items():
            for name, tensor in run.parameters(group).items():
                add(f"`{name}`{of} after {updates}", tensor)
        for name, tensor in run.means().items():
            add(f"the mean of `{name}` after {updates}", tensor)
    loss, metrics, outside = run.evaluate(*held_out)
    add("evaluation loss", loss)
    for guard, number in outside.items():
        add(f"{guard.name} of the evaluation", number)
    for name, number in metrics.items():
        add(f"metric `{name}` of the evaluation", number)
    return measured


def _taken_back(rank: Rank, batch: Batch, rates: Rates) -> Coroutine:
    """An update of one rank that did not wait, and that is taken back when the next step is computed."""
    executor = rank.training
    yield from executor.compute(1, (batch,).__getitem__, rates, 1)
    sums = executor.start_metrics()
    yield from rank.validation.update()
    yield from executor.compute(2, (batch,).__getitem__, rates, 2)
    yield from executor.finish_metrics(sums)
    rank.validation.rollback(1)


def essential(what: str) -> bool:
    """Whether an experiment is inconclusive without this quantity: true of those of the first step, except for metrics
    and what updates of buffers read, whose ties may be in the nature of a model.
    """
    if "metric" in what or read_by_updates(what):
        return False
    return "step 1" in what or "after an update" in what


def read_by_updates(what: str) -> bool:
    """Whether a quantity is what updates of buffers read of the batch."""
    return what.startswith(READ)
