"""What operations take on a device, in seconds.

On a profiled device, what was measured of operations like it. On others a roofline: the greater of arithmetic over the
FLOP/s that are reached and of bytes moved over the bandwidth that is reached. Where torch compiles the program, what
stands between two products is one kernel: only what enters it and what leaves it moves through memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from partita.compiler.analysis.liveness import VIEWS, roots
from partita.compiler.costs.devices import Device
from partita.compiler.emission.sums import accumulated
from partita.compiler.graph import Graph, Node, Value
from partita.compiler.ops.attend import Attend, AttendGradient
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.lookup import Gather, ScatterAdd
from partita.compiler.ops.normalize import LayerNormGradient, Normalize, NormalizeGradient
from partita.compiler.ops.op import Kernel
from partita.compiler.ops.optimizer import Accumulate, Store, Update
from partita.compiler.ops.position import Random
from partita.compiler.ops.reduce import ArgMax, Reduce

FLOATS = ("f32", "bf16", "f64")
_FREE = (*VIEWS, Receive, Send)
# Kernels of their own, with those that look at the moment and so end what torch compiles.
_ALONE = (Dot, Attend, AttendGradient, Gather, ScatterAdd, Random, Accumulate, Store, Update, Collective)
# One kernel reduces along one set of axes.
_REDUCING = (Reduce, ArgMax, Normalize, NormalizeGradient, LayerNormGradient)


def kernel_of(node: Node, added: bool = False) -> tuple[Kernel, str] | None:
    """What a node is known by to the timings of a device, and its dtype; None for what takes no time. `added`: its
    result goes straight into an accumulator.
    """
    if isinstance(node.op, (*_FREE, Collective)):
        return None
    operands = [value.type for value in node.inputs]
    results = [value.type for value in node.outputs]
    kernel = node.op.kernel(operands, results)
    dtype = next((t.dtype for t in (*results, *operands) if t.dtype in FLOATS), "f32")
    return kernel._replace(name=f"{kernel.name}.added") if added else kernel, dtype


def seconds(node: Node, device: Device, added: bool = False) -> float:
    """The time of one node on a device."""
    known = kernel_of(node, added)
    if known is None:
        return 0.0
    kernel, dtype = known
    measured = device.timings.seconds(kernel, dtype)
    if measured is not None:
        return measured
    operands = [value.type for value in node.inputs]
    results = [value.type for value in node.outputs]
    flops = device.flops[dtype]
    # Of two vectors the product is a reduction, which no matrix unit makes.
    if isinstance(node.op, Dot) and results[0].axes:
        *count, rows, depth, columns = map(int, kernel.features)
        flops *= device.products.efficiency(rows, depth, columns, *count)
    elif not isinstance(node.op, (Attend, AttendGradient)):
        flops = device.vector or flops
    moved = sum(type.bytes for type in (*operands, *results))
    if isinstance(node.op, Accumulate):
        moved += 2 * node.op.type.bytes
    return device.launch + max(node.op.flops(operands, results) / flops, moved / (device.bandwidth * device.streaming))


def product_flops(graph: Graph) -> float:
    """FLOPs of the products of a graph, whether matrix products or attention's. Scores that attention's gradient makes
    again are not counted.
    """
    total = 0.0
    for node in graph.nodes:
        flops = node.op.flops([value.type for value in node.inputs], [value.type for value in node.outputs])
        if isinstance(node.op, (Dot, Attend)):
            total += flops
        elif isinstance(node.op, AttendGradient):
            total += flops * 4 / 5
    return total


def timed(
    nodes: Sequence[Node], device: Device, compiled: bool = False, keep: Collection[Value] = ()
) -> Iterator[tuple[Node, float]]:
    """Nodes that run one after the other, with their times: what is `compiled` into one kernel has it at its first.
    `keep` outlives them. What is added where it is made takes no time of its own; of collectives that is up to the
    caller.
    """
    adding = accumulated(nodes, ())
    added = set(adding.values())
    kernels = _kernels(nodes, device, keep) if compiled else {}
    for node in nodes:
        if node in added or isinstance(node.op, Collective):
            yield node, 0.0
        else:
            yield node, kernels[node] if node in kernels else seconds(node, device, node in adding)


def _kernels(nodes: Sequence[Node], device: Device, keep: Collection[Value]) -> dict[Node, float]:
    """The times of kernels, at their first nodes, and nothing at the others that they hold."""
    behind = roots(nodes)
    uses = Counter(
        behind.get(value, value) for node in nodes if not isinstance(node.op, VIEWS) for value in node.inputs
    )
    uses.update(behind.get(value, value) for value in keep)
    found: dict[Node, float] = {}
    run: list[Node] = []
    over: tuple[str, ...] | None = None
    sent: set[Value] = set()

    def end() -> None:
        if run:
            found.update(dict.fromkeys(run, 0.0))
            found[run[0]] = _together(run, device, behind, uses)
            run.clear()

    for node in nodes:
        if isinstance(node.op, Collective):
            sent.update(node.outputs)
        if isinstance(node.op, _FREE):
            continue
        if isinstance(node.op, _ALONE):
            end()
            over = None
            continue
        axes = _reduced(node)
        if (axes and over and axes != over) or not sent.isdisjoint(node.inputs):
            end()
            over = None
            sent.difference_update(node.inputs)
        over = over or axes
        run.append(node)
    end()
    return found


def _reduced(node: Node) -> tuple[str, ...] | None:
    if not isinstance(node.op, _REDUCING):
        return None
    return (node.op.over,) if isinstance(node.op.over, str) else tuple(sorted(node.op.over))


def _together(run: Sequence[Node], device: Device, behind: Mapping[Value, Value], uses: Counter[Value]) -> float:
    """One kernel: it reads once what it has not made, and writes what is read elsewhere."""
    made = {value for node in run for value in node.outputs}
    own: Counter[Value] = Counter()
    read: dict[Value, int] = {}
    flops = 0
    for node in run:
        flops += node.op.flops([value.type for value in node.inputs], [value.type for value in node.outputs])
        for value in node.inputs:
            tensor = behind.get(value, value)
            own[tensor] += 1
            if tensor not in made:
                read[tensor] = max(read.get(tensor, 0), min(value.type.bytes, tensor.type.bytes))
    written = sum(value.type.bytes for value in made if uses[value] > own[value])
    moved = sum(read.values()) + written
    rate = device.vector or device.flops["f32"]
    return device.launch + max(flops / rate, moved / (device.bandwidth * device.streaming))
