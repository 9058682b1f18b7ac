"""Views of views, which patterns leave."""

from __future__ import annotations

from partita.importing.graph import LEAVES, Value, is_op
from partita.importing.normal.views import permuted, viewed


def collapsed(value: Value) -> Value | None:
    """A view of a view is one, and a view that changes nothing is none."""
    if value.op == "view" and (is_op(value.args["x"], "view") or value.args["x"].shape == value.shape):
        return viewed(value, value.args["x"])
    if value.op == "permute" and is_op(value.args["x"], "permute"):
        return permuted(value, value.args["x"], value.args["order"])
    return None


def transposed(value: Value) -> Value | None:
    """A product with a weight that is transposed is one with the weight, whose letters are."""
    if value.op != "einsum":
        return None
    letters, xs = list(value.args["letters"]), list(value.args["xs"])
    for i, x in enumerate(xs):
        if is_op(x, "permute") and is_op(x.args["x"], *LEAVES):
            own = dict(zip(x.args["order"], letters[i], strict=True))
            letters[i], xs[i] = "".join(own[dim] for dim in range(x.rank)), x.args["x"]
    return value.make("einsum", **{**value.args, "letters": letters, "xs": xs}) if xs != value.args["xs"] else None


RULES = (collapsed, transposed)
