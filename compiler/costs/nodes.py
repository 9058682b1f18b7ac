"""Times of operations on a device, in seconds.

On a profiled device they are interpolated between measurements; on others they follow a roofline: the maximum of
compute time and memory time, at the throughput and bandwidth that are reached. If torch compiles the program, the
operations between two matrix products are one kernel, and only its inputs and outputs move through memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from partita.compiler.analysis.liveness import roots
from partita.compiler.codegen.sums import accumulated
from partita.compiler.costs.devices import Device
from partita.compiler.graph import Graph, Node, Value, outputs_of
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Transfer
from partita.compiler.ops.float8 import Float8Dot
from partita.compiler.ops.host import ASYNC_COPIES
from partita.compiler.ops.op import Kernel, Op
from partita.compiler.ops.scan import Scan
from partita.compiler.ops.slices import OfSlices
from partita.compiler.ops.traits import Adding

FLOATS = ("f32", "bf16", "f64")
# Times of so many different operations are remembered of a device: those of any one program, and of a search.
KNOWN = 50_000


def launches(op: Op) -> int:
    """How many kernels it runs, one after the other."""
    return op.launches() if isinstance(op, Scan) else 1


def takes_no_time(op: Op) -> bool:
    """Whether an operation runs no kernel. Sends, receives and collectives take time on a link."""
    return op.is_view or op.literal is not None or isinstance(op, (Transfer, OfSlices))


def kernel_of(node: Node, added: bool = False) -> tuple[Kernel, str] | None:
    """The kernel of a node, as a device's timings name it, and its dtype; None if it takes no time. `added`: it adds
    its result into an accumulator.
    """
    if takes_no_time(node.op) or isinstance(node.op, Collective):
        return None
    operands = [value.type for value in node.inputs]
    results = [value.type for value in node.outputs]
    kernel = node.op.kernel(operands, results)
    dtype = next((t.dtype for t in (*results, *operands) if t.dtype in FLOATS), "f32")
    adding = f"{kernel.name}.added"
    if added:
        return kernel._replace(name=adding, alike=kernel), dtype
    return kernel._replace(alike=kernel._replace(name=adding)), dtype


def seconds(node: Node, device: Device, added: bool = False) -> float:
    """The time of one node on a device; or on its host, where that keeps its operands: an operation there, and a copy
    to or from there, take at least as long to start as a kernel.
    """
    operands, results = (tuple((value.type, value.host) for value in values) for values in (node.inputs, node.outputs))
    key = node.op.structural_key, operands, results, added
    duration = device.known.get(key)
    if duration is None:
        if len(device.known) >= KNOWN:
            device.known.clear()
        duration = device.known[key] = _seconds(node, device, added)
    return duration


def _seconds(node: Node, device: Device, added: bool) -> float:
    if takes_no_time(node.op):
        return 0.0
    host_flags = {value.host for value in (*node.inputs, *node.outputs)}
    if len(host_flags) > 1:  # a copy from one memory to the other
        return device.launch + node.inputs[-1].type.bytes / device.host_link if device.gpu else 0.0
    if device.gpu and True in host_flags:
        moved = node.op.accessed([value.type for value in node.inputs], [value.type for value in node.outputs])
        return device.launch * launches(node.op) + moved / device.host_bandwidth
    known = kernel_of(node, added)
    if known is None:
        return 0.0
    kernel, dtype = known
    measured = device.timings.seconds(kernel, dtype)
    if measured is not None:
        return measured
    operands = [value.type for value in node.inputs]
    results = [value.type for value in node.outputs]
    if isinstance(node.op, Float8Dot) and "f8" in device.flops:
        device = device.narrowed()
    flops = device.flops[dtype]
    matrices = node.op.matrices(operands, results)
    if matrices is None or (matrices and min(matrices[:3]) == 1):  # a matrix by a vector fills no tile
        flops = device.vector or flops
    elif matrices:
        flops *= device.products.efficiency(*matrices)
    elif isinstance(node.op, Attention):
        flops *= device.attention.efficiency(*node.op.seen_keys(operands))
    computing, bandwidth = node.op.flops(operands, results) / flops, device.bandwidth * device.streaming
    took = device.launch * launches(node.op) + max(computing, node.op.accessed(operands, results) / bandwidth)
    moved = node.op.moved_to_add(results) if added and device.gpu and isinstance(node.op, Adding) else 0
    return took + (device.launch + moved / bandwidth if moved else 0.0)


def product_flops(graph: Graph) -> float:
    """FLOPs of a graph's matrix products, including attention's, without recomputed scores."""
    return sum(
        node.op.product_flops([value.type for value in node.inputs], [value.type for value in node.outputs])
        for node in graph.nodes
    )


def timed(
    nodes: Sequence[Node], device: Device, compiled: bool = False, keep: Collection[Value] = ()
) -> Iterator[tuple[Node, float]]:
    """Nodes that run in order, with their times; a kernel that is fused (`compiled`) has its time at its first node.
    `keep` outlives them. An accumulation into which its producer adds directly takes no time of its own; the times of
    collectives are left to the caller.
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
    """The times of fused kernels at their first nodes, and 0 at their other nodes."""
    alias_root = roots(nodes)
    uses = Counter(alias_root.get(value, value) for node in nodes if not node.op.is_view for value in node.inputs)
    uses.update(alias_root.get(value, value) for value in keep)
    times: dict[Node, float] = {}
    run: list[Node] = []
    over: tuple[str, ...] = ()
    sent: set[Value] = set()

    def end() -> None:
        if run:
            times.update(dict.fromkeys(run, 0.0))
            times[run[0]] = _together(run, device, alias_root, uses)
            run.clear()

    for node in nodes:
        if isinstance(node.op, Collective):
            sent.update(node.outputs)
        if takes_no_time(node.op) or isinstance(node.op, ASYNC_COPIES):
            continue
        if not node.op.fusible or any(value.host for value in (*node.inputs, *node.outputs)):
            end()
            over = ()
            continue
        axes = tuple(sorted(node.op.reduces))  # one kernel reduces along one set of axes
        if (axes and over and axes != over) or not sent.isdisjoint(node.inputs):
            end()
            over = ()
            sent.difference_update(node.inputs)
        over = over or axes
        run.append(node)
    end()
    return times


def _together(run: Sequence[Node], device: Device, alias_root: Mapping[Value, Value], uses: Counter[Value]) -> float:
    """The time of one fused kernel: it reads each outside tensor once and writes what is read elsewhere."""
    produced = outputs_of(run)
    own: Counter[Value] = Counter()
    read: dict[Value, int] = {}
    flops = 0
    for node in run:
        flops += node.op.flops([value.type for value in node.inputs], [value.type for value in node.outputs])
        for value in node.inputs:
            tensor = alias_root.get(value, value)
            own[tensor] += 1
            if tensor not in produced:
                read[tensor] = max(read.get(tensor, 0), min(value.type.bytes, tensor.type.bytes))
    written = sum(value.type.bytes for value in produced if uses[value] > own[value])
    moved = sum(read.values()) + written
    rate = device.vector or device.flops["f32"]
    return device.launch + max(flops / rate, moved / (device.bandwidth * device.streaming))
