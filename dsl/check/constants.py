"""Arithmetic on numbers that are known at check time: sizes, counts, settings, numbers in models.

Values are exact fractions; only functions such as roots and logarithms produce floats. Numbers of the same unit can be
added, a ratio is a number as well (1 - 10% is 90%), and any number can be scaled by one without a unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from partita.dsl.advice.quotes import without_quotes
from partita.dsl.check.formulas import FUNCTIONS, OF_TWO, computed
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax import tree, units
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.units import PLAIN, RATIO, Quantity

UNITLESS = frozenset((PLAIN, RATIO))
_BITS = 4096  # of numerator and denominator together; bounds the cost of exact arithmetic

Lookup = Callable[[tree.Path | tree.Call], Quantity]


def evaluate(expression: tree.Expression, lookup: Lookup) -> Quantity:
    """The value of an expression; `lookup` resolves names and calls. Raises Refused."""
    expression = tree.bare(expression)
    if isinstance(expression, tree.Number):
        return units.read(expression.text, expression.span)
    if isinstance(expression, tree.Negative):
        return negative(evaluate(expression.operand, lookup))
    if isinstance(expression, tree.Binary):
        left, right = evaluate(expression.left, lookup), evaluate(expression.right, lookup)
        return combine(expression.operator, left, right, expression.span)
    if isinstance(expression, tree.Call) and is_of_numbers(expression):
        arguments = [evaluate(each.value, lookup) for each in expression.arguments]
        return apply(expression.name.text, arguments, expression.span)
    if isinstance(expression, tree.Path | tree.Call):
        return lookup(expression)
    raise refuse("E0306", "expected a number", expression.span, help=without_quotes(expression, ()))


def negative(quantity: Quantity) -> Quantity:
    """The negated quantity."""
    return Quantity(-quantity.value, quantity.dimension, computed("negate", quantity.term))


def combine(operator: str, left: Quantity, right: Quantity, span: Span) -> Quantity:
    """`left operator right`. Raises Refused: undefined or out of range (E0224), incompatible units (E0307)."""
    a, b = left.value, right.value
    dimensions = left.dimension, right.dimension
    same = left.dimension == right.dimension
    unitless = RATIO if RATIO in dimensions else PLAIN
    formula = computed(operator, left.term, right.term)
    try:
        if operator in "+-" and (same or UNITLESS.issuperset(dimensions)):
            return bounded(
                Quantity(a + b if operator == "+" else a - b, left.dimension if same else unitless, formula), span
            )
        if operator == "*" and not UNITLESS.isdisjoint(dimensions):
            dimension = next((each for each in dimensions if each not in UNITLESS), unitless)
            return bounded(Quantity(a * b, dimension, formula), span)
        if operator == "/" and (same or right.dimension in UNITLESS):
            return bounded(Quantity(a / b, PLAIN if same else left.dimension, formula), span)
    except ZeroDivisionError:
        raise refuse("E0224", "division by zero", span) from None
    except OverflowError:
        raise _out_of_range(span) from None
    if operator not in "+-*/":
        raise refuse("E0306", "expected a number, not a comparison", span)
    raise refuse("E0307", f"`{operator}` does not combine a {left.dimension} and a {right.dimension}", span)


def compared(comparison: Callable[[Any, Any], bool], left: Quantity, right: Quantity, span: Span) -> bool:
    """Whether a comparison holds. Raises Refused (E0307) if the units are incompatible."""
    if left.dimension != right.dimension and not UNITLESS.issuperset((left.dimension, right.dimension)):
        raise refuse("E0307", f"a {left.dimension} does not compare with a {right.dimension}", span)
    return comparison(left.value, right.value)


def is_of_numbers(call: tree.Call) -> bool:
    """Whether a call is one of FUNCTIONS, with as many positional arguments as that takes."""
    plain = all(each.name is None and not isinstance(each.value, tree.Arrow) for each in call.arguments)
    return plain and call.name.text in FUNCTIONS and len(call.arguments) == 1 + (call.name.text in OF_TWO)


def apply(function: str, arguments: Sequence[Quantity], span: Span) -> Quantity:
    """Apply one of FUNCTIONS to plain numbers. Raises Refused (E0224)."""
    try:
        value = FUNCTIONS[function](*(float(each.value) for each in arguments))
        return bounded(Quantity(value, PLAIN, computed(function, *(each.term for each in arguments))), span)
    except (ValueError, ZeroDivisionError):
        raise refuse("E0224", f"`{function}` is undefined here", span) from None
    except OverflowError:
        raise _out_of_range(span) from None


def bounded(quantity: Quantity, span: Span) -> Quantity:
    """The quantity. Raises Refused (E0224) if it is too large, too close to zero, or takes too many bits."""
    value = quantity.value
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() > _BITS or not units.in_range(value):
            raise _out_of_range(span)
    elif not math.isfinite(value):
        raise _out_of_range(span)
    return quantity


def _out_of_range(span: Span) -> Refused:
    return refuse("E0224", "this number is out of range", span)


def shown(quantity: Quantity) -> str:
    """The number in short form, for messages."""
    value = quantity.value
    if isinstance(value, Fraction) and value.denominator < 1000 and abs(value) < 10**12:
        # 5/2 reads better as 2.5; 8/3 stays a fraction.
        return f"{float(value):g}" if 1000 % value.denominator == 0 else str(value)
    return f"{float(value):.6g}"
