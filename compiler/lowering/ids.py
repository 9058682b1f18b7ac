"""Graph → graph in which every id is within the axis that it indexes, or is counted.

Ids of the data are checked as they are read. Computed ones are bounded by intervals: `minimum(maximum(i, 0), size(a) -
1)` cannot leave an axis `a`. Where that proves nothing the lookup is *guarded*: an id that is outside counts as zeros,
in every layout alike, and there is a count of them among the metrics, by which the run ends with an error.
"""

from __future__ import annotations

from attrs import evolve

from partita.compiler.graph import Builder, Graph, Guard, Node, Value
from partita.compiler.ops.intervals import ANY, Interval
from partita.compiler.ops.pointwise import cast, constant, pointwise
from partita.compiler.ops.reduce import total
from partita.dsl.types import Axis


def guarded(graph: Graph) -> Graph:
    """The graph with guards for the lookups whose ids may be outside."""
    bounds = _bounds(graph)
    build = Builder([value.name for node in graph.nodes for value in node.outputs])
    nodes: list[Node] = []
    guards: list[Guard] = []
    counts: list[tuple[str, Value]] = []
    for node in graph.nodes:
        lookup = node.op.ids([value.type for value in node.inputs])
        if lookup is not None:
            position, axis = lookup
            ids = node.inputs[position]
            least, most = bounds.get(ids, ANY)
            if least < 0 or most >= axis.size:
                node = evolve(node, op=evolve(node.op, guarded=True))  # type: ignore[misc]
                guard = Guard(f"ids.{len(guards)}", axis, node.span)
                build.nodes = []
                counts.append((guard.name, _outside(build.at(node), ids, axis)))
                nodes += build.nodes
                guards.append(guard)
        nodes.append(node)
    if not guards:
        return graph
    return evolve(graph, nodes=tuple(nodes), metrics=(*graph.metrics, *counts), guards=tuple(guards))


def _outside(build: Builder, ids: Value, axis: Axis) -> Value:
    """How many ids are below zero or beyond the axis."""
    below = pointwise(build, "less", ids, constant(build, 0, ids))
    above = pointwise(build, "greater_equal", ids, constant(build, axis.size, ids))
    either = pointwise(build, "add", cast(build, below, "i64"), cast(build, above, "i64"))
    return total(build, either, either.type.names, "i64")


def _bounds(graph: Graph) -> dict[Value, Interval]:
    """The intervals of integers and booleans."""
    found: dict[Value, Interval] = {}
    for each in graph.inputs:
        if each.limit is not None:
            found[each.value] = (0, each.limit.size - 1)
        elif each.value.type.dtype == "bool":
            found[each.value] = (0, 1)
    for node in graph.nodes:
        if len(node.outputs) == 1 and not node.output.type.is_float:
            if node.output.type.dtype == "bool":
                found[node.output] = (0, 1)
            else:
                operands = [found.get(value, ANY) for value in node.inputs]
                types = [value.type for value in node.inputs]
                found[node.output] = node.op.interval(operands, types, node.output.type)
    return found
