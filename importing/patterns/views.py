"""Views of views, which patterns leave."""

from __future__ import annotations

from partita.importing.graph import Value, is_op
from partita.importing.normal.views import permuted, viewed


def collapsed(value: Value) -> Value | None:
    """A view of a view is one, and a view that changes nothing is none."""
    if value.op == "view" and (is_op(value.args["x"], "view") or value.args["x"].shape == value.shape):
        return viewed(value, value.args["x"])
    if value.op == "permute" and is_op(value.args["x"], "permute"):
        return permuted(value, value.args["x"], value.args["order"])
    return None


RULES = (collapsed,)
