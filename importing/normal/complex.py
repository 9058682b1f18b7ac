"""Complex numbers, as pairs of their real and imaginary parts; transforms of Fourier, as products with tables."""

from __future__ import annotations

from functools import partial
from math import pi, prod
from typing import Any

import torch
from attrs import evolve

from partita.importing.graph import Value, is_op
from partita.importing.normal.arguments import OPERATIONS, Arguments, aten
from partita.importing.normal.layers import along_table
from partita.importing.normal.pointwise import broadcasted, pointwise
from partita.importing.normal.views import selected, viewed

# What of both parts is that of the whole.
OF_EACH = (
    *("view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "expand", "flatten"),
    *("alias", "clone", "contiguous", "detach", "neg", "sum", "mean", "cat", "stack", "flip", "roll", "copy"),
    *("slice_scatter", "select_scatter"),
)
OF_TWO = ("add", "sub", "mul", "div")
PRODUCTS = ("einsum", "matmul", "mm", "bmm")


def of_complex(value: Value) -> Value | None:
    """What an operation of complex numbers is, if one of its operands is a pair, or it makes one of reals."""
    name, a = value.op.partition(".")[0], Arguments(value)
    pairs = any(is_op(each, "complex") for each in value.inputs)
    makes = (
        value.dtype.is_complex and name in OF_TWO and all(not is_op(x, "view_as_complex.default") for x in value.inputs)
    )
    if value.constant is not None or not (pairs or makes):
        return None
    value = _of_reals(value)
    x: Any = a["self"]
    of = partial(broadcasted, value)
    if name in PRODUCTS:
        return _product(value)
    if name == "exp":
        size, turns = (pointwise(each, "exp" if each is x.args["re"] else "cos", each) for each in _parts(x))
        sine = pointwise(value, "sin", x.args["im"])
        return _pair(value, of("multiply", size, turns), of("multiply", size, sine))
    if name == "reciprocal":
        return _of_two(value, "div", 1.0, x)
    if name in OF_EACH:
        return _pair(value, *(_of_part(value, which) for which in ("re", "im")))
    if name in ("real", "imag"):
        part: Value = x.args["re" if name == "real" else "im"]
        return part
    if name == "view_as_real":
        parts = [viewed(value, each, (*each.shape, 1)) for each in (x.args["re"], x.args["im"])]
        return value.make("concat", xs=parts, dim=value.rank - 1)
    if name == "abs":
        re, im = x.args["re"], x.args["im"]
        return pointwise(value, "sqrt", of("add", of("multiply", re, re), of("multiply", im, im)))
    if name == "angle":
        return pointwise(value, "atan2", x.args["im"], x.args["re"])
    if name in ("conj", "_conj", "conj_physical"):
        return _pair(value, x.args["re"], pointwise(x.args["im"], "negate", x.args["im"]))
    if name in OF_TWO:
        return _of_two(value, name, x, a["other"])
    return None


def _pair(value: Value, re: Value, im: Value) -> Value:
    return value.make("complex", re=re, im=im)


def _of_part(value: Value, which: str) -> Value:
    def part(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [part(each) for each in x]
        if isinstance(x, Value) and x.dtype.is_complex and x.constant is not None:
            return _parts(x)[which == "im"]
        return x.args[which] if is_op(x, "complex") else x

    own = evolve(value, args={name: part(x) for name, x in value.args.items()})
    return OPERATIONS[value.op](own, Arguments(own))


def _of_reals(value: Value) -> Value:
    """At a value's place what is made is of reals."""
    return evolve(value, dtype=torch.float32) if value.dtype.is_complex else value


def _parts(x: Any) -> tuple[Any, Any]:
    """The real and the imaginary part, of which reals have none."""
    if is_op(x, "complex"):
        return x.args["re"], x.args["im"]
    if isinstance(x, complex):
        return x.real, x.imag
    if isinstance(x, Value) and x.dtype.is_complex:
        if is_op(x, "view_as_complex.default"):
            real: Value = x.args["self"]
            return selected(real, real, real.rank - 1, 0), selected(real, real, real.rank - 1, 1)
        if x.constant is None:
            raise x.refuse("complex numbers whose parts are not known")
        return x.make_constant(x.constant.real), x.make_constant(x.constant.imag)
    return x, None


def _of_two(value: Value, name: str, x: Any, y: Any) -> Value:
    of = partial(broadcasted, value)
    (a, b), (c, d) = _parts(x), _parts(y)
    if name in ("add", "sub"):
        function = "add" if name == "add" else "subtract"
        rest = b if d is None else d if b is None and name == "add" else None
        if rest is None:
            rest = of("negate", d) if b is None else of(function, b, d)
        return _pair(value, of(function, a, c), rest)
    if d is None:
        function = "multiply" if name == "mul" else "divide"
        return _pair(value, of(function, a, c), of(function, b, c))
    if name == "div":
        size = of("add", of("multiply", c, c), of("multiply", d, d))
        top = _of_two(value, "mul", x, value.make("complex", re=c, im=of("negate", d)))
        return _pair(value, *(of("divide", top.args[part], size) for part in ("re", "im")))
    if b is None:
        return _pair(value, of("multiply", a, c), of("multiply", a, d))
    re = of("subtract", of("multiply", a, c), of("multiply", b, d))
    return _pair(value, re, of("add", of("multiply", a, d), of("multiply", b, c)))


def _product(value: Value) -> Value:
    """A product of two, of which one may be of reals."""
    names = [name for name, each in value.args.items() if isinstance(each, Value | list) and name != "path"]
    both = value.args["tensors"] if "tensors" in value.args else [value.args[name] for name in names]
    if len(both) != 2:
        raise value.refuse("a product of more than two complex tensors")

    def of(one: Any, other: Any) -> Value:
        args = (
            {**value.args, "tensors": [one, other]}
            if "tensors" in value.args
            else dict(zip(names, (one, other), strict=True))
        )
        own = evolve(value, args=args)
        return OPERATIONS[value.op](own, Arguments(own))

    (a, b), (c, d) = map(_parts, both)
    if b is None or d is None:
        return _pair(value, of(a, c), of(a if b is None else b, c if d is None else d))
    add = partial(broadcasted, value)
    return _pair(value, add("subtract", of(a, c), of(b, d)), add("add", of(a, d), of(b, c)))


@aten("view_as_complex.default")
def _as_complex(value: Value, a: Arguments) -> Value:
    """Of a parameter; others are turned by positions, for which there is a pattern."""
    x = a["self"]
    if x.op not in ("parameter", "buffer"):
        return value
    return _pair(_of_reals(value), *(selected(x, x, x.rank - 1, i) for i in range(2)))


@aten("complex.default")
def _complex(value: Value, a: Arguments) -> Value:
    return _pair(_of_reals(value), a["real"], a["imag"])


def _table(value: Value, function: str, elements: torch.Tensor, *xs: Any) -> Value:
    """A table that is computed of others."""
    made = value.make("pointwise", elements.shape, elements.dtype, function=function, xs=list(xs))
    made.constant = elements
    return made


def _times(value: Value, count: int, size: int) -> Value:
    """How often each of the frequencies of `size` reals counts, of which the half is kept: the ends once."""
    numbers = torch.arange(count)
    places, once = value.make_constant(numbers), numbers == 0
    ends = _table(value, "equal", once, places, 0)
    if 2 * (count - 1) == size:
        last = _table(value, "equal", numbers == count - 1, places, count - 1)
        once = once | (numbers == count - 1)
        ends = _table(value, "or", once, ends, last)
    return _table(value, "where", torch.where(once, 1.0, 2.0), ends, 1, 2)


def _tables(value: Value, rows: int, columns: int, size: int, sign: int = 1) -> tuple[Value, Value]:
    """Cosines and sines of `size` places of a turn, for each product of a row's and a column's number."""
    shape = (rows, columns)

    of = partial(_table, value)
    one, other = value.make_constant(torch.arange(rows)[:, None]), value.make_constant(torch.arange(columns))
    turns = torch.arange(rows)[:, None] * torch.arange(columns)
    exact = (turns % int(size)).double() * (sign * 2 * pi / size)
    places = of("remainder", turns % int(size), of("multiply", turns, one, other), size)
    angles = of("multiply", exact, value.make("cast", shape, exact.dtype, x=places), sign * 2 * pi / size)
    return of("cos", exact.cos(), angles), of("sin", exact.sin(), angles)


@aten("_fft_r2c.default")
def _from_reals(value: Value, a: Arguments) -> Value:
    value = _of_reals(value)
    x, dims, norm = a["self"], [dim % value.rank for dim in a["dim"]], int(a["normalization"])
    a.ignored("onesided")
    last, rest = dims[-1], dims[:-1]
    cosines, sines = _tables(value, x.shape[last], value.shape[last], x.shape[last], -1)
    re, im = (along_table(value, x, last, each) for each in (cosines, sines))
    for dim in rest:
        re, im = _turned(value, re, im, dim, -1)
    return _scaled(value, re, im, norm, prod(x.shape[dim] for dim in dims))


@aten("_fft_c2c.default")
def _of_pairs(value: Value, a: Arguments) -> Value:
    x, dims, norm = a["self"], [dim % value.rank for dim in a["dim"]], int(a["normalization"])
    sign, value = -1 if a["forward"] else 1, _of_reals(value)
    re, im = _parts(x.args["x"] if is_op(x, "cast") else x)
    if im is None:
        last = dims.pop()
        size = x.shape[last]
        re, im = (along_table(value, re, last, each) for each in _tables(value, size, size, size, sign))
    for dim in dims:
        re, im = _turned(value, re, im, dim, sign)
    return _scaled(value, re, im, norm, prod(value.shape[dim % value.rank] for dim in a["dim"]))


@aten("_fft_c2r.default")
def _to_reals(value: Value, a: Arguments) -> Value:
    """Frequencies that are left out are the conjugates of others: those between the first and the last count twice."""
    x, dims, norm, size = a["self"], [dim % value.rank for dim in a["dim"]], int(a["normalization"]), a["last_dim_size"]
    re, im = _parts(x)
    for dim in dims[:-1]:
        re, im = _turned(value, re, im, dim, 1)
    last = dims[-1]
    count = x.shape[last]
    times = _times(value, count, int(size))
    re, im = (
        pointwise(each, "multiply", each, viewed(times, times, (count, *(1,) * (each.rank - last - 1))))
        for each in (re, im)
    )
    cosines, sines = _tables(value, count, int(size), size)
    made = along_table(value, re, last, cosines)
    made = broadcasted(value, "subtract", made, along_table(value, im, last, sines))
    factor = _factor(norm, prod(value.shape[dim] for dim in dims))
    return made if factor == 1 else pointwise(value, "multiply", made, factor)


def _turned(value: Value, re: Value, im: Value, dim: int, sign: int) -> tuple[Value, Value]:
    """The transform of pairs along a dimension."""
    size = re.shape[dim]
    cosines, sines = _tables(value, size, size, size, sign)
    of, by = partial(broadcasted, value), partial(along_table, value)
    first = of("subtract", by(re, dim, cosines), by(im, dim, sines))
    return first, of("add", by(re, dim, sines), by(im, dim, cosines))


def _factor(norm: int, count: int) -> float:
    return float({0: 1.0, 1: count**-0.5, 2: 1 / count}[norm])


def _scaled(value: Value, re: Value, im: Value, norm: int, count: int) -> Value:
    factor = _factor(norm, count)
    if factor != 1:
        re, im = (pointwise(each, "multiply", each, factor) for each in (re, im))
    return _pair(value, re, im)
