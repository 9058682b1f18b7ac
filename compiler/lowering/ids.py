"""Graph → graph in which every id is within the axis that it indexes, or is counted.

Ids of the data are checked as they are read. Computed ones are bounded by intervals: `minimum(maximum(i, 0), size(a) -
1)` cannot leave an axis `a`. Where that proves nothing the lookup is *guarded*: an id that is outside counts as zeros,
in every layout alike, and there is a count of them among the metrics, by which the run ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from attrs import evolve

from partita.compiler.graph import Builder, Graph, Guard, Node, Value
from partita.compiler.ops.lookup import Gather
from partita.compiler.ops.loss import NegativeLogLikelihood
from partita.compiler.ops.op import Op
from partita.compiler.ops.pointwise import Cast, Constant, Pointwise, cast, constant, pointwise
from partita.compiler.ops.position import Iota
from partita.compiler.ops.reduce import ArgMax, Reduce, total
from partita.dsl.types import INTEGERS, Axis

# The least and the greatest number that an integer may be.
Interval = tuple[float, float]
ANY: Interval = (-inf, inf)


def guarded(graph: Graph) -> Graph:
    """The graph with guards for the lookups whose ids may be outside."""
    bounds = _bounds(graph)
    build = Builder([value.name for node in graph.nodes for value in node.outputs])
    nodes: list[Node] = []
    guards: list[Guard] = []
    counts: list[tuple[str, Value]] = []
    for node in graph.nodes:
        lookup = _lookup(node)
        if lookup is not None:
            ids, axis = lookup
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


def _lookup(node: Node) -> tuple[Value, Axis] | None:
    """The ids of a lookup, and the axis that they index."""
    if isinstance(node.op, Gather):
        return node.inputs[0], node.inputs[1].type.axis(node.op.over)
    if isinstance(node.op, NegativeLogLikelihood):
        return node.inputs[1], node.inputs[0].type.axis(node.op.over)
    return None


def _outside(build: Builder, ids: Value, axis: Axis) -> Value:
    """How many ids are below zero or beyond the axis."""
    below = pointwise(build, "less", ids, constant(build, 0, ids))
    above = pointwise(build, "greater_equal", ids, constant(build, axis.size, ids))
    either = pointwise(build, "add", cast(build, below, "i64"), cast(build, above, "i64"))
    return total(build, either, either.type.names, "i64")


# ---------------------------------------------------------------- intervals


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
                found[node.output] = _interval(node, found)
    return found


def _interval(node: Node, known: Mapping[Value, Interval]) -> Interval:
    operands = [known.get(value, ANY) for value in node.inputs]
    op = node.op
    if isinstance(op, Constant):
        return float(op.value), float(op.value)
    if isinstance(op, Iota):
        return 0, op.axis.size - 1
    if isinstance(op, ArgMax):
        return 0, node.inputs[0].type.axis(op.over).size - 1
    if isinstance(op, Pointwise):
        rule = _POINTWISE.get(op.function)
        return rule(operands) if rule else ANY
    if isinstance(op, Reduce):
        if op.function == "max":
            return operands[0]
        count = node.inputs[0].type.elements // max(1, node.output.type.elements)
        return _product(operands[0], (count, count))
    if isinstance(op, Cast) and node.inputs[0].type.dtype not in (*INTEGERS, "bool"):
        return ANY
    # What only moves numbers, and concatenations, have those of their operands.
    return _union(operands) if _moves(op) else ANY


def _moves(op: Op) -> bool:
    return op.name in ("cast", "detach", "arrange", "rename", "split", "merge", "expand", "slice", "concat")


def _union(operands: Sequence[Interval]) -> Interval:
    return min(low for low, _ in operands), max(high for _, high in operands)


def _product(a: Interval, b: Interval) -> Interval:
    ends = [_times(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def _absolute(a: Interval) -> Interval:
    low, high = sorted((abs(a[0]), abs(a[1])))
    return (0.0 if a[0] <= 0 <= a[1] else low), high


_POINTWISE: dict[str, Callable[[list[Interval]], Interval]] = {
    "add": lambda o: (o[0][0] + o[1][0], o[0][1] + o[1][1]),
    "subtract": lambda o: (o[0][0] - o[1][1], o[0][1] - o[1][0]),
    "multiply": lambda o: _product(o[0], o[1]),
    "negate": lambda o: (-o[0][1], -o[0][0]),
    "maximum": lambda o: (max(o[0][0], o[1][0]), max(o[0][1], o[1][1])),
    "minimum": lambda o: (min(o[0][0], o[1][0]), min(o[0][1], o[1][1])),
    "where": lambda o: _union(o[1:]),
    "abs": lambda o: _absolute(o[0]),
}
