"""Graph → graph in which every id is within the axis that it indexes, or is counted.

Ids of the data are checked as they are read. Computed ids are bounded by intervals: an id of the form
`minimum(maximum(i, 0), size(a) - 1)` cannot leave axis `a`. Where that proves nothing, the lookup is *guarded*: in
every layout, an id outside looks up zeros and is counted by a metric; the run ends with an error if that is not zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from partita.compiler.graph import Builder, Graph, Guard, Node, Value
from partita.compiler.ops.intervals import ANY, Interval, union
from partita.compiler.ops.loss import KnownTargets
from partita.compiler.ops.op import Op
from partita.compiler.ops.pointwise import cast, constant, pointwise
from partita.compiler.ops.reduce import total
from partita.compiler.ops.traits import SameTensor
from partita.dsl.types import Axis, Type, integers


def guarded(graph: Graph) -> Graph:
    """The graph with guards on the lookups whose ids may be out of range."""
    known = bounds_of(graph)
    build = Builder(graph.names)
    nodes: list[Node] = []
    guards: list[Guard] = []
    counts: list[tuple[str, Value]] = []
    for node in graph.nodes:
        lookup = node.op.ids([value.type for value in node.inputs])
        if lookup is not None:
            position, axis = lookup
            ids = node.inputs[position]
            if not within(known.get(ids, _range(ids.type)), axis) and not _checked(graph, ids, _ignored(node.op)):
                node = evolve(node, op=evolve(node.op, guarded=True))  # type: ignore[misc]
                guard = Guard(f"ids.{len(guards)}", axis, node.span)
                build.nodes = []
                counts.append((guard.name, _outside(build.at(node), ids, axis, _ignored(node.op))))
                nodes += build.nodes
                guards.append(guard)
        nodes.append(node)
    if not guards:
        return graph
    return evolve(graph, nodes=tuple(nodes), metrics=(*graph.metrics, *counts), guards=tuple(guards))


def _checked(graph: Graph, ids: Value, ignored: int | None) -> bool:
    """Whether ids that may be `ignored` are those of an input, all others of which are checked as they are read."""
    producers = graph.producers()
    while (node := producers.get(ids)) is not None and isinstance(node.op, SameTensor):
        (ids,) = node.inputs
    return ignored is not None and any(each.value == ids and each.ignored == (ignored,) for each in graph.inputs)


def _outside(build: Builder, ids: Value, axis: Axis, ignored: int | None = None) -> Value:
    """The number of ids below zero or beyond the axis, but for those that are `ignored`."""
    below = pointwise(build, "less", ids, constant(build, 0, ids))
    above = pointwise(build, "greater_equal", ids, constant(build, axis.size, ids))
    either = pointwise(build, "add", cast(build, below, "i64"), cast(build, above, "i64"))
    if ignored is not None:
        counts = pointwise(build, "not_equal", ids, constant(build, ignored, ids))
        either = pointwise(build, "multiply", either, cast(build, counts, "i64"))
    return total(build, either, either.type.names, "i64")


def bounds_of(graph: Graph) -> dict[Value, Interval]:
    """The intervals of a graph's integers, given those of its inputs."""
    limited = {
        each.value: union([(0, each.limit.size - 1), *((id, id) for id in each.ignored)])
        for each in graph.inputs
        if each.limit is not None
    }
    return bounds(graph.nodes, limited)


def bounds(nodes: Sequence[Node], known: Mapping[Value, Interval]) -> dict[Value, Interval]:
    """The intervals of integers, where they are known better than by their dtype."""
    intervals = dict(known)
    for node in nodes:
        if len(node.outputs) == 1 and not node.output.type.is_float and node.output.type.dtype != "bool":
            operands = [intervals.get(value, _range(value.type)) for value in node.inputs]
            types = [value.type for value in node.inputs]
            low, high = node.op.interval(operands, types, node.output.type)
            smallest, largest = _range(node.output.type)
            # Arithmetic that leaves the dtype's range wraps around.
            intervals[node.output] = (low, high) if smallest <= low and high <= largest else (smallest, largest)
    return intervals


def within(interval: Interval, axis: Axis) -> bool:
    """Whether all indices of an interval are of the axis."""
    return interval[0] >= 0 and interval[1] < axis.size


def _range(type: Type) -> Interval:
    """The numbers that a dtype holds."""
    if type.is_float:
        return ANY
    if type.dtype == "bool":
        return 0, 1
    held = integers(type.dtype)
    return held[0], held[-1]


def _ignored(op: Op) -> int | None:
    """An id that stands for none, and may be out of range."""
    return op.ignore if isinstance(op, KnownTargets) else None
