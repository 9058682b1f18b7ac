"""Operations fused with an addition of their result: into an accumulator, or to another tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.traits import Adding, Summing

ADD = Pointwise("add")


def targets(nodes: Iterable[Node]) -> dict[Node, Accumulate]:
    """The accumulations among nodes, with their ops."""
    return {node: node.op for node in nodes if isinstance(node.op, Accumulate)}


def collective(node: Node) -> Collective | None:
    """The node's op, if it is a collective: the function starts it here and waits later."""
    return node.op if isinstance(node.op, Collective) else None


def accumulated(nodes: Sequence[Node], keep: Collection[Value]) -> dict[Node, Node]:
    """Nodes that can add their only result to an accumulator themselves, with the accumulation that alone reads it."""
    once = read_once(nodes, keep)
    fused: dict[Node, Node] = {}
    for node, op in targets(nodes).items():
        if not op.maximum and not op.keep and not op.stacked:
            (value,) = node.inputs
            producer = once.get(value)
            if producer is None or len(producer.outputs) != 1:
                continue
            if isinstance(producer.op, Adding) and producer.op.adds_to(
                op.type, [each.type for each in producer.inputs], value.type
            ):
                fused[producer] = node
    return fused


def summed(nodes: Sequence[Node], keep: Collection[Value], literal: Collection[Value]) -> dict[Node, Node]:
    """Nodes that can add an earlier tensor to their first result themselves, with the addition that alone reads it."""
    places = {value: (i, node) for i, node in enumerate(nodes) for value in node.outputs}
    uses = uses_of(nodes)
    fused: dict[Node, Node] = {}
    for node in nodes:
        if node.op != ADD or len({value.type for value in (*node.inputs, node.output)}) > 1:
            continue
        # The node that makes the later operand makes the sum: the other operand exists by then.
        first, last = sorted(node.inputs, key=lambda value: places[value][0] if value in places else -1)
        if last not in places or last in keep or uses[last] > 1 or first in literal:
            continue
        if first in places and collective(places[first][1]) is not None:
            continue  # it may still be in flight
        at, producer = places[last]
        if last is producer.outputs[0] and producer not in fused and isinstance(producer.op, Summing):
            fused[producer] = node
            places[node.output] = (at, producer)
    return fused


def read_once(nodes: Sequence[Node], keep: Collection[Value]) -> dict[Value, Node]:
    """The values that nodes make for one of them alone, which reads them once, with what makes them; `keep` outlives
    the nodes.
    """
    uses = uses_of(nodes)
    return {value: node for node in nodes for value in node.outputs if uses[value] == 1 and value not in keep}


def uses_of(nodes: Sequence[Node]) -> Counter[Value]:
    """How often nodes read each value, in the order of the first reads."""
    return Counter(value for node in nodes for value in node.inputs)
