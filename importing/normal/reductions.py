"""Reductions, and what works along one dimension."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from partita.importing.graph import Value
from partita.importing.normal.arguments import Arguments, aten, several
from partita.importing.normal.pointwise import broadcasted, pointwise
from partita.importing.normal.views import selected, viewed


def reduced(value: Value, function: str, x: Value, dims: list[int], keep: bool) -> Value:
    """A reduction at a value's place."""
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
    made = value.make("reduce", shape, function=function, x=x, dims=dims)
    return made if keep else viewed(value, made, tuple(size for dim, size in enumerate(x.shape) if dim not in dims))


@aten("mean.dim", "sum.dim_IntList", "amax.default", "amin.default", "mean.default", "sum.default")
@aten("max.default", "min.default", "logsumexp.default")
def _reduction(value: Value, a: Arguments) -> Value:
    function = value.op.partition(".")[0].removeprefix("a")
    x, given = a["self"], a["dim"]
    a.ignored("dtype")
    x = x.make("cast", x.shape, torch.int64, x=x) if x.dtype == torch.bool else x
    return reduced(value, function, x, _dims(x, given), bool(a["keepdim"]))


@aten(*(f"{name}.{overload}" for name in ("any", "all") for overload in ("default", "dim", "dims")))
def _logical(value: Value, a: Arguments) -> Value:
    """The largest, or the smallest, of ones and zeros."""
    x = a["self"]
    if x.dtype != torch.bool:
        x = x.make("pointwise", x.shape, torch.bool, function="not_equal", xs=[x, 0])
    ones = x.make("cast", x.shape, torch.float32, x=x)
    function = "max" if value.op.startswith("any") else "min"
    made = reduced(value, function, ones, _dims(x, a["dim"]), bool(a["keepdim"]))
    return pointwise(value, "greater", made.make(made.op, made.shape, torch.float32, **made.args), 0)


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
    rank = max(x.rank, y.rank)
    dim, eps = a.dim(rank=rank), float(a["eps"])
    x, y = (viewed(value, each, (*(1 for _ in range(rank - each.rank)), *each.shape)) for each in (x, y))
    of = partial(broadcasted, value)
    lengths = [
        of("maximum", of("sqrt", reduced(value, "sum", of("multiply", each, each), [dim], False)), eps)
        for each in (x, y)
    ]
    product = reduced(value, "sum", of("multiply", x, y), [dim], False)
    return pointwise(value, "divide", product, pointwise(value, "multiply", *lengths))


@aten("cdist.default")
def _distances(value: Value, a: Arguments) -> Value:
    """Of each row of x to each of y; like torch's, without a slope where it is zero."""
    x, y, power = a["x1"], a["x2"], a["p"]
    a.ignored("compute_mode")
    x, y = (viewed(value, x, (*x.shape[:-1], 1, x.shape[-1])), viewed(value, y, (*y.shape[:-2], 1, *y.shape[-2:])))
    off = broadcasted(value, "subtract", x, y)
    last = [off.rank - 1]
    if power in (1, float("inf")):
        return reduced(value, "sum" if power == 1 else "max", pointwise(off, "abs", off), last, False)
    if power != 2:
        raise value.refuse(f"distances of order {power}")
    squares = reduced(value, "sum", pointwise(off, "multiply", off, off), last, False)
    apart = value.make("pointwise", value.shape, torch.bool, function="greater", xs=[squares, 0])
    return pointwise(value, "where", apart, pointwise(value, "sqrt", pointwise(value, "where", apart, squares, 1)), 0)


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
    return _products(value, a["self"], a.dim())


@aten("prod.dim_int")
def _product(value: Value, a: Arguments) -> Value:
    """The last of the products of the first elements."""
    a.ignored("dtype")
    x, dim = a["self"], a.dim()
    if not x.is_float:
        raise value.refuse("a product of integers")
    last = selected(value, _products(x.make("alias", x.shape), x, dim), dim, -1)
    return viewed(value, last) if a["keepdim"] else last


def _products(value: Value, x: Value, dim: int) -> Value:
    positions = value.make_constant(torch.arange(x.shape[dim]).view(-1, *(1,) * (x.rank - dim - 1)))
    first = positions.make("pointwise", positions.shape, torch.bool, function="equal", xs=[positions, 0])
    return value.make("linear_scan", a=x, x=pointwise(value, "where", first, x, 0), dim=dim)
