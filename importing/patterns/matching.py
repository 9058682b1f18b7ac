"""Helps patterns to match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from partita.importing.graph import Value, number


def applied(x: Any, function: str) -> list[Any] | None:
    """The operands of an elementwise function, if it makes the value."""
    return x.args["xs"] if isinstance(x, Value) and x.op == "pointwise" and x.args["function"] == function else None


def either(x: Any, function: str) -> Iterator[tuple[Any, Any]]:
    """The two operands of an elementwise function in both orders."""
    xs = applied(x, function)
    if xs is not None:
        yield xs[0], xs[1]
        yield xs[1], xs[0]


def alike(one: Any, other: Any) -> bool:
    """Whether two values are one, or the same function of the same, which is computed twice."""
    if not isinstance(one, Value) or not isinstance(other, Value) or one is other or one.op != "pointwise":
        return one is other
    xs = applied(other, one.args["function"])
    return xs is not None and [*map(id, xs)] == [*map(id, one.args["xs"])]


def close(x: Any, wanted: float) -> bool:
    """Whether an argument is a number, up to rounding in f32."""
    found = number(x)
    return found is not None and abs(found - wanted) <= 1e-5 * max(1.0, abs(wanted))
