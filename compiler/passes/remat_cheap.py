"""Joint graph → joint graph: values that cost one pass over memory are rematerialized for the backward pass.

These are results of operations with one or two FLOPs per element (a sum, a product, both, a cast) whose operands are
available in the backward pass anyway: parameters, inputs, or values that are rematerialized or read by other backward
operations. A layer norm's scaled result is made from the normalized one, which its gradient needs; a gated product from
its factors. Parameters gathered before each use are available only if the backward pass reads them.
"""

from __future__ import annotations

from attrs import evolve

from partita.compiler.graph import Graph, Node, Phase, Value
from partita.compiler.ops.lookup import OneHot
from partita.compiler.ops.loss import KnownTargets
from partita.compiler.ops.op import Op
from partita.compiler.ops.pointwise import FUNCTIONS, Cast, Pointwise

_PHASES = {Phase.BACKWARD: 1, Phase.WEIGHT: 2}  # in execution order; 0: never
# The longest chain of operations to rematerialize. The backward pass needs the end of a chain first, and would hold all
# of a longer one at once.
DEPTH = 2
_NAMES = {number: phase for phase, number in _PHASES.items()}


def remat_cheap(graph: Graph, gathered: bool) -> Graph:
    """Rematerialize cheap values where the backward pass first needs them; `gathered`: parameters are stored split."""
    producers = graph.producers()
    needed = _needed(graph, producers, gathered)
    copies: dict[Value, Value] = {}
    nodes: list[Node] = []

    def copy(value: Value) -> Value:
        """The value's copy, appended with the nodes that make it; the value itself if it is not in `needed`."""
        if value in needed and value not in copies:
            node = producers[value]
            inputs = tuple(copy(each) for each in node.inputs)
            copies[value] = value.derived(f"{value.name}.again")
            nodes.append(node.changed(inputs=inputs, outputs=(copies[value],), phase=_NAMES[needed[value]]))
        return copies.get(value, value)

    for node in graph.nodes:
        if node.phase in _PHASES:
            node = node.changed(inputs=tuple(copy(value) for value in node.inputs))
        nodes.append(node)
    return evolve(graph, nodes=tuple(nodes))


# In one pass over memory, without arithmetic worth counting.
CHEAP = (Cast, KnownTargets, OneHot)


def _cheap(op: Op) -> bool:
    """Whether a result is better recomputed, in one pass over memory with at most two FLOPs for each element, than
    kept.
    """
    return FUNCTIONS[op.function].flops <= 2 if isinstance(op, Pointwise) else isinstance(op, CHEAP)


def _needed(graph: Graph, producers: dict[Value, Node], gathered: bool) -> dict[Value, int]:
    """The values to rematerialize, and the phase in which each is needed first."""
    forward = {value: node for node in graph.nodes if node.phase is Phase.FORWARD for value in node.outputs}
    first, last, elsewhere = _readers(graph, forward)
    until: dict[Value, int] = {}  # the last phase in which a value is available
    if gathered:
        until = {each.value: last.get(each.value, 0) for each in graph.parameters}
    again: dict[Value, int] = {}  # with the length of its chain
    latest: dict[Value, int] = {}  # the last phase in which it can be rematerialized
    for value, node in forward.items():
        reach = min((_reach(each, node, producers, until) for each in node.inputs), default=0)
        depth = 1 + max((again.get(each, 0) for each in node.inputs), default=0)
        until[value] = last.get(value, 0)
        if reach and _cheap(node.op) and value not in elsewhere and depth <= DEPTH:
            again[value] = depth
            latest[value] = reach
            until[value] = max(until[value], reach)
    needed: dict[Value, int] = {}
    for value, node in reversed(forward.items()):
        if value not in again or (value not in first and value not in needed):
            continue
        needed[value] = min(needed.get(value, 2), first.get(value, 2), latest[value])
        for each in node.inputs:
            if each in again:
                needed[each] = min(needed.get(each, 2), needed[value])
    return needed


def _reach(value: Value, reader: Node, producers: dict[Value, Node], until: dict[Value, int]) -> int:
    """The last phase in which `reader` can read an operand: the last one, for constants and what `until` does not
    list.
    """
    node = producers.get(value)
    if node is None:
        return until.get(value, 2)
    if node.op.literal is not None:
        return 2
    return until.get(value, 0) if node.stage == reader.stage else 0


def _readers(graph: Graph, forward: dict[Value, Node]) -> tuple[dict[Value, int], dict[Value, int], set[Value]]:
    """The first and last backward phase that reads each value, and the values that are read on other stages."""
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    elsewhere: set[Value] = set()
    for node in graph.nodes:
        phase = _PHASES.get(node.phase)
        if phase is None:
            continue
        for value in node.inputs:
            first[value] = min(first.get(value, phase), phase)
            last[value] = max(last.get(value, phase), phase)
            if value in forward and forward[value].stage != node.stage:
                elsewhere.add(value)
    return first, last, elsewhere
