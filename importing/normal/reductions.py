"""Reductions, and what works along one dimension."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from partita.importing.graph import Value
from partita.importing.normal.arguments import Arguments, aten, several
from partita.importing.normal.pointwise import broadcasted, pointwise
from partita.importing.normal.views import viewed


def reduced(value: Value, function: str, x: Value, dims: list[int], keep: bool) -> Value:
    """A reduction at a value's place."""
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
    made = value.make("reduce", shape, function=function, x=x, dims=dims)
    return made if keep else viewed(value, made, tuple(size for dim, size in enumerate(x.shape) if dim not in dims))


@aten("mean.dim", "sum.dim_IntList", "amax.default", "amin.default", "mean.default", "sum.default")
@aten("max.default", "min.default", "logsumexp.default", "any.dim", "all.dim")
def _reduction(value: Value, a: Arguments) -> Value:
    function = value.op.partition(".")[0].removeprefix("a")
    if function in ("ny", "ll"):
        raise value.refuse(f"`{value.op.partition('.')[0]}` of booleans")
    x, given = a["self"], a["dim"]
    a.ignored("dtype")
    x = x.make("cast", x.shape, torch.int64, x=x) if x.dtype == torch.bool else x
    return reduced(value, function, x, _dims(x, given), bool(a["keepdim"]))


@aten("var.correction", "std.correction", "var.dim", "std.dim", "var.default", "std.default")
def _variance(value: Value, a: Arguments) -> Value:
    x, dims = a["self"], _dims(a["self"], a["dim"])
    correction = a["correction"] if "correction" in value.defaults else int(bool(a["unbiased"]))
    made = _spread(value, x, dims, correction, bool(a["keepdim"]))
    return made if value.op.startswith("var") else pointwise(value, "sqrt", made)


def _dims(x: Value, given: Any) -> list[int]:
    """Dimensions counted from the front; all, if none are given."""
    listed = given if isinstance(given, list) else [] if given is None else [given]
    return [int(dim) % x.rank for dim in listed] or list(range(x.rank))


def _spread(value: Value, x: Value, dims: list[int], given: float | None, keep: bool) -> Value:
    """The variance, with Bessel's correction unless another one is given."""
    correction = 1 if given is None else given
    count = prod(x.shape[dim] for dim in dims)
    off = value.make("pointwise", x.shape, x.dtype, function="subtract", xs=[x, reduced(value, "mean", x, dims, True)])
    squares = pointwise(off, "multiply", off, off)
    if correction and x.twin is not None and any(x.twin[dim] != x.shape[dim] for dim in dims):
        total = reduced(value, "sum", squares, dims, keep)
        return pointwise(total, "divide", total, value.make("degrees", (), x=x, dims=dims, correction=correction))
    made = reduced(value, "mean", squares, dims, keep)
    return pointwise(made, "multiply", made, count / (count - correction)) if correction else made


@several("var_mean.correction")
def _mean_and_variance(value: Value, a: Arguments, index: int) -> Value:
    """Of `var_mean`, which returns the variance first."""
    x, dims = a["self"], _dims(a["self"], a["dim"])
    correction, keep = a["correction"], bool(a["keepdim"])
    if index:
        return reduced(value, "mean", x, dims, keep)
    return _spread(value, x, dims, correction, keep)


@aten("linalg_vector_norm.default", "norm.ScalarOpt_dim")
def _vector_norm(value: Value, a: Arguments) -> Value:
    x, power = a["self"], a["ord" if "ord" in value.defaults else "p"]
    a.ignored("dtype")
    dims = _dims(x, a["dim"])
    if power == 1:
        return reduced(value, "sum", pointwise(x, "abs", x), dims, bool(a["keepdim"]))
    if power != 2 and power is not None:
        raise value.refuse(f"a norm of order {power}")
    squares = pointwise(x, "multiply", x, x)
    return pointwise(value, "sqrt", reduced(value, "sum", squares, dims, bool(a["keepdim"])))


@aten("cosine_similarity.default")
def _cosine(value: Value, a: Arguments) -> Value:
    x, y = a["x1"], a["x2"]
    dim, eps = a.dim(rank=max(x.rank, y.rank)), float(a["eps"])

    of = partial(broadcasted, value)
    lengths = [
        of("maximum", of("sqrt", reduced(value, "sum", of("multiply", each, each), [dim], False)), eps)
        for each in (x, y)
    ]
    product = reduced(value, "sum", of("multiply", x, y), [dim], False)
    return pointwise(value, "divide", product, pointwise(value, "multiply", *lengths))


@aten("softmax.int", "_softmax.default", "log_softmax.int", "_log_softmax.default", "cumsum.default")
def _along(value: Value, a: Arguments) -> Value:
    a.ignored("dtype", "half_to_float")
    function = value.op.partition(".")[0].removeprefix("_")
    x, dim = a["self"], a.dim()
    if function == "cumsum" and x.dtype != value.dtype:
        x = x.make("cast", x.shape, value.dtype, x=x)
    return value.make("along", function=function, x=x, dim=dim)


@aten("argmax.default", "argmin.default")
def _arg_max(value: Value, a: Arguments) -> Value:
    x = a["self"]
    if a["dim"] is None:
        raise value.refuse("`argmax` over all dimensions")
    dim = a.dim()
    x = x if value.op.startswith("argmax") else pointwise(x, "negate", x)
    shape = tuple(1 if i == dim else size for i, size in enumerate(x.shape))
    made = value.make("arg_max", shape, x=x, dim=dim)
    return made if a["keepdim"] else viewed(value, made)


@aten("partita.linear_scan.default")
def _linear_scan(value: Value, a: Arguments) -> Value:
    return value.make("linear_scan", a=a["a"], x=a["x"], dim=a.dim(rank=value.rank))


@aten("partita.ctc_loss.default")
def _ctc_loss(value: Value, a: Arguments) -> Value:
    named = {name: a[name] for name in ("log_p", "targets", "frames", "lengths")}
    return value.make("ctc_loss", blank=int(a["blank"]), zero=bool(a["zero"]), **named)


@aten("cumprod.default")
def _cumprod(value: Value, a: Arguments) -> Value:
    """h[t] = x[t] · h[t-1], which begins with 1."""
    a.ignored("dtype")
    x, dim = a["self"], a.dim()
    positions = value.make_constant(torch.arange(x.shape[dim]).view(-1, *(1,) * (x.rank - dim - 1)))
    first = positions.make("pointwise", positions.shape, torch.bool, function="equal", xs=[positions, 0])
    return value.make("linear_scan", a=x, x=pointwise(value, "where", first, x, 0), dim=dim)
