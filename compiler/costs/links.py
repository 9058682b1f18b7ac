"""Links between ranks: bandwidth and latency, as tables of records."""

from __future__ import annotations

from attrs import frozen

from partita.compiler.costs.record import recorded
from partita.dsl.spec import Call, Mesh


@frozen
class Link:
    """Bandwidth in bytes/s in one direction and latency in seconds of a message; and `post`, seconds for which a rank
    is busy with posting a message or waiting for it (nothing where a device does that by itself).
    """

    name: str
    bandwidth: float
    latency: float
    post: float = 0.0


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


def link_of(mesh: Mesh | None, axis: str | None) -> Link:
    """The link along a mesh axis; through this machine's memory where none is declared."""
    call: Call | None = mesh.links.get(axis) if mesh and axis else None
    if mesh is None or call is None:
        return LINKS["memory"]
    if call.name in LINKS:
        return LINKS[call.name]
    if call.name == "profile":
        return Link("profiled", **recorded(call, mesh.ranks).link)
    return Link("link", float(call.arguments["bandwidth"]), float(call.arguments["latency"]))
