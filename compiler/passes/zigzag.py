"""The graph of the forward pass → the same with some axes in zigzag order (`partita.compiler.ops.runs`).

Inputs, parameters and buffers are put into that order where they are read, and outputs and new values of buffers back
into their own. In between, operations do the same wherever positions stand, or know where they do (`Op.in_zigzag`). Of
the others, those that look at a few neighbours (`Stencil`) are computed for each of the 2N parts, beside which the
ends of its neighbours stand; lookups have other ids; and what is left has the axis whole and in its own order. So
layouts split such an axis as any other, and neither gradients nor collectives, nor what a run reads or stores, know of
the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from attrs import evolve, frozen

from partita.compiler.graph import Builder, Graph, Node, Value
from partita.compiler.naming import chunks
from partita.compiler.ops.lookup import Gather, OneHot, ScatterAdd
from partita.compiler.ops.pointwise import constant, pointwise
from partita.compiler.ops.shape import Concat, Merge, Rename, Shift, Slice, Split
from partita.compiler.ops.traits import Stencil
from partita.compiler.ops.zigzag import Zigzag
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span
from partita.dsl.types import Axis


@frozen
class Order:
    """An axis in zigzag order: the mesh axes that split it, with their sizes, and the place of the rule."""

    mesh_axes: tuple[tuple[str, int], ...]
    span: Span

    @property
    def ranks(self) -> int:
        """For how many ranks."""
        return prod(size for _, size in self.mesh_axes)


def in_zigzag(graph: Graph, orders: Mapping[str, Order]) -> Graph:
    """The graph with axes in these orders. Raises Refused (E0411) if a size does not divide."""
    return _Pass(graph, orders).run() if orders else graph


class _Pass:
    def __init__(self, graph: Graph, orders: Mapping[str, Order]) -> None:
        self.graph, self.orders = graph, orders
        self.build = Builder(graph.names)
        self.inputs = {each.value for each in graph.inputs}
        self.given = self.inputs | {each.value for each in graph.parameters}
        self.made: dict[Value, Value] = {}
        self.own: dict[tuple[Value, str, str], Value] = {}  # in order along an axis, in a scope → in its own order

    def run(self) -> Graph:
        """Walk the nodes once."""
        leaving = {each.value for each in self.graph.updates} | {value for _, value in self.graph.asked}
        left: dict[Value, Value] = {}
        for node in self.graph.nodes:
            self.build.at(node)
            self._node(evolve(node, inputs=tuple(map(self._read, node.inputs))), [*self.orders])
            left.update((value, self._back(value)) for value in node.outputs if value in leaving)
        return evolve(
            self.graph,
            nodes=tuple(self.build.nodes),
            updates=tuple(evolve(each, value=left.get(each.value, each.value)) for each in self.graph.updates),
            asked=tuple((name, left.get(value, value)) for name, value in self.graph.asked),
        )

    def _node(self, node: Node, axes: Sequence[str]) -> None:
        """Append a node that has the positions of these axes in order."""
        if not axes:
            self.build.nodes.append(node)
            return
        (axis, *others), order = axes, self.orders[axes[0]]
        self._divides(node, axis, order)
        op = node.op.in_zigzag(axis, order.ranks)
        if op is not None:
            self._node(node if op is node.op else evolve(node, op=op), others)
            return
        build = self.build.fresh().at(node)
        build.phase = node.phase
        nodes = self._relabelled(build, node, axis, order.ranks) or self._by_parts(build, node, axis, order.ranks)
        for each in nodes or self._whole(build, node, axis, order.ranks):
            self._node(each, others)

    def _divides(self, node: Node, axis: str, order: Order) -> None:
        value = next((each for each in (*node.inputs, *node.outputs) if each.type.has(axis)), None)
        size = value.type.axis(axis).size if value else 0
        if value is None or size % (2 * order.ranks) == 0:
            return
        over = " × ".join(f"`{name}` of {parts}" for name, parts in order.mesh_axes)
        raise refuse(
            "E0411",
            f"axis `{axis}` of {size} does not divide over {over} by zigzag",
            order.span,
            notes=[f"{value.name}: {value.type}"],
            help=f"each rank has two parts: choose a size of `{axis}` that is a multiple of {2 * order.ranks}",
        )

    @staticmethod
    def _relabelled(build: Builder, node: Node, axis: str, ranks: int) -> list[Node]:
        """A lookup along the axis, whose ids say where in the order the positions are. None of it for other nodes."""
        found = node.op.ids([value.type for value in node.inputs])
        if found is None or not isinstance(node.op, Gather | OneHot | ScatterAdd):
            return []
        i, indexed = found
        if indexed.name != axis:
            return [node]
        ids = node.inputs[i]
        half = constant(build, indexed.size // (2 * ranks), ids)
        part = pointwise(build, "floor_divide", ids, half)
        twice = pointwise(build, "add", part, part)
        # The parts 0, 1, … stand at 0, 2, …, and the last ones at 1, 3, …; what is out of range stays so.
        place = pointwise(
            build, "minimum", twice, pointwise(build, "subtract", constant(build, 4 * ranks - 1, ids), twice)
        )
        inside = pointwise(build, "remainder", ids, half)
        placed = pointwise(build, "add", pointwise(build, "multiply", place, half), inside)
        return [*build.nodes, node.changed(inputs=(*node.inputs[:i], placed, *node.inputs[i + 1 :]))]

    def _by_parts(self, build: Builder, node: Node, axis: str, ranks: int) -> list[Node]:
        """The operation on each part and a few positions before and after it. None of it if it needs more."""
        op = node.op
        reach = op.reach(axis) if isinstance(op, Stencil) else None
        if not isinstance(op, Stencil) or reach is None or any(value.type.has(axis) for value in node.inputs[1:]):
            return []
        (x, *others), (y,) = node.inputs, node.outputs
        whole = x.type.axis(axis)
        parts, half = Axis(chunks(axis), 2 * ranks), Axis(f"{axis}~place", whole.size // (2 * ranks))
        if max(reach) > half.size:
            return []
        split = build.apply(Split(axis, (parts, half)), x)
        pieces: list[tuple[Value, str]] = [(split, half.name)]
        for count, by in zip(reach, (1, -1), strict=True):
            if count:
                end = Axis(f"{axis}~{'before' if by > 0 else 'after'}", count)
                piece = build.apply(Slice(half.name, end, half.size - count if by > 0 else 0), split)
                # The ends are few: under this name, all ranks have them all.
                all_parts = f"{axis}~of"
                piece = build.apply(Rename(((parts.name, all_parts),)), piece)
                piece = build.apply(Zigzag(all_parts, ranks, back=True), piece)
                piece = build.apply(Zigzag(all_parts, ranks), build.apply(Shift(all_parts, by), piece))
                piece = build.apply(Rename(((all_parts, parts.name),)), piece)
                pieces.insert(0 if by > 0 else len(pieces), (piece, end.name))
        longer = Axis(f"{axis}~longer", half.size + sum(reach))
        values, ends = zip(*pieces, strict=True)
        beside = build.apply(Concat(ends, longer), *values)
        made = build.apply(op.inside(axis, longer, half), beside, *others)
        merge = Merge((parts.name, half.name), whole)
        return [*build.nodes, evolve(node, op=merge, inputs=(made,), outputs=(y,))]

    def _whole(self, build: Builder, node: Node, axis: str, ranks: int) -> list[Node]:
        """The node with the axis in its own order, and its results put into the other."""
        inputs = tuple(self._in_own_order(build, value, axis, ranks) for value in node.inputs)
        outputs = tuple(build.part(value, "in_order") if value.type.has(axis) else value for value in node.outputs)
        both = [(value, own) for value, own in zip(node.outputs, outputs, strict=True) if own != value]
        self.own.update({(value, axis, node.scope): own for value, own in both})
        ordered = [evolve(node, op=Zigzag(axis, ranks), inputs=(own,), outputs=(value,)) for value, own in both]
        return [*build.nodes, node.changed(inputs=inputs, outputs=outputs), *ordered]

    def _in_own_order(self, build: Builder, value: Value, axis: str, ranks: int) -> Value:
        if not value.type.has(axis):
            return value
        own = self.own.get((value, axis, build.scope))
        return own or build.derive(Zigzag(axis, ranks, back=True), value, value, ending="in_order")

    def _read(self, value: Value) -> Value:
        """A value in order: an input once, parameters and buffers for each reader, so that each stage has its own."""
        reordered = self.made.get(value, value)
        if reordered is value and value in self.given:
            for axis, order in self.orders.items():
                if value.type.has(axis):
                    reordered = self.build.derive(Zigzag(axis, order.ranks), value, reordered, ending="zigzag")
            if value in self.inputs:
                self.made[value] = reordered
        return reordered

    def _back(self, value: Value) -> Value:
        """A value in its own order."""
        for axis, order in self.orders.items():
            value = self._in_own_order(self.build, value, axis, order.ranks)
        return value
