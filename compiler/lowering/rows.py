"""A model over a batch of more rows: what an evaluation of several batches is the model of."""

from __future__ import annotations

from attrs import evolve

from partita.compiler.lowering.resized import Resized
from partita.compiler.shrinking.sizes import axes_of
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Model


def of_more_rows(model: Model, batch: str, times: int) -> Model:
    """The model with `times` as many rows in its batch. Raises Refused (E0407) where other sizes depend on them."""
    axes = axes_of(model)
    if batch not in axes.declared:
        return model
    if batch in axes.parameters or any(batch in (each.whole, *each.parts) for each in axes.relations):
        raise refuse("E0407", f"`{model.name}` depends on the number of rows of `{batch}`", model.span)
    return evolve(model, body=Resized({batch: times * axes.declared[batch]}).body(model.body))
