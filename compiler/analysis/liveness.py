"""Bytes: what a stage keeps for each microbatch in flight, and the most that one of its functions holds.

Views cost nothing. The count is static, from where a tensor is made to where the emitted functions let go of it, with
the temporary tensors of the operation that runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import Part
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.normalize import LayerNormGradient, Normalize, NormalizeGradient
from partita.compiler.ops.op import wide_bytes
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Constant, Detach
from partita.compiler.ops.position import Microbatch, Rope
from partita.compiler.ops.shape import Arrange, Expand, Rename, Slice, Split

VIEWS = (Arrange, Constant, Detach, Expand, Microbatch, Part, Rename, Slice, Split)

# Nodes of a function in order: runs, each a call or lines in place; of units, each a line or what torch compiles.
Runs = Sequence[Sequence[Sequence[Node]]]


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


def tables(nodes: Iterable[Node]) -> int:
    """Bytes of what kernels make once and keep: the angles of rotary positions, and what torch's layer norm is given
    for shift and scale, and its gradient for means and rates.
    """
    found: dict[tuple[object, ...], int] = {}
    for node in nodes:
        if isinstance(node.op, Rope):
            type = node.inputs[0].type
            parts = prod(parts for name, _, parts in node.op.shards if name == node.op.over)
            numbers = parts * type.axis(node.op.over).size * type.axis(node.op.pairs).size
            found[numbers, type.axis(node.op.pairs).size, node.op.base, type.dtype] = (
                numbers * wide_bytes(type) // type.elements
            )
        elif isinstance(node.op, Normalize) and node.op.center:
            type = node.inputs[0].type
            shape = tuple(type.axis(name).size for name in node.op.over)
            found[(type.dtype, *shape)] = 2 * prod(shape) * type.bytes // type.elements
        elif isinstance(node.op, LayerNormGradient) or (isinstance(node.op, NormalizeGradient) and node.op.center):
            rate = node.inputs[2].type
            found[(rate.dtype, *rate.shape, 1)] = 2 * rate.bytes
    return sum(found.values())


def beside(runs: Runs, before: Collection[Value], after: Collection[Value], nodes: Sequence[Node]) -> int:
    """The most bytes that a function holds beyond what is there before it or after it, whichever is more; `nodes` are
    those of its stage, which show what shares memory.
    """
    ends = max(held(before, nodes), held(after, nodes))
    return max(0, working_set(runs, after, before, roots(nodes)) - ends)


def line_by_line(nodes: Iterable[Node]) -> Runs:
    """Nodes that stand in place, each a line of its own."""
    return [[[node] for node in nodes]]


def working_set(
    runs: Runs,
    keep: Collection[Value],
    before: Collection[Value] = (),
    behind: Mapping[Value, Value] | None = None,
) -> int:
    """The most bytes of results and temporary tensors at once while runs go one after the other. `before` is there
    when they begin; `keep` lives to the end.

    A tensor ends with its last use; but where a unit or a run is the last to read what it has not made, with that unit
    or run: until then its caller holds it.
    """
    nodes = [node for run in runs for unit in run for node in unit]
    behind = roots(nodes) if behind is None else behind
    last: dict[Value, int] = {}
    made: dict[Value, tuple[int, int]] = {}  # the beginnings of the run and of the unit that make a tensor
    i = 0
    for run in runs:
        first, final = i, i + sum(map(len, run)) - 1
        for unit in run:
            home, end = (first, i), i + len(unit) - 1
            for node in unit:
                made.update((value, home) for value in node.outputs)
                for value in (*node.inputs, *node.outputs):
                    tensor = behind.get(value, value)
                    origin = made.get(tensor, (-1, -1))
                    last[tensor] = i if origin == home else end if origin[0] == first else final
                i += 1
    last.update((behind.get(value, value), len(nodes)) for value in keep)
    ending: dict[int, list[Value]] = {}
    for value, i in last.items():
        ending.setdefault(i, []).append(value)
    alive = {tensor: tensor.type.bytes for tensor in {behind.get(value, value) for value in before}}
    now = peak = sum(alive.values())
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
