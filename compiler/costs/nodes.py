"""What operations take on a device, in seconds.

On a profiled device, what was measured of operations like it. On others a roofline: the greater of arithmetic over the
FLOP/s that are reached and of bytes moved over the bandwidth that is reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.compiler.costs.devices import Device
from partita.compiler.emission.memory import VIEWS
from partita.compiler.emission.segments import fused
from partita.compiler.graph import Graph, Node
from partita.compiler.ops.attend import Attend, AttendGradient
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Kernel

FLOATS = ("f32", "bf16", "f64")
_FREE = (*VIEWS, Receive, Send)


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
    if isinstance(node.op, Dot):
        flops *= device.products.efficiency(*map(int, kernel.features[-3:]))
    moved = sum(type.bytes for type in (*operands, *results))
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


def timed(nodes: Sequence[Node], device: Device) -> Iterator[tuple[Node, float]]:
    """Nodes that run one after the other, with their times. What is added where it is made takes no time of its own;
    of collectives that is up to the caller.
    """
    adding = fused(nodes, ())
    added = set(adding.values())
    for node in nodes:
        yield node, 0.0 if node in added else seconds(node, device, node in adding)
