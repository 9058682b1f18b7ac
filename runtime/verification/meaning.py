"""Whether the program of one device computes what the file means.

Both programs that an experiment compares come from one graph: what is wrong in the operations that it is made of, in
their gradients or in the updates of buffers, is wrong in both. So the first step of the single device is compared with
an interpreter of the file (`partita.runtime.interpreter`), whose gradients are torch's autograd's: loss, metrics, every
gradient, and what becomes of buffers.

A tensor equals its meaning where it differs by no more than rounding does (`figures`), or by no more than other last
digits of parameters change it. What these change by much is decided by rounding, and not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from partita.compiler.passes.build import adapters_of
from partita.dsl.diagnostic import Diagnostic
from partita.runtime.interpreter.walk import Walk
from partita.runtime.python_functions import CustomFunction, functions_of
from partita.runtime.verification.figures import Figure, Figures, judged, nudged, place_of
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
    model, train = point.plan.spec.trained
    if train.float8:
        return Meaning(reason="products round to eight bits")
    given = _interpreted(point)
    found = judged(_computed(point), _meant(point, given), partial(_meant, point, given))
    compared = found.compared
    if not compared:
        return Meaning(reason="rounding decides all that is computed")
    if not found.wrong:
        return Meaning(len(compared), max(compared.values()))
    first = max(found.wrong, key=lambda what: compared[what])
    place = place_of(point.plan.training, first) or model.loss_span
    message = f"{first} on one device is not what the file means"
    wrong = Diagnostic("E0707", message, place, found.notes, help)
    return Meaning(len(compared), max(compared.values()), diagnostics=(wrong,))


def _interpreted(point: Point) -> Callable[..., Walk]:
    """The interpreter of a file, of the first batch; given parameters, it begins a walk."""
    model, train = point.plan.spec.trained
    inputs = {name: _wide(each) for name, each in point.batch.items()}
    adapters = adapters_of(model) if model.adapters else {}
    functions = {name: partial(_Custom.apply, each) for name, each in functions_of(model, allowed=True).items()}
    return partial(Walk, model, inputs, seed=train.seed, adapters=adapters, functions=functions)


def _computed(point: Point) -> Figures:
    """What the single device computes."""
    numbers = {"the loss": point.loss, **{f"metric `{name}`": each for name, each in point.metrics.items()}}
    found = {what: Figure(torch.tensor(number, dtype=torch.float64)) for what, number in numbers.items()}
    for name, gradient in point.gradients.items():
        found[f"the gradient of `{name}`"] = Figure(gradient.double(), max(1.0, point.norm))
    return found | {f"`{name}` after the step": Figure(each.double()) for name, each in point.updated.items()}


def _meant(point: Point, given: Callable[..., Walk], trial: int = 0) -> Figures:
    """What the file means; in a `trial` with other last digits of parameters."""
    parameters = {name: _wide(each) for name, each in point.parameters.items()}
    if trial:
        parameters = {name: nudged(each, trial) for name, each in parameters.items()}
    for name in point.losses:
        parameters[name].requires_grad_()
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
