"""Links between ranks: tables of bandwidth and latency.

Presets combine published bandwidths with the shares of them that NCCL has been measured to reach. A machine reaches a
network through its ports: ranks of one group in one machine use its ports together, and groups share them.
"""

from __future__ import annotations

from math import prod

from attrs import evolve, frozen

from partita.compiler.costs.devices import device_of
from partita.compiler.costs.record import recorded
from partita.dsl.reprs import shortened
from partita.dsl.spec import Call, Mesh


@frozen
class Link:
    """Unidirectional bandwidth in bytes/s, as a rank's messages reach it, and latency of a message in seconds; `post`
    is the seconds for which a rank is busy posting a message or waiting for it (0 if a device does that itself).
    Collectives may reach less and then have numbers of their own (0: the same). `peak` is the published bandwidth,
    `ports` the number of network ports of a machine (0 for links inside it). Links of one `name` are one wire.
    """

    name: str
    bandwidth: float
    latency: float
    post: float = 0.0
    collective_bandwidth: float = 0.0
    collective_latency: float = 0.0
    peak: float = 0.0
    ports: int = 0
    sources: tuple[str, ...] = ()

    __repr__ = shortened

    def gather(self, parts: int, bytes: float) -> tuple[float, float]:
        """Latency and transfer time of an all-gather of `bytes`, or of a reduce-scatter of as many.

        The distance doubles from message to message, and no byte is sent twice (Thakur, Rabenseifner and Gropp 2005;
        NCCL's parallel aggregated trees).
        """
        latency, bandwidth = self._collective
        return (parts - 1).bit_length() * latency, bytes * (parts - 1) / parts / bandwidth

    def add(self, parts: int, bytes: float) -> tuple[float, float]:
        """Latency and transfer time of an all-reduce of `bytes`: around a ring twice or, if faster, up and down a tree,
        with fewer sequential messages but slightly more traffic (NCCL's double trees).
        """
        latency, bandwidth = self._collective
        ring = 2 * (parts - 1) * latency, 2 * bytes * (parts - 1) / parts / bandwidth
        tree = 2 * (parts - 1).bit_length() * latency, 2 * bytes / bandwidth
        return min(ring, tree, key=sum)

    def exchange(self, parts: int, bytes: float) -> tuple[float, float]:
        """Latency and transfer time of an all-to-all of `bytes` on each rank: all messages are in flight at once."""
        latency, bandwidth = self._collective
        return latency, bytes * (parts - 1) / parts / bandwidth

    def pass_on(self, bytes: float) -> tuple[float, float]:
        """Latency and transfer time of a message of `bytes` from each rank to the next."""
        latency, bandwidth = self._collective
        return latency, bytes / bandwidth

    @property
    def amortizing(self) -> float:
        """Bytes that take a hundred times as long as the latency of their message."""
        latency, bandwidth = self._collective
        return 100 * latency * bandwidth

    @property
    def _collective(self) -> tuple[float, float]:
        """Latency and bandwidth of collectives."""
        if not self.collective_bandwidth:
            return self.latency, self.bandwidth
        return self.collective_latency, self.collective_bandwidth


def _link(name: str, peak: float, reached: float, latency: float, *sources: str, ports: int = 0) -> Link:
    return Link(name, peak * reached, latency, peak=peak, ports=ports, sources=sources)


# Shares that NCCL reaches, as bus bandwidth of large messages.
_NVLINK3 = "an all-reduce of 8 A100: 232.5 of 300 GB/s (github.com/NVIDIA/nccl-tests/issues/175)"
_NVLINK4 = "370 of 450 GB/s (github.com/NVIDIA/nccl-tests/issues/212)"
_HDR = "192 of 200 GB/s over 8 ports of a DGX A100 (github.com/NVIDIA/nccl/issues/812)"
_NDR = "46 to 48 of 50 GB/s a port (github.com/NVIDIA/nccl-tests/issues/290)"

# Latencies of sequential messages: between `hwLat` of Ring with LL128 and with Simple (NVLink 1.9 and 3.4 µs, network 4
# and 14 µs), rounded.
_NCCL = "latency: github.com/NVIDIA/nccl, src/graph/tuning.cc"

# NVLink: all links of a GPU, one direction. PCIe: x16, one direction. InfiniBand: one port for each GPU. Ethernet: one
# port of 100 Gb/s for each machine.
LINKS = {
    link.name: link
    for link in (
        Link("memory", 5e9, 1e-5, peak=5e9, sources=("Gloo between processes of one machine, as measured here",)),
        _link("nvlink3", 300e9, 0.775, 3e-6, "NVIDIA A100, data sheet", _NVLINK3, _NCCL),
        _link("nvlink4", 450e9, 0.82, 3e-6, "NVIDIA H100, data sheet", _NVLINK4, _NCCL),
        _link("nvlink5", 900e9, 0.82, 3e-6, "NVIDIA HGX B200, data sheet", f"as NVLink 4: {_NVLINK4}", _NCCL),
        _link("pcie4", 32e9, 0.8, 5e-6, "PCI Express 4.0", "share: assumed", _NCCL),
        _link("pcie5", 64e9, 0.8, 5e-6, "PCI Express 5.0", "share: assumed", _NCCL),
        _link("ib200", 25e9, 0.96, 5e-6, "InfiniBand HDR", _HDR, _NCCL, ports=8),
        _link("ib400", 50e9, 0.94, 5e-6, "InfiniBand NDR", _NDR, _NCCL, ports=8),
        _link("ib800", 100e9, 0.94, 5e-6, "InfiniBand XDR", f"as NDR: {_NDR}", _NCCL, ports=8),
        _link("ethernet", 12.5e9, 0.9, 2e-5, "100 Gb/s Ethernet", "share and latency: assumed, TCP", ports=1),
    )
}


def link_of(mesh: Mesh | None, axis: str | None, pairs: bool = False) -> Link:
    """The link along a mesh axis, for groups of ranks or (`pairs`) for messages between two ranks; `memory` if none is
    declared.
    """
    call: Call | None = mesh.links.get(axis) if mesh and axis else None
    if mesh is None or axis is None or call is None:
        return LINKS["memory"]
    if call.name == "profile":
        return Link("profiled", **recorded(call, mesh.ranks).link)
    if call.name not in LINKS:
        bandwidth, latency = (float(call.arguments[each]) for each in ("bandwidth", "latency"))
        return Link(f"link of {bandwidth:g} and {latency:g}", bandwidth, latency)
    link, node = LINKS[call.name], device_of(mesh).node
    if not link.ports or node == 1:
        return link
    together = 1 if pairs else _together(mesh, axis, node)
    return evolve(link, bandwidth=link.bandwidth * min(together * link.ports / node, link.ports))


def _together(mesh: Mesh, axis: str, node: int) -> int:
    """The number of ranks of a group along an axis that share a machine, if the group spans machines; else 1."""
    names = [name for name, _ in mesh.axes]
    size, stride = mesh.size(axis), prod(size for _, size in mesh.axes[names.index(axis) + 1 :])
    inside = max(1, node // stride)
    return inside if inside < size else 1
