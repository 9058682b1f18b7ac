"""Elementwise operations."""

from __future__ import annotations

import re
from functools import partial
from math import log

import torch

from partita.importing.draws import Draw, drawn
from partita.importing.graph import Value, is_op, number
from partita.importing.normal.arguments import Arguments, aten
from partita.importing.normal.views import broadcast, expanded, integer, viewed

ASSIGNED = re.compile(r"^\w+\s*=\s*(torch\.)?rand\w*\([^()]*(\([^()]*\)[^()]*)*\)$")
UNARY = {
    "abs": "abs",
    "cos": "cos",
    "erf": "erf",
    "exp": "exp",
    "floor": "floor",
    "log": "log",
    "log_sigmoid": "log_sigmoid",
    "logical_not": "not",
    "neg": "negate",
    "relu": "relu",
    "round": "round",
    "rsqrt": "rsqrt",
    "sigmoid": "sigmoid",
    "sign": "sign",
    "silu": "silu",
    "sin": "sin",
    "sqrt": "sqrt",
    "tanh": "tanh",
    "bitwise_not": "not",
    "logsigmoid": "log_sigmoid",
    "special_erf": "erf",
}
BINARY = {
    "add": "add",
    "sub": "subtract",
    "subtract": "subtract",
    "mul": "multiply",
    "multiply": "multiply",
    "div": "divide",
    "divide": "divide",
    "true_divide": "divide",
    "maximum": "maximum",
    "minimum": "minimum",
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "logical_and": "and",
    "logical_or": "or",
    "__and__": "and",
    "__or__": "or",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "atan2": "atan2",
    "logaddexp": "logaddexp",
}
LARGEST = float(torch.finfo(torch.float32).max)
LOGIC = {"and", "or", "not"}


def pointwise(value: Value, function: str, *xs: object) -> Value:
    """A function of broadcast operands at a value's place, which has its shape."""
    return value.make("pointwise", function=function, xs=list(xs))


def broadcasted(value: Value, function: str, *xs: object) -> Value:
    """A function of operands at a value's place, with the shape that these have together."""
    return value.make(
        "pointwise", broadcast(*(x.shape for x in xs if isinstance(x, Value))), function=function, xs=list(xs)
    )


@aten(*(f"{name}.default" for name in UNARY))
def _unary(value: Value, a: Arguments) -> Value:
    function, x = UNARY[value.op.partition(".")[0]], a["self"]
    if function in LOGIC and x.dtype != torch.bool:
        raise value.refuse(f"`{function}` of bits")
    return pointwise(value, function, x)


@aten(*(f"{name}.{overload}" for name in BINARY for overload in ("Tensor", "Scalar", "default")))
@aten("max.other", "min.other")
def _binary(value: Value, a: Arguments) -> Value:
    name = value.op.partition(".")[0]
    function = {"max": "maximum", "min": "minimum"}.get(name) or BINARY[name]
    x, y = a["self"], a["other"]
    dropped = _as_dropped(value, function, x, y)
    if dropped is not None:
        return dropped
    if function in LOGIC and isinstance(x, Value) and x.dtype != torch.bool:
        raise value.refuse(f"`{function}` of bits")
    if isinstance(x, Value) and x.dtype == torch.bool and function in ("equal", "not_equal") and number(y) in (0, 1):
        return (
            expanded(value, x, value.shape) if (function == "equal") == bool(number(y)) else pointwise(value, "not", x)
        )
    times = a["alpha"] if "alpha" in value.args else 1
    if times != 1:
        y = y * times if isinstance(y, int | float) else pointwise(y, "multiply", y, times)
    neutral = {"add": 0, "subtract": 0, "multiply": 1, "divide": 1}.get(function)
    if neutral is not None and number(y) == neutral and isinstance(x, Value) and x.dtype == value.dtype:
        return expanded(value, x, value.shape)
    if function in ("add", "multiply") and number(x) == neutral and isinstance(y, Value) and y.dtype == value.dtype:
        return expanded(value, y, value.shape)
    if function == "divide":
        x, y = (_floating(value, each) for each in (x, y))
    return pointwise(value, function, *(_alike(value, each, (x, y)) for each in (x, y)))


