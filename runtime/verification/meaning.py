"""Whether the program of one device computes what the file means.

Both programs that an experiment compares come from one graph: what is wrong in the operations that it is made of, in
their gradients or in the updates of buffers, is wrong in both. So the first step of the single device is compared with
an interpreter of the file (`partita.runtime.interpreter`), whose gradients are torch's autograd's: loss, metrics, every
gradient, and what becomes of buffers.

A tensor equals its meaning where it differs by no more than rounding does (`figures`), or by no more than other last
digits of parameters change it. What these change by much is decided by rounding, and not compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from partita.compiler.passes.build import adapters_of
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.syntax.source import Span
from partita.runtime.interpreter.walk import Walk
from partita.runtime.python_functions import CustomFunction, functions_of
from partita.runtime.verification.figures import (
    BLUR,
    LEEWAY,
    TOLERANCE,
    TRIALS,
    Figure,
    Figures,
    compare,
    nudged,
)
from partita.runtime.verification.point import Point


@frozen(eq=False)
class Meaning:
    """The comparison of so many tensors of one device, those that were `compared`, with what the file means. `error` is
    the largest, relative to the scale of its tensor. `reason` says why there is none, if so.
    """

    compared: int = 0
    error: float = 0.0
    reason: str | None = None
    diagnostics: tuple[Diagnostic, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """The object `meaning` of `verify --json`."""
        passed = None if self.reason else not self.diagnostics
        return {"passed": passed, "compared": self.compared, "error": self.error, "reason": self.reason}


def compare_meaning(point: Point, help: str) -> Meaning:
    """Compare the first step of one device with what the file means (E0707)."""
    _, train = point.plan.spec.trained
    if train.float8:
        return Meaning(reason="products round to eight bits")
    expected = _meant(point)
    errors = compare(_computed(point), expected)
    wrong = {what: error for what, error in errors.items() if not error <= TOLERANCE}
    changes = dict.fromkeys(errors, 0.0)
    for trial in range(1, TRIALS + 1) if wrong else ():
        moved = compare(_meant(point, trial), expected)
        changes = {what: max(change, moved[what]) for what, change in changes.items()}
    wrong = {what: error for what, error in wrong.items() if not error <= LEEWAY * changes[what]}
    blurred = {what for what, change in changes.items() if not change <= BLUR}
    compared = {what: error for what, error in errors.items() if what not in blurred}
    wrong = {what: error for what, error in wrong.items() if what in compared}
    if not compared:
        return Meaning(reason="rounding decides all that is computed")
    diagnostics = (_difference(point, wrong, len(compared), help),) if wrong else ()
    return Meaning(len(compared), max(compared.values()), diagnostics=diagnostics)


def _computed(point: Point) -> Figures:
    """What the single device computes."""
    numbers = {"the loss": point.loss, **{f"metric `{name}`": each for name, each in point.metrics.items()}}
    found = {what: Figure(torch.tensor(number, dtype=torch.float64)) for what, number in numbers.items()}
    for name, gradient in point.gradients.items():
        found[f"the gradient of `{name}`"] = Figure(gradient.double(), max(1.0, point.norm))
    return found | {f"`{name}` after the step": Figure(each.double()) for name, each in point.updated.items()}


def _meant(point: Point, trial: int = 0) -> Figures:
    """What the file means; in a `trial` with other last digits of parameters."""
    model, train = point.plan.spec.trained
    parameters = {name: _wide(each) for name, each in point.parameters.items()}
    if trial:
        parameters = {name: nudged(each, trial) for name, each in parameters.items()}
    for name in point.losses:
        parameters[name].requires_grad_()
    inputs = {name: _wide(each) for name, each in point.batch.items()}
    functions = {name: partial(_Custom.apply, each) for name, each in functions_of(model, allowed=True).items()}
    given = partial(Walk, model, inputs, seed=train.seed, adapters=adapters_of(model), functions=functions)
    walk = given(parameters)
    loss, metrics = walk.run()
    found = {"the loss": Figure(loss.detach())}
    found |= {f"metric `{name}`": Figure(each) for name, each in metrics.items()}
    for by in dict.fromkeys(point.losses.values()):
        names = [name for name, of in point.losses.items() if of == by]
        root = loss if by is None else walk.losses[by]
        gradients = torch.autograd.grad(
            root, [parameters[name] for name in names], retain_graph=True, allow_unused=True
        )
        for name, gradient in zip(names, gradients, strict=True):
            made = torch.zeros_like(parameters[name]) if gradient is None else gradient
            found[f"the gradient of `{name}`"] = Figure(made.detach(), max(1.0, point.norm))
    changed = dict(walk.updates)
    if walk.after:  # what becomes of parameters reads buffers as they are after the step
        again = given({**parameters, **walk.updates})
        again.run()
        changed |= again.after
    return found | {f"`{name}` after the step": Figure(each.double()) for name, each in changed.items()}


def _wide(tensor: Tensor) -> Tensor:
    """A copy as the interpreter computes: floats as float64, integers as int64."""
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.to(torch.int64 if dtype in (torch.int32, torch.int8, torch.uint8) else dtype, copy=True)


class _Custom(torch.autograd.Function):
    """An operation of the file's own, with the gradient that it declares."""

    @staticmethod
    def forward(ctx: Any, function: CustomFunction, *operands: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(*operands)
        return function.forward(*operands)

    @staticmethod
    def backward(ctx: Any, *ds: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors
        found = iter(ctx.function.gradients([d for d in ds if d.is_floating_point()], operands))
        return (None, *(next(found) if each.is_floating_point() else None for each in operands))


def _difference(point: Point, wrong: dict[str, float], count: int, help: str) -> Diagnostic:
    """Names what differs most."""
    first = max(wrong, key=lambda what: wrong[what])
    model, _ = point.plan.spec.trained
    declared = {each.name: each.span for each in point.plan.training.forward.parameters}
    span: Span | None = next((span for name, span in declared.items() if f"`{name}`" in first), model.loss_span)
    notes = [f"{what} differs by {error:.1e} of its scale" for what, error in list(wrong.items())[:3]]
    if len(wrong) > 3:
        notes.append(f"and {len(wrong) - 3} more of {count}")
    return Diagnostic("E0707", f"{first} on one device is not what the file means", span, tuple(notes), help)
