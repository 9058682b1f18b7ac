"""Numbers computed from axis sizes, kept as formulas so that they can be evaluated for other sizes.

A proxy of a file has smaller axes, and an evaluation more rows than a step; `size(vocab) - 1` must follow.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TypeAlias

from attrs import field, frozen

# Of longer formulas only the value is kept, because chains of `let` could be as long as a file.
MOST = 64

ARITHMETIC: dict[str, Callable[..., Fraction | float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "negate": operator.neg,
}

# Applied to numbers they are evaluated here, applied to tensors they are steps.
FUNCTIONS: dict[str, Callable[..., float]] = {
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "power": math.pow,
}
OF_TWO = ("power",)  # the functions of two numbers


@frozen
class Size:
    """`size(axis)`, and its value in the file."""

    axis: str
    value: int
    operations = 1


@frozen
class Formula:
    """One of `ARITHMETIC` or `FUNCTIONS`, applied to sizes, numbers and formulas."""

    operator: str
    operands: tuple[Term, ...]
    operations: int = field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        count = 1 + sum(each.operations for each in self.operands if isinstance(each, (Size, Formula)))
        object.__setattr__(self, "operations", count)


Number: TypeAlias = "Fraction | float"
Term: TypeAlias = "Size | Formula | Fraction | float"


def computed(operator: str, *operands: Term) -> Formula | None:
    """The formula of a result; None if it depends on no size, or takes more than MOST operations."""
    if not any(isinstance(each, (Size, Formula)) for each in operands):
        return None
    formula = Formula(operator, operands)
    return formula if formula.operations <= MOST else None


def value_of(term: Term, sizes: Mapping[str, int]) -> Number:
    """The value under other sizes; axes not in `sizes` keep those of the file.

    Raises ArithmeticError or ValueError if it is undefined.
    """
    if isinstance(term, Size):
        return Fraction(sizes.get(term.axis, term.value))
    if not isinstance(term, Formula):
        return term
    operands = [value_of(each, sizes) for each in term.operands]
    if term.operator in ARITHMETIC:
        return ARITHMETIC[term.operator](*operands)
    return FUNCTIONS[term.operator](*map(float, operands))


def resized(formula: Formula | Size, sizes: Mapping[str, int]) -> Formula | Size:
    """The formula in a file of other sizes; axes not in `sizes` keep those of the file."""
    if isinstance(formula, Size):
        return Size(formula.axis, sizes.get(formula.axis, formula.value))
    operands = (resized(each, sizes) if isinstance(each, (Size, Formula)) else each for each in formula.operands)
    return Formula(formula.operator, tuple(operands))


def sizes_in(term: Term) -> tuple[str, ...]:
    """The axes whose sizes take part in a term, each once."""
    if isinstance(term, Size):
        return (term.axis,)
    names = (name for operand in term.operands for name in sizes_in(operand)) if isinstance(term, Formula) else ()
    return tuple(dict.fromkeys(names))