def _floating(value: Value, x: object) -> object:
    """An operand of a division, which is one of floats."""
    return x.make("cast", x.shape, value.dtype, x=x) if isinstance(x, Value) and not x.is_float else x


def _alike(value: Value, x: object, operands: tuple[object, ...]) -> object:
    """An operand in the dtype that all of them have together."""
    dtypes = [each.dtype for each in operands if isinstance(each, Value)]
    if not isinstance(x, Value) or number(x) is not None or len(dtypes) < 2:
        return x
    floats = any(each.is_float for each in operands if isinstance(each, Value))
    whole = any(integer(dtype) for dtype in dtypes)
    if floats and not x.is_float:
        return x.make("cast", x.shape, torch.float32, x=x)
    return x.make("cast", x.shape, torch.int64, x=x) if whole and x.dtype == torch.bool else x


@aten("isnan.default", "isinf.default", "isfinite.default")
def _special(value: Value, a: Arguments) -> Value:
    """What is no number differs from itself; all finite numbers are at most the largest of f32."""
    x = a["self"]
    if value.op == "isnan.default":
        return pointwise(value, "not_equal", x, x)
    function = "greater" if value.op == "isinf.default" else "less_equal"
    return pointwise(value, function, pointwise(x, "abs", x), LARGEST)


@aten("xlogy.Tensor", "special_xlogy.default")
def _x_times_log(value: Value, a: Arguments) -> Value:
    """x · log y, and 0 where x is."""
    x, y = a["self"], a["other"]
    there = x.make("pointwise", x.shape, torch.bool, function="not_equal", xs=[x, 0])
    inside = value.make("pointwise", function="where", xs=[there, y, 1])
    return pointwise(value, "multiply", x, pointwise(value, "log", inside))


@aten("rsub.Scalar", "rsub.Tensor")
def _rsub(value: Value, a: Arguments) -> Value:
    x, alpha = a["self"], a["alpha"]
    x = x if alpha == 1 else pointwise(x, "multiply", x, alpha)
    return pointwise(value, "subtract", a["other"], x)


@aten("div.Tensor_mode", "div.Scalar_mode", "floor_divide.default", "floor_divide.Scalar")
def _floor_divide(value: Value, a: Arguments) -> Value:
    mode = a["rounding_mode"] if "rounding_mode" in value.args else "floor"
    x, y = a["self"], a["other"]
    if mode is None:
        return pointwise(value, "divide", x, y)
    if value.is_float:
        divided = pointwise(value, "divide", x, y)
        return pointwise(value, "floor", divided) if mode == "floor" else _truncated(value, divided)
    return pointwise(value, "floor_divide", x, y)


@aten("ceil.default", "trunc.default", "fmod.Scalar", "fmod.Tensor")
def _rounded(value: Value, a: Arguments) -> Value:
    x = a["self"]
    if not value.is_float:
        raise value.refuse(f"`{value.op.partition('.')[0]}` of integers")
    if value.op == "trunc.default":
        return _truncated(value, x)
    if value.op == "ceil.default":
        return pointwise(value, "negate", pointwise(value, "floor", pointwise(value, "negate", x)))
    whole = _truncated(value, pointwise(value, "divide", x, a["other"]))
    return pointwise(value, "subtract", x, pointwise(value, "multiply", whole, a["other"]))


def _truncated(value: Value, x: Value) -> Value:
    """x, rounded toward zero."""
    return pointwise(value, "multiply", pointwise(value, "sign", x), pointwise(value, "floor", pointwise(x, "abs", x)))


