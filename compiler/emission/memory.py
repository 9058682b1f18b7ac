"""Bytes: what a stage keeps for each microbatch in flight, and the most that one of its functions holds.

Views cost nothing. The count is static, from where a tensor is made to its last use, as in the emitted functions, with
the temporary tensors of the operation that runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Part
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Constant, Detach
from partita.compiler.ops.shape import Arrange, Expand, Rename, Slice, Split

VIEWS = (Arrange, Constant, Detach, Expand, Part, Rename, Slice, Split)


def roots(nodes: Iterable[Node]) -> dict[Value, Value]:
    """For each view, the tensor whose memory it shows."""
    found: dict[Value, Value] = {}
    for node in nodes:
        if isinstance(node.op, VIEWS) and node.inputs:
            found[node.output] = found.get(node.inputs[0], node.inputs[0])
    return found


def held(values: Iterable[Value], nodes: Iterable[Node]) -> int:
    """Bytes of the memory behind values, each counted once; constants cost nothing."""
    nodes = tuple(nodes)
    behind = roots(nodes)
    constants = {v for node in nodes if isinstance(node.op, VIEWS) and not node.inputs for v in node.outputs}
    return sum(value.type.bytes for value in {behind.get(v, v) for v in values} - constants)


def working_set(nodes: Sequence[Node], keep: set[Value]) -> int:
    """The most bytes of results and temporary tensors at once while nodes run in order; `keep` lives to the end."""
    behind = roots(nodes)
    last: dict[Value, int] = {}
    for i, node in enumerate(nodes):
        for value in (*node.inputs, *node.outputs):
            last[behind.get(value, value)] = i
    for value in keep:
        last[behind.get(value, value)] = len(nodes)
    ending: dict[int, list[Value]] = {}
    for value, i in last.items():
        ending.setdefault(i, []).append(value)
    alive: dict[Value, int] = {}
    now = peak = 0
    for i, node in enumerate(nodes):
        if not isinstance(node.op, (*VIEWS, Accumulate, Receive, Send)):
            for value in node.outputs:
                alive[value] = value.type.bytes
                now += value.type.bytes
        operands, results = ([value.type for value in each] for each in (node.inputs, node.outputs))
        peak = max(peak, now + node.op.workspace(operands, results))
        for value in ending.get(i, ()):
            now -= alive.pop(value, 0)
    return peak
