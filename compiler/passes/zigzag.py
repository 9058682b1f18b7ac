"""The graph of the forward pass → the same with some axes in zigzag order (`partita.compiler.ops.runs`).

Inputs, parameters and buffers are put into that order where they are read, and outputs and new values of buffers back
into their own. In between, operations do the same wherever positions stand, or know where they do (`Op.in_zigzag`); a
file with others is refused. So layouts split such an axis as any other, and neither gradients nor collectives, nor what
a run reads or stores, know of the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from attrs import evolve, frozen

from partita.compiler.graph import Builder, Graph, Node, Value
from partita.compiler.ops.zigzag import Zigzag
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span


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
    """The graph with axes in these orders. Raises Refused: E0411 if a size does not divide, E0419 if an operation needs
    positions one after the other.
    """
    return _Pass(graph, orders).run() if orders else graph


class _Pass:
    def __init__(self, graph: Graph, orders: Mapping[str, Order]) -> None:
        self.graph, self.orders = graph, orders
        self.build = Builder(graph.names)
        self.inputs = {each.value for each in graph.inputs}
        self.given = self.inputs | {each.value for each in graph.parameters}
        self.made: dict[Value, Value] = {}

    def run(self) -> Graph:
        """Walk the nodes once."""
        leaving = {each.value for each in self.graph.updates} | {value for _, value in self.graph.asked}
        left: dict[Value, Value] = {}
        for node in self.graph.nodes:
            self.build.at(node)
            for axis, order in self.orders.items():
                node = self._ordered(node, axis, order)
            self.build.nodes.append(evolve(node, inputs=tuple(map(self._read, node.inputs))))
            left.update((value, self._back(value)) for value in node.outputs if value in leaving)
        return evolve(
            self.graph,
            nodes=tuple(self.build.nodes),
            updates=tuple(evolve(each, value=left.get(each.value, each.value)) for each in self.graph.updates),
            asked=tuple((name, left.get(value, value)) for name, value in self.graph.asked),
        )

    def _ordered(self, node: Node, axis: str, order: Order) -> Node:
        """A node that has the positions of an axis in order."""
        types = [value.type for value in (*node.inputs, *node.outputs)]
        size = next((type.axis(axis).size for type in types if type.has(axis)), 0)
        op = node.op.in_zigzag(axis, order.ranks)
        if op is None:
            raise refuse(
                "E0419",
                f"`{_called(node)}` needs the positions of `{axis}` one after the other, and they are in zigzag order",
                node.span,
                notes=[f"`{order.span.text}`   ({order.span.place})"],
                help=f"`shard {axis} -> …` without `by zigzag`",
            )
        if size % (2 * order.ranks):
            over = " × ".join(f"`{name}` of {parts}" for name, parts in order.mesh_axes)
            value = next(value for value in (*node.inputs, *node.outputs) if value.type.has(axis))
            raise refuse(
                "E0411",
                f"axis `{axis}` of {size} does not divide over {over} by zigzag",
                order.span,
                notes=[f"{value.name}: {value.type}"],
                help=f"each rank has two parts: choose a size of `{axis}` that is a multiple of {2 * order.ranks}",
            )
        return node if op is node.op else evolve(node, op=op)

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
        restored = value
        for axis, order in self.orders.items():
            if value.type.has(axis):
                restored = self.build.derive(Zigzag(axis, order.ranks, back=True), value, restored, ending="in_order")
        return restored


def _called(node: Node) -> str:
    """What the file calls a node's function."""
    written = node.span.text.partition("(")[0] if node.span else ""
    return written if written.isidentifier() else node.op.label