@aten("logical_xor.default", "bitwise_xor.Tensor", "__xor__.Tensor")
def _exclusive(value: Value, a: Arguments) -> Value:
    x, y = a["self"], a["other"]
    if not x.dtype == y.dtype == torch.bool:
        raise value.refuse("`xor` of bits")
    both = pointwise(value, "not", pointwise(value, "and", x, y))
    return pointwise(value, "and", pointwise(value, "or", x, y), both)


@aten("remainder.Scalar", "remainder.Tensor")
def _remainder(value: Value, a: Arguments) -> Value:
    x, by = a["self"], a["other"]
    if not value.is_float:
        return pointwise(value, "remainder", x, by)
    whole = x if number(by) == 1 else pointwise(value, "divide", x, by)
    whole = pointwise(value, "floor", whole)
    return pointwise(value, "subtract", x, whole if number(by) == 1 else pointwise(value, "multiply", whole, by))


@aten("pow.Tensor_Scalar", "pow.Scalar", "pow.Tensor_Tensor")
def _power(value: Value, a: Arguments) -> Value:
    x, p = a["self"], a["exponent"]
    if value.op == "pow.Scalar":  # 2 ** x
        scaled = pointwise(p, "multiply", p, float(torch.tensor(float(x), dtype=torch.float64).log()))
        return pointwise(value, "exp", scaled)
    exponent = number(p)
    if exponent == 0.5:
        return pointwise(value, "sqrt", x)
    if exponent == -0.5:
        return pointwise(value, "rsqrt", x)
    if exponent == 2:
        return pointwise(value, "multiply", x, x)
    if exponent == 1:
        return expanded(value, x, value.shape)
    return pointwise(value, "power", x, p if exponent is None else exponent)


@aten("square.default")
def _square(value: Value, a: Arguments) -> Value:
    return pointwise(value, "multiply", a["self"], a["self"])


@aten("reciprocal.default")
def _reciprocal(value: Value, a: Arguments) -> Value:
    return pointwise(value, "divide", 1.0, a["self"])


@aten("log1p.default", "expm1.default", "log2.default", "log10.default")
def _near(value: Value, a: Arguments) -> Value:
    x = a["self"]
    if value.op == "log1p.default":
        return pointwise(value, "log", pointwise(value, "add", x, 1))
    if value.op == "expm1.default":
        return pointwise(value, "subtract", pointwise(value, "exp", x), 1)
    return pointwise(value, "divide", pointwise(value, "log", x), log(2 if value.op == "log2.default" else 10))


@aten("sinh.default", "cosh.default", "asinh.default", "acosh.default", "atanh.default")
def _hyperbolic(value: Value, a: Arguments) -> Value:
    x, of, name = a["self"], partial(pointwise, value), value.op.partition(".")[0]
    if name in ("sinh", "cosh"):
        both = (of("exp", x), of("exp", of("negate", x)))
        return of("divide", of("subtract" if name == "sinh" else "add", *both), 2)
    if name == "atanh":
        return of("divide", of("log", of("divide", of("add", x, 1), of("subtract", 1.0, x))), 2)
    if name == "acosh":
        return of("log", of("add", x, of("sqrt", of("subtract", of("multiply", x, x), 1))))
    below = x.make("pointwise", x.shape, torch.bool, function="less", xs=[x, 0])  # abs has no slope at 0
    size = of("where", below, of("negate", x), x)
    made = of("log", of("add", size, of("sqrt", of("add", of("multiply", size, size), 1))))
    return of("where", below, of("negate", made), made)


@aten("tan.default", "asin.default", "acos.default", "atan.default")
def _angle(value: Value, a: Arguments) -> Value:
    x, of, name = a["self"], partial(pointwise, value), value.op.partition(".")[0]
    if name == "tan":
        return of("divide", of("sin", x), of("cos", x))
    if name == "atan":
        return of("atan2", x, 1.0)
    rest = of("sqrt", of("subtract", 1.0, of("multiply", x, x)))
    return of("atan2", x, rest) if name == "asin" else of("atan2", rest, x)


