"""Whether the gradients of a file are the derivatives of its loss.

Both programs that an experiment compares have their gradients from one pass, and from the same operations: what is
wrong there is wrong in both. So the gradients of the single device are compared with differences of its loss in
float64, along a random direction of all parameters at once, whose elements are of order 1:

    sum of gradient * direction = (loss(p + h direction) - loss(p - h direction)) / 2h

What `stop_gradient` returns stays as it is at p. The loss of a small model may have a bend within h: then a shorter h
is tried. A bend or a jump at p itself (`relu` of 0, the larger of equal elements) shows as a difference of both sides
that does not vanish with h: no slope is compared there, and gradients are wrong only where differences on which several
h agree say so along several directions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import define, evolve, field, frozen

from partita.compiler.codegen.writer import Probe
from partita.compiler.graph import Node
from partita.compiler.instructions import Compute
from partita.compiler.pipeline import assembled
from partita.compiler.program import Program
from partita.compiler.schedules.schedule import FORWARD
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Scan, Spec, applications, bodies
from partita.runtime.bad_steps import NotFinite
from partita.runtime.inputs import Batch
from partita.runtime.rank import CompiledRun
from partita.runtime.training import VirtualRun

# Lengths h, in the order in which they are tried; the first one suffices unless there is a bend within it.
LENGTHS = (1e-6, 1e-7, 1e-5, 1e-4)
# What a slope may be off, relative to the norm of the gradient.
TOLERANCE = 1e-6
# A slope is wrong if it is off by more than this many times what the two sides of the point differ by, and by what two
# lengths agree upon to a tenth.
BEND, AGREEING = 4.0, 0.1
# So many directions must be wrong.
DIRECTIONS = 3
# A gradient norm below this counts as zero.
NO_NORM = 1e-8


@frozen(eq=False)
class Derivatives:
    """The comparison of the gradients of some `parameters` with differences of the loss. `error` is relative to the
    norm of the gradient. `reason` says why they could not be compared, if not.
    """

    parameters: int
    error: float | None = None
    reason: str | None = None
    diagnostics: tuple[Diagnostic, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The object `derivatives` of `verify --json`."""
        passed = None if self.reason else not self.diagnostics
        return {"passed": passed, "parameters": self.parameters, "error": self.error, "reason": self.reason}


@frozen
class Slope:
    """A derivative along a direction, according to the gradient and to the best of the differences; relative to the
    norm of the gradient. `certain`: the differences are a derivative.
    """

    expected: float
    found: float
    certain: bool

    @property
    def error(self) -> float:
        """By how much they differ."""
        return abs(self.expected - self.found)


def compare_derivatives(point: Point, help: str) -> Derivatives:
    """Compare the gradients at a point with differences of the loss (E0707)."""
    count = len(point.gradients)
    reason = _beyond(point.plan.spec)
    if reason is not None:
        return Derivatives(count, reason=reason)
    slopes: list[Slope] = []
    try:
        for number in range(DIRECTIONS):
            slopes.append(point.slope(point.direction(number)))
            if slopes[-1].error <= TOLERANCE:
                return Derivatives(count, slopes[-1].error)
        if all(slope.certain for slope in slopes):
            worst = max(slopes, key=lambda slope: slope.error)
            return Derivatives(count, worst.error, diagnostics=(_wrong(point, worst, help),))
    except NotFinite:
        return Derivatives(count, reason="the loss is finite at single points only")
    return Derivatives(count, reason="the loss has bends or jumps where it is taken")


def _beyond(spec: Spec) -> str | None:
    """Why the gradients of a file are not meant to be derivatives."""
    model, train = spec.trained
    if train.float8:
        return "products round to eight bits"
    scans = [step for body in bodies(model.body) for step in body.steps if isinstance(step, Scan)]
    if any(step.function == "stop_gradient" for scan in scans for step in applications(scan.body)):
        return "a `scan` contains `stop_gradient`"
    return None


def _wrong(point: Point, slope: Slope, help: str) -> Diagnostic:
    """Name the parameters whose own slopes are wrong."""
    wrong: list[str] = []
    for name in point.gradients:
        own = point.slope(point.direction(0, [name]))
        if own.certain and own.error > TOLERANCE:
            wrong.append(name)
    model, _ = point.plan.spec.trained
    declared = {each.name: each.span for each in point.plan.training.forward.parameters}
    what = f"the gradient of `{wrong[0]}`" if wrong else "the gradient"
    more = [f"so for {len(wrong) - 1} more of {len(point.gradients)}: {', '.join(wrong[1:4])}"] if wrong[1:] else []
    scale = max(abs(slope.found), abs(slope.expected))
    return Diagnostic(
        "E0707",
        f"{what} is not the derivative of the loss",
        declared.get(wrong[0]) if wrong else model.loss_span,
        (*more, f"along a random direction of all parameters, slopes differ by {100 * slope.error / scale:.2g}%"),
        help,
    )


