"""Who works on whole matrices: the shares of ranks that store parts of them (`partita.compiler.passes.stacked`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from typing import cast

from attrs import frozen

from partita.compiler.graph import Node, producers_of
from partita.compiler.layout import global_type
from partita.compiler.ops.stack import OfMatrices
from partita.compiler.passes.stacked import Stacked
from partita.compiler.state import Partitioned


@frozen
class MatrixShare:
    """Matrices of one size, parts of which are stored on several ranks. An `operation` works on all of them, which are
    divided along the mesh axes `over`: at most `each` of them on a rank. Without mesh axes, every rank has all.
    """

    operation: str
    rows: int
    columns: int
    over: tuple[str, ...]
    matrices: int
    each: int

    def __str__(self) -> str:
        """Such as `orthogonalize: 12 matrices of 64 × 256, 6 on each rank along data`."""
        many = f"{self.matrices} matri{'ces' if self.matrices > 1 else 'x'} of {self.rows} × {self.columns}"
        whose = f"{self.each} on each rank along {' × '.join(self.over)}" if self.over else "all on every rank"
        return f"{self.operation}: {many}, {whose}"


def matrix_shares(state: Partitioned, names: Collection[str] | None = None) -> tuple[MatrixShare, ...]:
    """The shares of a program's updates, those of several stages added up; of `names`, what is stacked with any of
    these parameters.
    """
    totals: dict[tuple[str, int, int, tuple[str, ...]], dict[tuple[int, ...], list[int]]] = {}
    for stacked in state.update.stacked:
        if names is None or not set(names).isdisjoint(stacked.parameters):
            for share in _shares(state, stacked):
                key = share.operation, share.rows, share.columns, share.over
                sums = totals.setdefault(key, {}).setdefault(stacked.stages, [0, 0])
                sums[0] += share.matrices
                sums[1] += share.each
    return tuple(
        MatrixShare(*key, sum(all for all, _ in by.values()), max(each for _, each in by.values()))
        for key, by in totals.items()
    )


def _shares(state: Partitioned, stacked: Stacked) -> Iterator[MatrixShare]:
    makers = producers_of(stacked.nodes)
    for node in stacked.nodes:
        if not isinstance(node.op, OfMatrices):
            continue
        (x,), first = node.inputs, node
        while first.inputs[0] in makers:
            first = makers[first.inputs[0]]
        rows, columns = sorted(prod(x.type.axis(name).size for name in side) for side in _sides(node))
        whole = sum(global_type(value.type, value.layout, state.mesh.sizes).elements for value in first.inputs)
        over = tuple(name for name, _ in x.layout.states)
        size = rows * columns
        yield MatrixShare(node.op.label, rows, columns, over, whole // size, x.type.elements // size)


def _sides(node: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return cast("OfMatrices", node.op).sides(node.inputs[0].type)
