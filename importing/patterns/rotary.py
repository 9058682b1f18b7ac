"""Rotary positions: pairs of elements that are halves of a dimension, or neighbors, turned by angles of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from partita.importing.graph import Value, is_op
from partita.importing.normal.views import permuted, viewed
from partita.importing.patterns.constants import base_of, scaling_of
from partita.importing.patterns.matching import applied, either
from partita.importing.patterns.scalings import Scaling

Scalings: TypeAlias = Sequence[tuple[float, Scaling]]


def halves(value: Value, scalings: Scalings) -> Value | None:
    """x · cos + concat(−x₂, x₁) · sin."""
    for one, two in either(value, "add"):
        for x, cosines in either(one, "multiply"):
            for turned, sines in either(two, "multiply"):
                if isinstance(x, Value) and _turned(turned, x):
                    return _rope(value, x, cosines, sines, scalings, False)
                if isinstance(x, Value) and _turned_neighbors(turned, x):
                    return _rope(value, x, cosines, sines, scalings, True)
    return None


def _turned_neighbors(turned: object, x: Value) -> bool:
    """Whether a value is stack(−x₂, x₁) of neighbors of x, merged."""
    if not is_op(turned, "view") or turned.shape != x.shape or not is_op(turned.args["x"], "concat"):
        return False
    stacked = turned.args["x"]
    parts = [each.args["x"] if is_op(each, "view") else each for each in stacked.args["xs"]]
    if len(parts) != 2 or stacked.shape[-1] != 2 or stacked.args["dim"] != stacked.rank - 1:
        return False
    second = (applied(parts[0], "negate") or [None])[0]
    if not isinstance(second, Value) or not _neighbors(parts[1], second):
        return False
    whole = second.args["x"]
    return is_op(whole, "view") and whole.args["x"] is x


def _turned(turned: object, x: Value) -> bool:
    """Whether a value is concat(−x₂, x₁) of the halves of x."""
    if not is_op(turned, "concat") or turned.args["dim"] != x.rank - 1 or len(turned.args["xs"]) != 2:
        return False
    negative, first = turned.args["xs"]
    inside = applied(negative, "negate")
    second = inside[0] if inside is not None else None
    half = x.shape[-1] // 2
    return _part(first, x, 0, half) and _part(second, x, half, half)


def _part(part: object, x: Value, start: int, size: int) -> bool:
    if not is_op(part, "slice") or part.args["x"] is not x or part.args["dim"] != x.rank - 1:
        return False
    return bool(part.args["start"] == start and part.shape[-1] == size)


def pairs(value: Value, scalings: Scalings) -> Value | None:
    """stack(x₁ · cos − x₂ · sin, x₂ · cos + x₁ · sin), of neighbors, merged; halves that are written so as concat."""
    if value.op == "concat" and len(value.args["xs"]) == 2:
        found = _mixed(*value.args["xs"])
        if found is not None and value.args["dim"] == value.rank - 1:
            first, second, cosines, sines = found
            x = _whole(first, second)
            if x is not None:
                return _rope(value, x, cosines, sines, scalings, False, twice=False)
            if _neighbors(first, second):  # pairs are neighbors, and become halves
                x = viewed(value, first.args["x"], value.shape)
                turned = _rope(value, x, cosines, sines, scalings, True, twice=False)
                if turned is not None:
                    split = viewed(value, turned, first.args["x"].shape)
                    order = [*range(value.rank - 1), value.rank, value.rank - 1]
                    return viewed(value, permuted(value, split, order))
    stacked = value.args["x"] if value.op == "view" else None
    if not is_op(stacked, "concat") or stacked.shape[-1] != 2 or len(stacked.args["xs"]) != 2:
        return None
    found = _mixed(*(each.args["x"] if is_op(each, "view") else each for each in stacked.args["xs"]))
    if found is None or stacked.args["dim"] != stacked.rank - 1:
        return None
    first, second, cosines, sines = found
    if not _neighbors(first, second):
        return None
    x = viewed(value, first.args["x"], (*first.shape[:-1], 2 * first.shape[-1]))
    return _rope(value, x, cosines, sines, scalings, True, twice=False)


def _neighbors(first: Value, second: Value) -> bool:
    """Whether two values are the first and the second of pairs that a last dimension counts."""
    if not is_op(first, "select") or not is_op(second, "select") or first.args["x"] is not second.args["x"]:
        return False
    return (first.args["index"], second.args["index"]) == (0, 1) and first.args["dim"] == first.rank


def _mixed(one: object, two: object) -> tuple[Value, Value, Value, Value] | None:
    """x₁, x₂, cos and sin of x₁ · cos − x₂ · sin and x₂ · cos + x₁ · sin."""
    difference, total = applied(one, "subtract"), applied(two, "add")
    if difference is None or total is None:
        return None
    for x1, cosines in either(difference[0], "multiply"):
        for x2, sines in either(difference[1], "multiply"):
            for left, right in (total, total[::-1]):
                crossed = any(_same(a, x1) and _same(b, sines) for a, b in either(left, "multiply"))
                if crossed and any(_same(a, x2) and _same(b, cosines) for a, b in either(right, "multiply")):
                    return x1, x2, cosines, sines
    return None


def _same(one: Value, other: Value) -> bool:
    """Whether two values are one, or one table that is computed twice."""
    if one is other:
        return True
    if not isinstance(one, Value) or not isinstance(other, Value) or one.shape != other.shape:
        return False
    return one.constant is not None and other.constant is not None and torch.equal(one.constant, other.constant)


def _whole(first: Value, second: Value) -> Value | None:
    if not is_op(first, "slice") or not is_op(second, "slice"):
        return None
    x: Value = first.args["x"]
    half = x.shape[-1] // 2
    return x if _part(first, x, 0, half) and _part(second, x, half, half) else None


def complex_pairs(value: Value, scalings: Scalings) -> Value | None:
    """view_as_real(view_as_complex(x) · e^(i · angle)), of neighbors, merged."""
    if value.op != "view" or not is_op(value.args["x"], "view_as_real.default"):
        return None
    for x, factors in either(value.args["x"].args["self"], "multiply"):
        if is_op(x, "view_as_complex.default") and isinstance(factors, Value) and factors.constant is not None:
            cosines, sines = (factors.make("constant", factors.shape, torch.float32, name="") for _ in range(2))
            cosines.constant, sines.constant = factors.constant.real, factors.constant.imag
            inside = viewed(value, x.args["self"], (*x.shape[:-1], 2 * x.shape[-1]))
            return _rope(value, inside, cosines, sines, scalings, True, twice=False)
    return None


def _rope(
    value: Value,
    x: Value,
    cosines: object,
    sines: object,
    scalings: Scalings,
    interleaved: bool,
    twice: bool = True,
) -> Value | None:
    """Rotary positions with these tables, which are constants along one dimension and the last."""
    if not isinstance(cosines, Value) or not isinstance(sines, Value):
        return None
    if cosines.constant is None or sines.constant is None:
        return None
    shape, lines = cosines.shape, x.rank - cosines.rank  # a table has fewer dimensions, which count from the last
    long = [i for i, size in enumerate(shape[:-1]) if size > 1]
    if len(long) != 1:
        return None
    tables = [_table(each.constant, twice, interleaved) for each in (cosines, sines)]
    if tables[0] is None or tables[1] is None:
        return None
    base, scaling = base_of(tables[0], tables[1]), None
    if base is None:
        scaled = scaling_of(tables[0], tables[1], scalings)
        if scaled is None:
            return None  # what it is made of says it
        base, scaling = scaled
    options = {"position": long[0] + lines, "base": base, "interleaved": interleaved, "part": 1.0, "scaling": scaling}
    return viewed(value, value.make("rope", x.shape, x=x, **options))


def _table(elements: Tensor | None, twice: bool, interleaved: bool) -> Tensor | None:
    """A table's elements at [position, pair]; those of halves have each twice, and those of neighbors may."""
    if elements is None:
        return None
    table = elements.reshape(-1, elements.shape[-1])
    if not twice:
        return table
    first, second = (table[:, ::2], table[:, 1::2]) if interleaved else table.chunk(2, -1)
    return first if torch.equal(first, second) else None


def part(value: Value) -> Value | None:
    """concat(rope(first part of x), the rest of x)."""
    if value.op != "concat" or len(value.args["xs"]) != 2 or value.args["dim"] != value.rank - 1:
        return None
    turned, rest = value.args["xs"]
    if not is_op(turned, "rope") or not is_op(rest, "slice") or not is_op(turned.args["x"], "slice"):
        return None
    x, size = rest.args["x"], turned.shape[-1]
    if x.shape == value.shape and _part(turned.args["x"], x, 0, size) and _part(rest, x, size, x.shape[-1] - size):
        return value.make("rope", **{**turned.args, "x": x, "part": size / x.shape[-1]})
    return None


RULES = (halves, pairs, complex_pairs)
