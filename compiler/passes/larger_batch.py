"""A model with another number of rows in its batch: more for an evaluation that processes several batches at once."""

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
    declared = axes_of(model).declared.get(batch)
    return model if declared is None else with_rows(model, batch, int(times * declared))


def with_rows(model: Model, batch: str, rows: int) -> Model:
    """The model with so many rows in its batch. Raises Refused (E0407) if other sizes depend on them."""
    axes = axes_of(model)
    if axes.declared.get(batch, rows) == rows:
        return model
    if batch in axes.parameters or any(batch in (each.whole, *each.parts) for each in axes.relations):
        raise refuse("E0407", f"`{model.name}` depends on the number of rows of `{batch}`", model.span)
    resized = Resized({batch: rows})
    return evolve(model, body=resized.body(model.body), answering=resized.body(model.answering))
