"""Loops over a dimension: what a step reads and makes has all others."""

from __future__ import annotations

from partita.importing.factors import Dim, Solver, factors
from partita.importing.graph import Value


@factors("scan_slice")
def _slice(solver: Solver, value: Value) -> list[Dim]:
    return [dim for i, dim in enumerate(solver.dims[value.args["x"]]) if i != value.args["dim"]]


@factors("scan_carry")
def _carry(solver: Solver, value: Value) -> list[Dim]:
    return list(solver.dims[value.args["begin"]])


@factors("scan_result")
def _result(solver: Solver, value: Value) -> list[Dim]:
    """What is carried has the same axes from step to step, and all that is read position by position has one."""
    loop = value.args["loop"]
    for carry, following in zip(loop.carries, value.args["nexts"], strict=True):
        for own, dim in zip(solver.dims.get(carry, ()), solver.dims[following], strict=False):
            solver.unify(own, dim, value)
    along = [solver.dims[each.args["x"]][each.args["dim"]] for each in loop.slices if each in solver.dims]
    for other in along[1:]:
        solver.unify(along[0], other, value)
    return [along[0], *solver.dims[value.args["x"]]]
