"""Norms and activations that are written out."""

from __future__ import annotations

from math import pi, sqrt

from partita.importing.graph import Value, is_op, number
from partita.importing.normal.pointwise import pointwise
from partita.importing.normal.views import viewed
from partita.importing.patterns.matching import alike, applied, close, either


def rms_norm(value: Value) -> Value | None:
    """x · rsqrt(mean(x²) + eps), or x / sqrt(mean(x²) + eps); also where x has been multiplied by a vector before."""
    divided = applied(value, "divide")
    ways = [(x, inside[0]) for x, factor in either(value, "multiply") if (inside := applied(factor, "rsqrt"))]
    if divided is not None and (inside := applied(divided[1], "sqrt")) is not None:
        ways.append((divided[0], inside[0]))
    for x, squares in ways:
        for of, vector in [(x, None), *either(x, "multiply")]:
            found = _mean_of_squares(squares, of)
            if found is not None and isinstance(of, Value) and of.shape == value.shape:
                made = value.make("norm", function="rms_norm", x=of, scale=None, shift=None, **found)
                return made if vector is None else pointwise(value, "multiply", made, vector)
    return None


def _mean_of_squares(x: object, of: object) -> dict[str, object] | None:
    """The dimensions and the eps of mean(of²) + eps."""
    for mean, eps in either(x, "add"):
        if is_op(mean, "reduce") and mean.args["function"] == "mean" and number(eps) is not None:
            squares = applied(mean.args["x"], "multiply")
            if squares is not None and alike(squares[0], of) and alike(squares[1], of):
                return {"dims": mean.args["dims"], "eps": float(number(eps) or 0.0)}
    return None


def centered(value: Value) -> Value | None:
    """An RMS norm of x − mean(x) is a layer norm of x."""
    if value.op != "norm" or value.args["function"] != "rms_norm":
        return None
    xs = applied(value.args["x"], "subtract")
    if xs is None or not is_op(xs[1], "reduce") or xs[1].args["function"] != "mean" or xs[1].args["x"] is not xs[0]:
        return None
    same = xs[1].args["dims"] == value.args["dims"]
    return value.make("norm", **{**value.args, "function": "layer_norm", "x": xs[0]}) if same else None


def scaled(value: Value) -> Value | None:
    """A norm times a vector, and plus one."""
    for function, slot in (("multiply", "scale"), ("add", "shift")):
        for norm, vector in either(value, function):
            if not is_op(norm, "norm") or norm.args[slot] is not None or not isinstance(vector, Value):
                continue
            if number(vector) is not None or norm.args["shift"] is not None or vector.rank > norm.rank:
                continue
            if slot == "shift" and norm.args["function"] == "rms_norm":
                continue
            dims, lacks = norm.args["dims"], norm.rank - vector.rank
            wide = [i + lacks for i, size in enumerate(vector.shape) if size > 1]
            if wide == dims and all(vector.shape[dim - lacks] == norm.shape[dim] for dim in dims):
                own = viewed(value, vector, tuple(norm.shape[dim] for dim in dims))
                return value.make("norm", **{**norm.args, slot: own})
    return None


def gelu(value: Value) -> Value | None:
    """x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), and with erf(x / √2)."""
    for half, other in either(value, "multiply"):
        for x, factor in either(half, "multiply"):
            for inner, one in either(other, "add"):
                if close(factor, 0.5) and close(one, 1) and isinstance(x, Value):
                    if _cubic(inner, x):
                        return pointwise(value, "gelu", x)
                    if _root(inner, x):
                        return pointwise(value, "exact_gelu", x)
    return None


def _root(x: object, of: Value) -> bool:
    inside = applied(x, "erf")
    if inside is None:
        return False
    divided = applied(inside[0], "divide")
    if divided is not None:
        return divided[0] is of and close(divided[1], sqrt(2))
    return any(one is of and close(other, sqrt(0.5)) for one, other in either(inside[0], "multiply"))


def _cubic(x: object, of: Value) -> bool:
    inside = applied(x, "tanh")
    if inside is None:
        return False
    for polynomial, factor in either(inside[0], "multiply"):
        if close(factor, sqrt(2 / pi)):
            for one, cube in either(polynomial, "add"):
                for power, third in either(cube, "multiply"):
                    raised = applied(power, "power")
                    if one is of and close(third, 0.044715) and raised is not None:
                        return raised[0] is of and raised[1] == 3
    return False


def silu(value: Value) -> Value | None:
    """x · sigmoid(x)."""
    for x, gate in either(value, "multiply"):
        inside = applied(gate, "sigmoid")
        if inside is not None and inside[0] is x:
            return pointwise(value, "silu", x)
    return None


RULES = (rms_norm, centered, scaled, gelu, silu)
