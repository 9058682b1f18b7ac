"""Norms and activations that are written out."""

from __future__ import annotations

from math import pi, sqrt

from partita.importing.graph import Value, is_op, number
from partita.importing.normal.pointwise import pointwise
from partita.importing.patterns.matching import applied, close, either


def rms_norm(value: Value) -> Value | None:
    """x · rsqrt(mean(x²) + eps), or x / sqrt(mean(x²) + eps)."""
    for x, factor in either(value, "multiply"):
        inside = applied(factor, "rsqrt")
        found = _mean_of_squares(inside[0], x) if inside is not None else None
        if found is not None:
            return value.make("norm", function="rms_norm", x=x, scale=None, shift=None, **found)
    divided = applied(value, "divide")
    inside = applied(divided[1], "sqrt") if divided is not None else None
    if divided is not None and inside is not None:
        found = _mean_of_squares(inside[0], divided[0])
        if found is not None:
            return value.make("norm", function="rms_norm", x=divided[0], scale=None, shift=None, **found)
    return None


def _mean_of_squares(x: object, of: object) -> dict[str, object] | None:
    """The dimensions and the eps of mean(of²) + eps."""
    for mean, eps in either(x, "add"):
        if is_op(mean, "reduce") and mean.args["function"] == "mean" and number(eps) is not None:
            squares = applied(mean.args["x"], "multiply")
            dims = mean.args["dims"]
            if squares is not None and squares[0] is of and squares[1] is of and mean.shape[-1] == 1:
                return {"dims": dims, "eps": float(number(eps) or 0.0)}
    return None


def scaled(value: Value) -> Value | None:
    """A norm times a vector, and plus one."""
    for function, slot in (("multiply", "scale"), ("add", "shift")):
        for norm, vector in either(value, function):
            if not is_op(norm, "norm") or norm.args[slot] is not None or not isinstance(vector, Value):
                continue
            dims, free = norm.args["dims"], norm.args["shift"] is None
            if number(vector) is not None or not free or vector.shape != tuple(norm.shape[dim] for dim in dims):
                continue
            if slot == "shift" and norm.args["function"] == "rms_norm":
                continue
            if dims == list(range(norm.rank - len(dims), norm.rank)):
                return value.make("norm", **{**norm.args, slot: vector})
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


RULES = (rms_norm, scaled, gelu, silu)
