"""Losses that are written out."""

from __future__ import annotations

from partita.importing.graph import Value, is_op


def cross_entropy_of_log_softmax(value: Value) -> Value | None:
    """nll_loss(log_softmax(x)): the log_softmax of a log_softmax is itself, so its cross entropy is that of x."""
    x = value.args.get("x")
    if value.op not in ("cross_entropy", "token_nll") or not is_op(x, "along"):
        return None
    if x.args["function"] != "log_softmax" or x.args["dim"] != (1 if x.rank > 1 else 0):
        return None
    return value.make(value.op, **{**value.args, "x": x.args["x"]})


RULES = (cross_entropy_of_log_softmax,)
