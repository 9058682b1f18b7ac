"""Devices: what they compute, hold and move, as a table of records.

Presets are peaks as makers publish them and the shares of them that are reached; a profiled device has, beside these,
what its operations took (`partita profile`).
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, field, frozen

from partita.compiler.costs.record import Timings, recorded
from partita.dsl.spec import Call, Mesh


@frozen
class Products:
    """The share of peak FLOP/s that a matrix product reaches: `best` with large matrices; halved where one of its three
    sizes is `half`.
    """

    best: float = 1.0
    half: float = 0.0

    def efficiency(self, *sizes: int) -> float:
        """The share for a product of these sizes: rows, depth, columns."""
        share = self.best
        for size in sizes:
            share *= size / (size + self.half)
        return share


@frozen
class Device:
    """Peak FLOP/s by dtype, memory in bytes, bandwidth in bytes/s, of which `streaming` is the share that is reached.

    In seconds, `launch` is what a kernel takes beside its work, `action` what each action of a schedule takes beside
    its kernels, and `step` what a step takes beside all of these. `timings` are measured, where the device is profiled.
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    bandwidth: float
    streaming: float = 1.0
    products: Products = field(factory=Products)
    launch: float = 0.0
    action: float = 0.0
    step: float = 0.0
    timings: Timings = field(factory=Timings, eq=False, repr=False)


def _device(name: str, f32: float, bf16: float, f64: float, memory: int, bandwidth: float) -> Device:
    flops = {"f32": f32, "bf16": bf16, "f64": f64}
    return Device(name, flops, memory * 2**30, bandwidth)


# Sources: NVIDIA's data sheets of the A100 80GB SXM, H100 SXM, H200 SXM and HGX B200 (dense figures; f32 is TF32's).
# `cpu` is one core of a server processor, measured with this project's own products.
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


def device_of(mesh: Mesh | None) -> Device:
    """The device that a mesh declares; this machine's processor where it declares none."""
    call: Call | None = mesh.device if mesh else None
    if call is None:
        return DEVICES["cpu"]
    if call.name in DEVICES:
        return DEVICES[call.name]
    if call.name == "profile":
        assert mesh is not None
        record = recorded(call, mesh.ranks)
        return Device(products=Products(**record.products), timings=record.timings, **record.device)
    given = call.arguments
    flops = float(given["flops"])
    base = evolve(DEVICES["cpu"], name="device", flops=dict.fromkeys(("f32", "bf16", "f64"), flops))
    return evolve(base, memory=int(given["memory"]), bandwidth=float(given["bandwidth"]))
