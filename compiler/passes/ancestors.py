"""The values that others are computed from."""

from __future__ import annotations

from collections.abc import Iterable

from partita.compiler.graph import Graph, Node, Value


def ancestors(graph: Graph, values: Iterable[Value], producers: dict[Value, Node] | None = None) -> set[Value]:
    """The values and everything they are computed from."""
    producers = graph.producers() if producers is None else producers
    seen = set(values)
    stack = list(seen)
    while stack:
        node = producers.get(stack.pop())
        if node is not None:
            for value in (*node.inputs, *node.outputs):
                if value not in seen:
                    seen.add(value)
                    if value in node.inputs:
                        stack.append(value)
    return seen