@define(eq=False)
class Point:
    """A step on a batch, on one device: the loss and the gradients at the parameters with which a run begins, and the
    loss around them. Raises NotFinite if the loss or the norm of the gradient is not finite.
    """

    plan: CompiledRun
    batch: Batch
    loss: float = field(init=False)
    norm: float = field(init=False)
    gradients: Mapping[str, torch.Tensor] = field(init=False)
    _parameters: Mapping[str, torch.Tensor] = field(init=False)
    _run: VirtualRun = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._run = VirtualRun(self.plan)
        self._parameters = self._run.parameters()
        losses, self.norm = self._step(self._run)
        self.loss = sum(losses[each] for each in self._by_loss)
        self.gradients = self._run.gradients()

    @cached_property
    def _by_loss(self) -> dict[str | None, set[str]]:
        """The parameters that have the gradient of a loss, by its name; None is the whole."""
        by: dict[str | None, set[str]] = {}
        for each in self.plan.training.forward.parameters:
            if each.trained:
                by.setdefault(each.loss, set()).add(each.name)
        return by

    def _step(self, run: VirtualRun) -> tuple[dict[str | None, float], float]:
        """The losses of a step by name, None for the whole, and the norm of its gradients."""
        loss, norm = run.step(1, self.batch)
        losses: dict[str | None, float] = {None: loss}
        losses.update((name, value) for name, value in run.metrics().items())
        return losses, norm

    @cached_property
    def _around(self) -> VirtualRun:
        """A run forward only, in which what `stop_gradient` returns is what it is at the point."""
        state = assembled(self.plan.training, Held()) if self._stopped() else self.plan.training
        run = VirtualRun(evolve(self.plan, training=evolve(state, program=_forward(state.program))))
        run.step(1, self.batch)
        return run

    def _stopped(self) -> bool:
        nodes = (node for stage in self.plan.training.partitioned.stages for node in stage.nodes)
        return not all(node.op.differentiable for node in nodes)

    def direction(self, number: int, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """A random direction, of all parameters or of some."""
        drawn = torch.Generator().manual_seed(number)
        return {
            name: torch.randn(gradient.shape, dtype=torch.float64, generator=drawn)
            for name, gradient in self.gradients.items()
            if names is None or name in names
        }

    def slope(self, direction: Mapping[str, torch.Tensor]) -> Slope:
        """The derivative along a direction. Raises NotFinite."""
        scale = self.norm if self.norm > NO_NORM else 1.0
        expected = sum(float((self.gradients[name] * each).sum()) for name, each in direction.items()) / scale
        slopes: list[Slope] = []
        # A loss that is much steeper than it is high has bent long before the usual lengths.
        steep = LENGTHS[0] * min(1.0, abs(self.loss) / scale)
        for length in (*((steep,) if 0 < steep < min(LENGTHS) else ()), *LENGTHS):
            above, below = (self._at(direction, way * length) for way in (1, -1))
            estimate = (above - below) / (2 * length * scale)
            bend = abs(above + below - 2 * self.loss) / (length * scale)
            slope = Slope(expected, estimate, abs(estimate - expected) > BEND * bend)
            if slope.error <= TOLERANCE:
                return evolve(slope, certain=True)
            agreed = any(each.certain and abs(each.found - estimate) < AGREEING * slope.error for each in slopes)
            if slope.certain and agreed and not any(each.error < AGREEING * slope.error for each in slopes):
                return slope
            slopes.append(slope)
        return evolve(min(slopes, key=lambda each: each.error), certain=False)

    def _at(self, direction: Mapping[str, torch.Tensor], length: float) -> float:
        """The loss at so many times the direction: of several, the sum of each where its own parameters have moved."""
        found = 0.0
        for loss, names in self._by_loss.items():
            own = {name: self._parameters[name] + length * each for name, each in direction.items() if name in names}
            self._around.set_parameters({**self._parameters, **own})
            found += self._step(self._around)[0][loss]
        return found


def _forward(program: Program) -> Program:
    """A program without backward passes, of one device: whose gradients are zero."""
    (rank,) = program.ranks
    (first,) = (
        i for i, each in enumerate(rank.instructions) if isinstance(each, Compute) and each.action.kind == FORWARD
    )
    selected = slice(first, first + 1)
    only = evolve(rank, instructions=rank.instructions[selected], launches=rank.launches[selected])
    return evolve(program, ranks=(only,))


class Held(Probe):
    """A `Probe` with which what `stop_gradient` returns stays as it is in the first step."""

    def after(self, node: Node, added: bool, names: Sequence[str]) -> list[str]:
        """The first value of the name, whatever is computed."""
        if added or node.op.differentiable:
            return []
        named = zip(node.outputs, names, strict=True)
        return [f"{name} = c.held.setdefault({value.name!r}, {name}.clone())" for value, name in named]
