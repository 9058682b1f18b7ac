"""Updates of many tensors by one call, which on a GPU is one kernel.

Updates that are equal but for their tensors are made where the first of them stands. They read only tensors that are
there when the function begins, or views of these, so that nothing is kept for longer; and what they write is read by
nothing that stands before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partita.compiler.analysis.liveness import roots
from partita.compiler.graph import Node, Value


def together(nodes: Sequence[Node]) -> tuple[list[Node], Mapping[Node, tuple[Node, ...]]]:
    """The nodes in an order in which updates that are one call are adjacent; and these, by the first of them."""
    if not any(node.op.multi_tensor for node in nodes):  # of most functions
        return list(nodes), {}
    made = {value: node for node in nodes for value in node.outputs}
    behind = roots(nodes)
    read: set[Value] = set()  # by what is not moved
    groups: dict[tuple[object, ...], list[Node]] = {}
    views: dict[Node, None] = {}  # of what is there
    for node in nodes:
        makers = [made.get(value) for value in node.inputs]
        given = all(maker is None or maker in views for maker in makers)
        if given and node.op.is_view:
            views[node] = None
        elif node.op.multi_tensor and given:
            written = {behind.get(value, value) for value in node.op.in_place(node.inputs)}
            if read.isdisjoint(written):
                groups.setdefault((node.op, node.inputs[0].type.dtype, node.inputs[0].host), []).append(node)
                continue
        if node not in views:
            read.update(behind.get(value, value) for value in node.inputs)
    found = {own[0]: tuple(own) for own in groups.values() if len(own) > 1}
    moved = {node: own[0] for own in found.values() for node in own}
    order: dict[Node, None] = {}
    for node in nodes:
        if node in found:
            wanted = [made[value] for each in found[node] for value in each.inputs if value in made]
            for view in _with_makers(wanted, made):
                order.setdefault(view)
            order.update(dict.fromkeys(found[node]))
        elif node not in moved:
            order.setdefault(node)
    return list(order), found


def _with_makers(nodes: Sequence[Node], made: Mapping[Value, Node]) -> list[Node]:
    """Views, each behind what it is a view of."""
    found: list[Node] = []
    for node in nodes:
        found += _with_makers([made[value] for value in node.inputs if value in made], made)
        found.append(node)
    return found