@aten("gelu.default")
def _gelu(value: Value, a: Arguments) -> Value:
    return pointwise(value, "gelu" if a["approximate"] == "tanh" else "exact_gelu", a["self"])


@aten("softplus.default")
def _softplus(value: Value, a: Arguments) -> Value:
    a.ignored("threshold")  # beyond it softplus is linear to the last bit
    beta = a["beta"]
    x = a["self"]
    if beta == 1:
        return pointwise(value, "softplus", x)
    scaled = pointwise(value, "multiply", x, beta)
    return pointwise(value, "divide", pointwise(value, "softplus", scaled), beta)


@aten(
    "leaky_relu.default", "elu.default", "relu6.default", "hardtanh.default", "hardsigmoid.default", "hardswish.default"
)
@aten("mish.default", "prelu.default", "celu.default", "selu.default")
def _activation(value: Value, a: Arguments) -> Value:
    x, name = a["self"], value.op.partition(".")[0]
    of = partial(pointwise, value)
    if name == "leaky_relu":
        return of("maximum", x, of("multiply", x, a["negative_slope"]))
    if name == "prelu":
        weight = a["weight"]
        weight = viewed(weight, weight, (*weight.shape, *(1,) * (x.rank - 2))) if weight.shape != (1,) else weight
        return of("add", of("maximum", x, 0), of("multiply", weight, of("minimum", x, 0)))
    if name in ("elu", "celu", "selu"):
        alpha, scale = (
            float(a[key] if key in value.args or key in value.defaults else 1) for key in ("alpha", "scale")
        )
        inner = float(a["input_scale"]) if "input_scale" in value.defaults else 1.0
        below = of("minimum", x, 0)
        below = of("multiply", below, inner) if inner != 1 else below
        below = of("multiply", of("subtract", of("exp", below), 1), alpha)
        made = of("add", of("relu", x), below)
        return of("multiply", made, scale) if scale != 1 else made
    if name == "mish":
        return of("multiply", x, of("tanh", of("softplus", x)))
    if name in ("relu6", "hardtanh"):
        low, high = (0, 6) if name == "relu6" else (a["min_val"], a["max_val"])
        return of("minimum", of("maximum", x, low), high)
    sixth = of("divide", of("minimum", of("maximum", of("add", x, 3), 0), 6), 6)
    return sixth if name == "hardsigmoid" else of("multiply", x, sixth)


@aten("clamp.default", "clamp.Tensor", "clamp_min.default", "clamp_max.default", "clip.default")
def _clamp(value: Value, a: Arguments) -> Value:
    made, low, high = a["self"], a["min"], a["max"]
    low, high = (None if number(each) in (float("inf"), float("-inf")) else each for each in (low, high))
    if low is not None:
        made = pointwise(value, "maximum", made, low)
    return made if high is None else pointwise(value, "minimum", made, high)


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(value: Value, a: Arguments) -> Value:
    return pointwise(value, "where", a["condition"], a["self"], a["other"])


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(value: Value, a: Arguments) -> Value:
    x, mask = a["self"], a["mask"]
    fill = number(a["value"])
    return pointwise(value, "where", mask, fill, x)


@aten("tril.default", "triu.default")
def _triangle(value: Value, a: Arguments) -> Value:
    """Elements below or above a diagonal, and zeros."""
    x, diagonal = a["self"], int(a["diagonal"])
    whole = torch.ones(x.shape[-2:], dtype=torch.bool)
    mask = whole.tril(diagonal) if value.op.startswith("tril") else whole.triu(diagonal)
    if x.dtype == torch.bool and x.constant is not None and bool(x.constant.all()):
        return value.make_constant(mask.expand(value.shape))
    if x.dtype == torch.bool:
        return pointwise(value, "and", x, value.make_constant(mask))
    return pointwise(value, "where", value.make_constant(mask), x, 0)


