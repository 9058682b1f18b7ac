"""Padding of convolutions that modules add themselves, or cut off behind them, as causal ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partita.importing.graph import Value, is_op, number
from partita.importing.patterns.matching import applied


def _padded(value: Value) -> Value | None:
    """Zeros put before and after what a convolution reads."""
    x = value.args.get("x")
    if value.op != "conv" or not is_op(x, "concat") or x.args["dim"] < 2:
        return None
    inner = [each for each in x.args["xs"] if number(each) != 0]
    if len(inner) != 1:
        return None
    at, dim = x.args["xs"].index(inner[0]), x.args["dim"]
    sizes = [each.shape[dim] for each in x.args["xs"]]
    around = list(value.args["padding"])
    before, after = around[dim - 2]
    around[dim - 2] = before + sum(sizes[:at]), after + sum(sizes[at + 1 :])
    return value.make("conv", **{**value.args, "x": inner[0], "padding": around})


def _cut_off(value: Value) -> Value | None:
    """A slice of what a convolution makes, with its bias, that leaves out places beyond the sequence."""
    dim = value.args.get("dim")
    if value.op != "slice" or not isinstance(dim, int) or dim < 2:
        return None
    return _narrowed(value, value.args["x"], dim - 2)


def _narrowed(value: Value, x: Value, at: int) -> Value | None:
    xs = applied(x, "add")
    if xs is not None and is_op(xs[0], "conv") and isinstance(xs[1], Value) and xs[1].shape[2 + at :][:1] == (1,):
        made = _narrowed(value, xs[0], at)
        return None if made is None else value.make("pointwise", function="add", xs=[made, xs[1]])
    if not is_op(x, "conv") or x.args["stride"][at] != 1:
        return None
    around = list(x.args["padding"])
    start, end = value.args["start"], value.args["start"] + value.shape[2 + at]
    before, after = around[at][0] - start, around[at][1] - (x.shape[2 + at] - end)
    if before < 0 or after < 0:
        return None
    around[at] = before, after
    return value.make("conv", **{**x.args, "padding": around})


RULES: tuple[Callable[[Value], Any], ...] = (_padded, _cut_off)
