"""What operations and transfers cost, in seconds, on a device and over a link.

A roofline: the greater of arithmetic over peak FLOP/s and of bytes moved over memory bandwidth. Figures are peaks as
their makers publish them; `cpu` is one core of a server processor, measured with this project's own products.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from partita.compiler.emission.memory import VIEWS
from partita.compiler.graph import Node
from partita.dsl.spec import Call, Mesh


@frozen
class Device:
    """FLOP/s by dtype, memory in bytes, bandwidth in bytes/s."""

    name: str
    flops: Mapping[str, float]
    memory: int
    bandwidth: float


@frozen
class Link:
    """Bandwidth in bytes/s in one direction, latency in seconds."""

    name: str
    bandwidth: float
    latency: float


def _device(name: str, f32: float, bf16: float, f64: float, memory: int, bandwidth: float) -> Device:
    flops = {"f32": f32, "bf16": bf16, "f64": f64}
    return Device(name, flops, memory * 2**30, bandwidth)


# Sources: NVIDIA's data sheets of the A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 (dense figures; f32 is TF32's).
DEVICES = {
    device.name: device
    for device in (
        _device("cpu", 5e10, 5e10, 2.5e10, 16, 1e10),
        _device("a100", 156e12, 312e12, 19.5e12, 80, 2.039e12),
        _device("h100", 494.7e12, 989.4e12, 67e12, 80, 3.35e12),
        _device("h200", 494.7e12, 989.4e12, 67e12, 141, 4.8e12),
        _device("b200", 1.1e15, 2.25e15, 37e12, 180, 7.7e12),
    )
}

# NVLink: total bandwidth of a GPU in one direction. PCIe: x16, one direction. InfiniBand: one port per GPU.
LINKS = {
    link.name: link
    for link in (
        Link("memory", 5e9, 1e-5),
        Link("nvlink3", 300e9, 3e-6),
        Link("nvlink4", 450e9, 3e-6),
        Link("nvlink5", 900e9, 3e-6),
        Link("pcie4", 32e9, 5e-6),
        Link("pcie5", 64e9, 5e-6),
        Link("ib200", 25e9, 5e-6),
        Link("ib400", 50e9, 5e-6),
        Link("ib800", 100e9, 5e-6),
        Link("ethernet", 12.5e9, 2e-5),
    )
}


def rounds(parts: int) -> int:
    """Messages one after the other in a collective of `parts` ranks, for its latency: doubling the distance."""
    return (parts - 1).bit_length()


def device_of(mesh: Mesh | None) -> Device:
    """The device that a mesh declares; this machine's processor where it declares none."""
    call: Call | None = mesh.device if mesh else None
    if call is None:
        return DEVICES["cpu"]
    if call.name in DEVICES:
        return DEVICES[call.name]
    given = call.arguments
    flops = float(given["flops"])
    base = evolve(DEVICES["cpu"], name="device", flops=dict.fromkeys(("f32", "bf16", "f64"), flops))
    return evolve(base, memory=int(given["memory"]), bandwidth=float(given["bandwidth"]))


def link_of(mesh: Mesh | None, axis: str | None) -> Link:
    """The link along a mesh axis; through this machine's memory where none is declared."""
    call = mesh.links.get(axis) if mesh and axis else None
    if call is None:
        return LINKS["memory"]
    if call.name in LINKS:
        return LINKS[call.name]
    return Link("link", float(call.arguments["bandwidth"]), float(call.arguments["latency"]))


def seconds(node: Node, device: Device) -> float:
    """The time of one node on a device."""
    if isinstance(node.op, VIEWS):
        return 0.0
    operands = [value.type for value in node.inputs]
    results = [value.type for value in node.outputs]
    flops = node.op.flops(operands, results)
    moved = sum(type.bytes for type in (*operands, *results))
    dtype = next((t.dtype for t in (*results, *operands) if t.dtype in device.flops), "f32")
    return max(flops / device.flops[dtype], moved / device.bandwidth)