@aten("lerp.Scalar", "lerp.Tensor")
def _lerp(value: Value, a: Arguments) -> Value:
    start, end, weight = a["self"], a["end"], a["weight"]
    return pointwise(
        value, "add", start, pointwise(value, "multiply", pointwise(value, "subtract", end, start), weight)
    )


@aten("dropout.default")
def _dropout(value: Value, a: Arguments) -> Value:
    x, rate, training = a["input"], float(f"{a['p']:.6g}"), a["train"]
    return value.make("dropout", x=x, rate=rate) if rate and training else x


@aten("bernoulli.p")
def _dropped(value: Value, a: Arguments) -> Value:
    """What whole channels, or rows, are multiplied with: a dropout of ones, divided by the share that stays."""
    stays = float(a["p"])
    a.ignored("self", "generator")
    ones = value.make_constant(torch.ones(value.shape))
    ones = value.make("dropout", x=ones, rate=float(f"{1 - stays:.6g}"))
    return pointwise(value, "multiply", ones, stays)


def kept_share(x: object) -> tuple[Value, object] | None:
    """Zeros and ones that are drawn, as a dropout of ones times the share of ones, which rounds."""
    if is_op(x, "pointwise") and x.args["function"] == "multiply" and is_op(x.args["xs"][0], "dropout"):
        ones, share = x.args["xs"]
        return ones, share
    return None


def _as_dropped(value: Value, function: str, x: object, y: object) -> Value | None:
    """What is multiplied with zeros and ones that are drawn, and divided by the share of ones, in whichever order."""
    if function == "divide" and (kept := kept_share(x)) is not None and kept[1] == y:
        return kept[0]
    if not is_op(x, "pointwise") or x.args["function"] != {"divide": "multiply", "multiply": "divide"}.get(function):
        return None
    one, other = x.args["xs"]
    share, mask = (y, other) if function == "divide" else (other, y)
    if isinstance(one, Value) and (kept := kept_share(mask)) is not None and kept[1] == share:
        return pointwise(value, "multiply", one, kept[0])
    return None


@aten("rand.default", "rand_like.default", "randn.default", "randn_like.default", "randint.default", "randint.low")
@aten("randint_like.default", "randint_like.low_dtype", "normal_functional.default", "normal.Tensor_Tensor")
@aten("normal.Tensor_float", "normal.float_Tensor", "normal.float_float", "uniform.default", "exponential.default")
@aten("bernoulli.default")
def _drawn(value: Value, a: Arguments) -> Value:
    draw, functions = drawn(value.op, {name: a[name] for name in [*value.args]})
    dtype = torch.int64 if draw.kind == "integers" else torch.float32
    made: Value = value.make("input", value.shape, dtype, name=_sample_name(value, draw), draw=draw, number=a["number"])
    for function, other in functions:
        if other is None:
            made = pointwise(value, function, made)
        elif not isinstance(other, int | float) or other != (function == "multiply"):
            made = pointwise(value, function, made, other)
    if functions and functions[-1][0] == "less":
        made = made.make("pointwise", made.shape, torch.bool, **made.args)
    return made if made.dtype == value.dtype else value.make("cast", value.shape, value.dtype, x=made)


def _sample_name(value: Value, draw: Draw) -> str:
    """What a sample is called: as the module calls it."""
    lines = [line for line in value.place.lines if "/torch/" not in line.file]
    if lines and len(lines[-1].names) == 1 and ASSIGNED.search(lines[-1].text):
        return lines[-1].names[0]
    return {"normal": "noise", "uniform": "chance", "integers": "drawn"}[draw.kind]


@aten("zeros_like.default", "ones_like.default", "full_like.default", "new_zeros.default", "new_ones.default")
@aten("new_full.default")
def _filled(value: Value, a: Arguments) -> Value:
    a.ignored("self", "dtype", "size")
    name = value.op.partition(".")[0]
    fill = a["fill_value"] if "full" in name else 1 if "ones" in name else 0
    exact = torch.float64 if value.is_float else value.dtype
    return value.make_constant(torch.full(value.shape, fill, dtype=exact))
