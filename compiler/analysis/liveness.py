"""Bytes that a stage keeps for each microbatch in flight, and the peak of each of its functions.

Views cost nothing. The count is static: from where a tensor is made to where the emitted functions release it, plus the
workspace of the operation that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from partita.compiler.codegen.sums import accumulated, targets
from partita.compiler.graph import Node, Value
from partita.compiler.ops.host import HostCopy
from partita.compiler.ops.shape import Expand
from partita.compiler.ops.slices import OfSlices
from partita.compiler.ops.traits import Adding, CachesTable, DenseOperands
from partita.dsl.types import Type

# A function's nodes in order: runs, each a call or inline statements, of units, each a statement or a compiled region.
Runs = Sequence[Sequence[Sequence[Node]]]


def device_bytes(value: Value) -> int:
    """What a value takes of the device's memory."""
    return 0 if value.host else value.type.bytes


def host_bytes(value: Value) -> int:
    """What a value takes of the host's memory."""
    return value.type.bytes if value.host else 0


def roots(nodes: Iterable[Node]) -> dict[Value, Value]:
    """For each view, the tensor whose memory it aliases."""
    aliases: dict[Value, Value] = {}
    for node in nodes:
        if node.op.is_view:
            aliases[node.output] = aliases.get(node.inputs[0], node.inputs[0])
    return aliases


def strided(nodes: Iterable[Node]) -> set[Value]:
    """The views whose elements do not follow each other in memory: parts along any axis but the first."""
    views: set[Value] = set()
    for node in nodes:
        if node.op.is_view:
            whole, view = node.inputs[0], node.output
            cut = view.type.elements < whole.type.elements and view.type.axes[1:] != whole.type.axes[1:]
            if whole in views or (cut and len(whole.type.axes) > 1):
                views.add(view)
    return views


def repeated(nodes: Iterable[Node]) -> set[Value]:
    """The views of which several elements are one in memory, so that some of their axes cannot be viewed as one."""
    views: set[Value] = set()
    for node in nodes:
        if node.op.is_view and (isinstance(node.op, Expand) or node.inputs[0] in views):
            views.update(node.outputs)
    return views


def live_bytes(values: Iterable[Value], nodes: Iterable[Node], alias_root: Mapping[Value, Value] | None = None) -> int:
    """Bytes of the tensors that `values` lie in, each counted once. `alias_root` maps a view to the value whose memory
    it has (by default, that of the views among `nodes`). Constants, and what slices share, cost nothing.
    """
    nodes = tuple(nodes)
    alias_root = roots(nodes) if alias_root is None else alias_root
    constants = {
        v for node in nodes if node.op.literal is not None or isinstance(node.op, OfSlices) for v in node.outputs
    }
    return sum(device_bytes(value) for value in {alias_root.get(v, v) for v in values} - constants)


def unread_results(nodes: Sequence[Node]) -> list[Value]:
    """Results that no other of the nodes reads, except to copy them to the host."""
    read: set[Value] = {value for node in nodes if not isinstance(node.op, HostCopy) for value in node.inputs}
    return [value for node in nodes for value in node.outputs if value not in read]


def shared(nodes: Iterable[Node]) -> int:
    """Bytes of the tensors that the slices of a microbatch share."""
    return sum(value.type.bytes for node in nodes if isinstance(node.op, OfSlices) for value in node.outputs)


def tables(nodes: Iterable[Node]) -> int:
    """Bytes of tables that kernels compute once and cache."""
    entries = (
        node.op.kernel_table([value.type for value in node.inputs])
        for node in nodes
        if isinstance(node.op, CachesTable)
    )
    return sum(dict(each for each in entries if each is not None).values())


def transient_peak_bytes(
    runs: Runs,
    before: Collection[Value],
    after: Collection[Value],
    nodes: Sequence[Node],
    alias_root: Mapping[Value, Value],
) -> int:
    """The most bytes that a function holds beyond what is held before or after it, whichever is more; `nodes` are those
    of its stage, and `alias_root` values the tensors whose memory they share.
    """
    ends = max(live_bytes(before, nodes, alias_root), live_bytes(after, nodes, alias_root))
    return max(0, working_set(runs, after, before, alias_root) - ends)


def line_by_line(nodes: Iterable[Node]) -> Runs:
    """Inline nodes, each a unit of its own."""
    return [[[node] for node in nodes]]


def working_set(
    runs: Runs,
    keep: Collection[Value],
    before: Collection[Value] = (),
    alias_root: Mapping[Value, Value] | None = None,
    size: Callable[[Value], int] = device_bytes,
    apart: Collection[Value] = (),
) -> int:
    """The most bytes of results and workspace at any time while runs execute in order. `before` is held when they
    begin; `keep` lives to the end. `size` is what a value takes: of the device's memory, or of the host's. The elements
    of values `apart` do not follow each other in memory.

    A tensor is freed after its last use. But if a unit or a run is the last reader of a tensor that it has not made,
    its caller holds the tensor until that unit or run ends.
    """
    nodes = [node for run in runs for unit in run for node in unit]
    apart = {*apart, *repeated(nodes)}
    alias_root = roots(nodes) if alias_root is None else alias_root
    last: dict[Value, int] = {}
    origins: dict[Value, tuple[int, int]] = {}  # where the run and the unit that make a tensor begin
    i = 0
    for run in runs:
        first, final = i, i + sum(map(len, run)) - 1
        for unit in run:
            start, end = (first, i), i + len(unit) - 1
            for node in unit:
                origins.update((value, start) for value in node.outputs)
                for value in (*node.inputs, *node.outputs):
                    tensor = alias_root.get(value, value)
                    origin = origins.get(tensor, (-1, -1))
                    last[tensor] = i if origin == start else end if origin[0] == first else final
                i += 1
    last.update((alias_root.get(value, value), len(nodes)) for value in keep)
    into = targets(nodes)
    adding = {node: into[sum].type for node, sum in accumulated(nodes, keep).items()}
    ending: dict[int, list[Value]] = {}
    for value, i in last.items():
        ending.setdefault(i, []).append(value)
    alive = {tensor: size(tensor) for tensor in {alias_root.get(value, value) for value in before}}
    now = peak = sum(alive.values())
    for i, node in enumerate(nodes):
        if node.op.allocates and not isinstance(node.op, OfSlices):
            for value in node.outputs:
                alive[value] = size(value)
                now += size(value)
        in_memory = sum(map(size, (*node.inputs, *node.outputs))) > 0  # it may work in the other memory
        peak = max(peak, now + (_workspace(node, adding.get(node), apart) if in_memory else 0))
        for value in ending.get(i, ()):
            now -= alive.pop(value, 0)
    return peak


def _workspace(node: Node, target: Type | None, apart: Collection[Value]) -> int:
    """Bytes of temporary tensors while a node runs, which may add its result to a `target` itself."""
    operands, results = ([value.type for value in each] for each in (node.inputs, node.outputs))
    if target is not None and isinstance(node.op, Adding):
        return node.op.workspace_to_add(target, operands, results[0])
    if isinstance(node.op, DenseOperands) and any(value in apart for value in node.inputs):
        return node.op.workspace_strided(operands, results)
    return node.op.workspace(operands, results)
