"""Updates of many tensors by one call, which on a GPU is one kernel or a few.

Updates that are equal but for their tensors are made where the first of them stands. They read only tensors that are
there when the function begins, or views of these, so that nothing is kept for longer; and what they write is read by
nothing that stands before them. Gradients that are multiplied by one factor first, as clipping does, are multiplied by
the same call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import evolve, frozen

from partita.compiler.analysis.liveness import roots
from partita.compiler.codegen.sums import read_once
from partita.compiler.graph import Node, Value, producers_of
from partita.compiler.ops.op import Op
from partita.compiler.ops.optimizer import Update, updated_in_place
from partita.compiler.ops.pointwise import Cast, Pointwise

MULTIPLY = Pointwise("multiply")


@frozen(eq=False)
class ForeachGroup:
    """Updates that one call makes: as they stand, and with the gradients that are multiplied by the `factor`."""

    nodes: tuple[Node, ...]
    updates: tuple[Node, ...]
    factor: Value | None

    @property
    def reads(self) -> tuple[Value, ...]:
        """What the call reads."""
        inputs = tuple(value for node in self.updates for value in node.inputs)
        return inputs if self.factor is None else (*inputs, self.factor)


@frozen(eq=False)
class _Found:
    """An update that one call may make with others, and the nodes that it makes as well."""

    node: Node
    update: Node
    factor: Value | None = None
    clipping: tuple[Node, ...] = ()


def _joins(op: Op) -> bool:
    """Whether one call makes any number of updates that are equal but for their tensors."""
    return isinstance(op, Update) and op.multi_tensor


def together(nodes: Sequence[Node], keep: Collection[Value]) -> tuple[list[Node], Mapping[Node, ForeachGroup]]:
    """The nodes in an order in which updates that are one call are adjacent, without what clips their gradients; and
    these, by the first of them.
    """
    if not any(_joins(node.op) for node in nodes):  # of most functions
        return list(nodes), {}
    producers = producers_of(nodes)
    once = read_once(nodes, keep)
    behind = roots(nodes)
    read: set[Value] = set()  # by what is not moved
    groups: dict[tuple[object, ...], list[_Found]] = {}
    views: dict[Node, None] = {}  # of what is there

    def given(value: Value) -> bool:
        return value not in producers or producers[value] in views

    def found(node: Node) -> _Found | None:
        parameter, gradient, *states = node.inputs
        if not all(map(given, (parameter, *states))):
            return None
        if given(gradient):
            return _Found(node, node)
        product = once.get(gradient)
        if product is None or product.op != MULTIPLY or not given(product.inputs[0]):
            return None
        factor, cast = product.inputs[1], once.get(product.inputs[1])
        if factor.type.axes or product.inputs[0].type != gradient.type:
            return None
        clipping: tuple[Node, ...] = (product,)
        if cast is not None and cast.op == Cast(gradient.type.dtype):
            factor, clipping = cast.inputs[0], (cast, product)
        if factor in producers:
            return None
        return _Found(node, evolve(node, inputs=(parameter, product.inputs[0], *states)), factor, clipping)

    for node in nodes:
        own = found(node) if _joins(node.op) else None
        if node.op.is_view and all(map(given, node.inputs)):
            views[node] = None
        elif own is not None:
            written = {behind.get(value, value) for value in updated_in_place(node)}
            if read.isdisjoint(written):
                key = (node.op, node.inputs[0].type.dtype, node.inputs[0].host, own.factor)
                groups.setdefault(key, []).append(own)
                continue
        if node not in views:
            read.update(behind.get(value, value) for value in node.inputs)
    calls = {each[0].node: each for each in groups.values() if len(each) > 1}
    moved = {one.node for each in calls.values() for one in each}
    moved |= {node for each in calls.values() for one in each for node in one.clipping}
    order: dict[Node, None] = {}
    for node in nodes:
        if node in calls:
            operand_views = [
                producers[value] for one in calls[node] for value in one.update.inputs if value in producers
            ]
            for view in _with_makers(operand_views, producers):
                order.setdefault(view)
            order.update(dict.fromkeys(one.node for one in calls[node]))
        elif node not in moved:
            order.setdefault(node)
    return list(order), {
        first: ForeachGroup(tuple(one.node for one in each), tuple(one.update for one in each), each[0].factor)
        for first, each in calls.items()
    }


def _with_makers(nodes: Sequence[Node], producers: Mapping[Value, Node]) -> list[Node]:
    """Views, each behind what it is a view of."""
    ordered: list[Node] = []
    for node in nodes:
        ordered += _with_makers([producers[value] for value in node.inputs if value in producers], producers)
        ordered.append(node)
    return ordered
