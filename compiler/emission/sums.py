"""Operations that add their result where it belongs: into an accumulator, or to another tensor in the same call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Receive
from partita.compiler.ops.op import Argument
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Pointwise

ADD = Pointwise("add")


def accumulated(nodes: Sequence[Node], keep: Collection[Value]) -> dict[Node, Node]:
    """Nodes whose only result goes into an accumulator and nowhere else, and that can add it there themselves."""
    made = {value: node for node in nodes for value in node.outputs}
    uses = uses_of(nodes)
    found: dict[Node, Node] = {}
    for node in nodes:
        if isinstance(node.op, Accumulate) and not node.op.maximum and not node.op.keep:
            (value,) = node.inputs
            producer = made.get(value)
            if producer is not None and len(producer.outputs) == uses[value] == 1 and value not in keep:
                target = Argument("t", node.op.type)
                if producer.op.emit_added(target, stand_ins(producer), producer.output.type) is not None:
                    found[producer] = node
    return found


def summed(nodes: Sequence[Node], keep: Collection[Value], literal: Collection[Value]) -> dict[Node, Node]:
    """Nodes whose first result is read by one addition and nothing else, whose other operand is a tensor that is there
    before, and that can make the sum themselves; with that addition.
    """
    places = {value: (i, node) for i, node in enumerate(nodes) for value in node.outputs}
    uses = uses_of(nodes)
    found: dict[Node, Node] = {}
    for node in nodes:
        if node.op != ADD or len({value.type for value in (*node.inputs, node.output)}) > 1:
            continue
        # The later of the two, at whose place the other one is there.
        first, last = sorted(node.inputs, key=lambda value: places[value][0] if value in places else -1)
        if last not in places or last in keep or uses[last] > 1 or first in literal:
            continue
        if first in places and isinstance(places[first][1].op, Collective):
            continue  # it may still be under way
        at, producer = places[last]
        if last is not producer.outputs[0] or producer in found or isinstance(producer.op, Receive):
            continue
        results = [value.type for value in producer.outputs]
        if producer.op.emit_sum(Argument("t", first.type), stand_ins(producer), results) is not None:
            found[producer] = node
            places[node.output] = (at, producer)
    return found


def uses_of(nodes: Sequence[Node]) -> Counter[Value]:
    """How often nodes read each value, in the order of the first reads."""
    return Counter(value for node in nodes for value in node.inputs)


def stand_ins(node: Node, literal: Collection[Value] = ()) -> list[Argument]:
    """Arguments by which a node can be asked what it writes."""
    return [Argument("1.0" if v in literal else f"x{i}", v.type, v in literal) for i, v in enumerate(node.inputs)]
