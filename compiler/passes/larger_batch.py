"""A model with more rows in its batch, for an evaluation that processes several batches at once."""

from __future__ import annotations

from fractions import Fraction

from attrs import evolve

from partita.compiler.passes.resized import Resized
from partita.compiler.verify.proxy_sizes import axes_of
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Model


def with_larger_batch(model: Model, batch: str, times: int | Fraction) -> Model:
    """The model with `times` as many rows in its batch: a whole number of them.

    Raises Refused (E0407) if other sizes depend on them.
    """
    axes = axes_of(model)
    if batch not in axes.declared:
        return model
    if batch in axes.parameters or any(batch in (each.whole, *each.parts) for each in axes.relations):
        raise refuse("E0407", f"`{model.name}` depends on the number of rows of `{batch}`", model.span)
    return evolve(model, body=Resized({batch: int(times * axes.declared[batch])}).body(model.body))
