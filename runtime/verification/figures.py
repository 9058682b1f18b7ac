"""Tensors that are compared, and by how much they differ.

A tensor `a` equals its reference `b` if every element has

    |a - b| <= 1e-10 * max(largest |b|, 1e-4 * unit)

where the unit is 1 or, for a gradient, the norm of all gradients if that is larger: a gradient that is zero in exact
arithmetic is rounding noise of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite

import torch
from attrs import frozen

from partita.compiler.state import Compilation
from partita.dsl.syntax.source import Span

TOLERANCE, MIN_SCALE = 1e-10, 1e-4
# A change of parameters in their last digits, how often it is tried, and by which factor errors may exceed its effect.
LAST_DIGITS, TRIALS, LEEWAY = 1e-15, 5, 10.0
# A quantity that rounding changes by this much of its scale is inconclusive.
BLUR = 1e-3


@frozen
class Figure:
    """A tensor to compare, and the unit of its tolerance."""

    value: torch.Tensor
    unit: float = 1.0


Figures = dict[str, Figure]


@frozen
class Judged:
    """How expected quantities are met: the `errors` of all, those that are `wrong`, and those that are `blurred`, with
    how much of their scale rounding changes.
    """

    errors: Mapping[str, float]
    wrong: Sequence[str]
    blurred: Mapping[str, float]

    @property
    def compared(self) -> dict[str, float]:
        """The errors of those that are not blurred."""
        return {what: error for what, error in self.errors.items() if what not in self.blurred}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong, in words."""
        more = [f"and {len(self.wrong) - 3} more of {len(self.errors)}"] if len(self.wrong) > 3 else []
        return (*(f"{what} differs by {self.errors[what]:.1e} of its scale" for what in self.wrong[:3]), *more)


def judged(actual: Figures, expected: Figures, again: Callable[[int], Figures]) -> Judged:
    """Compare quantities with what is expected; `again` is that of a trial, with other last digits."""
    errors = compare(actual, expected)
    wrong = [what for what, error in errors.items() if not error <= TOLERANCE]
    changes = dict.fromkeys(expected, 0.0)
    for trial in range(1, TRIALS + 1) if wrong else ():
        moved = compare(again(trial), expected)
        changes = {what: max(change, moved[what]) for what, change in changes.items()}
    wrong = [what for what in wrong if not errors[what] <= LEEWAY * changes[what]]
    blurred = {what: change for what, change in changes.items() if change > BLUR and what not in wrong}
    return Judged(errors, wrong, blurred)


def place_of(state: Compilation, what: str) -> Span | None:
    """The location of the parameter or the value that a quantity is about."""
    named = {each.name: each.span for each in state.forward.parameters}
    named |= {value.name: node.span for node in state.forward.nodes for value in node.outputs}
    return next((span for name, span in named.items() if f"`{name}`" in what), None)


def nudged(tensor: torch.Tensor, trial: int) -> torch.Tensor:
    """A float tensor, with elements changed up or down by a small fraction of their order of magnitude."""
    if not tensor.is_floating_point():
        return tensor
    pattern = (torch.arange(tensor.numel()).view(tensor.shape) * (2 * trial + 1) + trial) % 5 - 2
    return tensor + LAST_DIGITS * pattern * tensor.abs().clamp(min=0.1)


def compare(actual: Figures, expected: Figures) -> dict[str, float]:
    """The error of each quantity, relative to its scale; infinite if it is missing, or finite in only one."""
    return {what: error_of(actual.get(what), figure) for what, figure in expected.items()}


def error_of(actual: Figure | None, expected: Figure) -> float:
    """The largest difference of any element, relative to the scale of the tensor.

    Metrics may be infinite or NaN on random data: then they must be so in both.
    """
    if actual is None or actual.value.shape != expected.value.shape:
        return float("inf")
    if not expected.value.numel():
        return 0.0
    a, b = actual.value, expected.value
    same = (a == b) | (a.isnan() & b.isnan())
    error = float((a - b).abs().masked_fill(same, 0.0).max())
    scale = max(float(b.abs().masked_fill(~b.isfinite(), 0.0).max()), MIN_SCALE * expected.unit)
    return error / scale if isfinite(error) else float("inf")
