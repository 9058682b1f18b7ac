"""Links between ranks: tables of bandwidth and latency.

Presets combine published bandwidths with the shares of them that NCCL has been measured to reach. A machine reaches a
network through its ports: ranks of one group in one machine use its ports together, and groups share them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import ceil, prod

from attrs import evolve, frozen

from partita.compiler.costs.devices import device_of
from partita.compiler.costs.record import recorded
from partita.dsl.reprs import Shortened
from partita.dsl.spec import Call, Mesh


@frozen
class Protocol:
    """How a library moves the bytes of collectives: the share of the bandwidth that large messages reach, and seconds:
    to `start`, and of a step of a ring `within` a machine and `between` machines, or of a `tree` between them.
    """

    share: float
    start: float
    within: float
    between: float
    tree: float


@frozen
class Measured:
    """Seconds of a collective among `ranks` ranks, of which each holds `bytes`; `kind` is the method of `Link`."""

    kind: str
    ranks: int
    bytes: float
    seconds: float


@frozen(repr=False)
class Link(Shortened):
    """Unidirectional bandwidth in bytes/s, as a rank's messages reach it, and latency of a message in seconds; `post`
    is the seconds for which a rank is busy posting a message or waiting for it (0 if a device does that itself).
    Collectives may reach less and then have numbers of their own (0: the same); they take the fastest of `protocols`
    (none: a message takes the latency). `inside` ranks of a group that follow one another share a machine. While they
    run, they take `blocks` of a device's multiprocessors, and leave what runs `beside` them that share of its speed,
    where it was measured. What was `measured` is in order of bytes, and interpolated between. `peak` is the published
    bandwidth, `ports` the number of network ports of a machine (0 for links inside it). Links of one `name` are one
    wire.

    Ranks of a group that follow one another, `beneath` of them (0: all), share a leaf of the network: a switch, or a
    tree of them, whose downlinks together have `oversubscribed` times the bandwidth of its uplinks (the ratio above and
    below a tier: Cornelis, CN5000, Topologies and Routing, §4.3.4). What crosses these shares them with all that
    crosses at the same time, of every group, as all ranks run the same program.
    """

    name: str
    bandwidth: float
    latency: float
    post: float = 0.0
    collective_bandwidth: float = 0.0
    collective_latency: float = 0.0
    beside: float = 1.0
    peak: float = 0.0
    ports: int = 0
    protocols: tuple[Protocol, ...] = ()
    inside: int = 1
    beneath: int = 0
    oversubscribed: float = 1.0
    blocks: int = 0
    measured: tuple[Measured, ...] = ()
    sources: tuple[str, ...] = ()

    def gather(self, parts: int, bytes: float) -> tuple[float, float]:
        """Latency and transfer time of an all-gather of `bytes`."""
        return self._as_measured("gather", parts, bytes, self._gather)

    def scatter(self, parts: int, bytes: float) -> tuple[float, float]:
        """Latency and transfer time of a reduce-scatter of `bytes`."""
        return self._as_measured("scatter", parts, bytes, self._gather)

    def add(self, parts: int, bytes: float) -> tuple[float, float]:
        """Latency and transfer time of an all-reduce of `bytes`."""
        return self._as_measured("add", parts, bytes, self._add)

    def exchange(self, parts: int, bytes: float) -> tuple[float, float]:
        """Latency and transfer time of an all-to-all of `bytes` on each rank."""
        return self._as_measured("exchange", parts, bytes, self._exchange)

    def pass_on(self, parts: int, bytes: float) -> tuple[float, float]:
        """Latency and transfer time of a message of `bytes` from each rank to the next."""
        return self._as_measured("pass_on", parts, bytes, self._pass_on)

    def _as_measured(
        self, kind: str, parts: int, bytes: float, modelled: Callable[[int, float], tuple[float, float]]
    ) -> tuple[float, float]:
        """What was measured of a collective of this kind, between sizes in proportion, and for a group of another size
        in the proportion of what is modelled; that itself if nothing was.
        """
        own = [each for each in self.measured if each.kind == kind]
        if not own:
            return modelled(parts, bytes)
        sizes, times = [each.bytes for each in own], [each.seconds for each in own]
        at = bisect_right(sizes, bytes)
        if at == len(own):
            seconds = times[-1] * bytes / sizes[-1]
        elif at == 0:
            seconds = times[0]
        else:
            share = (bytes - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            seconds = times[at - 1] + share * (times[at] - times[at - 1])
        ranks = own[0].ranks
        scale = 1.0 if parts == ranks else sum(modelled(parts, bytes)) / max(sum(modelled(ranks, bytes)), 1e-30)
        latency = min(times[0], seconds)
        return scale * latency, scale * (seconds - latency)

    def _gather(self, parts: int, bytes: float) -> tuple[float, float]:
        """No byte is sent twice: around a ring, in one step fewer than there are ranks; without protocols, the distance
        doubles from message to message (Thakur, Rabenseifner and Gropp 2005).
        """
        latency, bandwidth = self._collective
        moved = bytes * (parts - 1) / parts / bandwidth * self.crossing(parts)
        if not self.protocols:
            return (parts - 1).bit_length() * latency, moved
        return min(((self._around(parts, by), moved / by.share) for by in self._protocols), key=sum)

    def _add(self, parts: int, bytes: float) -> tuple[float, float]:
        """Around a ring twice or, if faster, up and down a tree over machines, with fewer sequential messages but
        slightly more traffic (NCCL's double trees).
        """
        moved = 2 * bytes / self._collective[1] * self.crossing(parts)
        candidates = []
        for by in self._protocols:
            candidates.append(
                (by.start + 2 * (self._around(parts, by) - by.start), moved * (parts - 1) / parts / by.share)
            )
            candidates.append((self._tree(parts, by), moved / by.share))
        return min(candidates, key=sum)

    def _around(self, parts: int, by: Protocol) -> float:
        """Seconds to start, and of the steps of a ring."""
        between = self._machines(parts) - 1
        return by.start + (parts - 1 - between) * by.within + between * (by.between if self.inside > 1 else by.tree)

    def _tree(self, parts: int, by: Protocol) -> float:
        """Seconds to start, and of the messages up and down a tree: machines are its nodes, their ranks form chains."""
        machines = self._machines(parts)
        chain = parts - 1 if machines == 1 else self.inside - 1
        return by.start + 2 * (chain * by.within + (machines - 1).bit_length() * by.tree)

    def _machines(self, parts: int) -> int:
        """The number of machines of a group, if it has more than one; a link without protocols does not tell."""
        return 1 if self.protocols and not self.ports else ceil(parts / self.inside)

    def _exchange(self, parts: int, bytes: float) -> tuple[float, float]:
        """All messages are in flight at once. Those to other machines take the port of their rank, and no other
        (github.com/NVIDIA/nccl-tests, issues 130 and 267); those to ranks beneath other leaves cross uplinks.
        """
        sent: float = max(parts - 1, (parts - self.inside) * self.inside)
        if self._spans(parts):
            sent = max(sent, self.oversubscribed * (parts - max(self.beneath, self.inside)) * self.inside)
        return self._message(parts), bytes * sent / parts / self._collective[1]

    def _pass_on(self, parts: int, bytes: float) -> tuple[float, float]:
        """One message, which takes one port."""
        ports = self.inside if self._machines(parts) > 1 else 1
        return self._message(parts), bytes * ports / self._collective[1] * self.crossing(parts)

    def _message(self, parts: int) -> float:
        """Seconds to start, and of the farthest message in a group, by the protocol with the most bandwidth."""
        by = max(self._protocols, key=lambda each: each.share)
        return by.start + (by.within if self._machines(parts) == 1 else by.between)

    def _spans(self, parts: int) -> bool:
        """Whether a group has ranks beneath several leaves."""
        return 0 < self.beneath < parts

    def crossing(self, parts: int) -> float:
        """How many times as long messages around a ring take because of the uplinks that they cross.

        A ring enters each leaf once and leaves it once, however many ranks it has there, at the speed of all ports that
        it uses of a machine. A leaf of n devices with k ranks of each group has n/k rings, and these together the
        bandwidth of n · inside / k ports, where the uplinks have that of n / oversubscribed. A tree crosses as often.
        """
        if not self._spans(parts):
            return 1.0
        return max(1.0, self.oversubscribed * min(1.0, self.inside / self.beneath))  # a leaf may be part of a machine

    @property
    def amortizing(self) -> float:
        """Bytes that take a hundred times as long as the latency of their message."""
        latency, bandwidth = self._collective
        return 100 * latency * bandwidth

    def waiting(self, parts: int) -> float:
        """Bytes that take as long as the sequential messages of an all-gather."""
        return self._gather(parts, 0.0)[0] * self._collective[1]

    @property
    def _collective(self) -> tuple[float, float]:
        """Latency and bandwidth of collectives."""
        if not self.collective_bandwidth:
            return self.latency, self.bandwidth
        return self.collective_latency, self.collective_bandwidth

    @property
    def _protocols(self) -> tuple[Protocol, ...]:
        """The protocols of collectives; else one whose steps take the latency of a collective."""
        latency, _ = self._collective
        return self.protocols or (Protocol(1.0, 0.0, latency, latency, latency),)


def _link(
    name: str,
    peak: float,
    reached: float,
    latency: float,
    *sources: str,
    ports: int = 0,
    protocols: tuple[Protocol, ...] = (),
    blocks: int = 0,
) -> Link:
    link = Link(name, peak * reached, latency, peak=peak, ports=ports, sources=sources)
    return evolve(link, protocols=protocols, blocks=blocks)


# Shares that NCCL reaches, as bus bandwidth of large messages.
_NVLINK3 = "an all-reduce of 8 A100: 232.5 of 300 GB/s (github.com/NVIDIA/nccl-tests/issues/175)"
_NVLINK4 = "370 of 450 GB/s (github.com/NVIDIA/nccl-tests/issues/212)"
_HDR = "192 of 200 GB/s over 8 ports of a DGX A100 (github.com/NVIDIA/nccl/issues/812)"
_NDR = "46 to 48 of 50 GB/s a port (github.com/NVIDIA/nccl-tests/issues/290)"

# Latencies of sequential messages: between `hwLat` of Ring with LL128 and with Simple (NVLink 1.9 and 3.4 µs, network 4
# and 14 µs), rounded. All-gathers and reduce-scatters take rings, unless there is one GPU a machine (PAT, since 2.23).
_NCCL = "latency: github.com/NVIDIA/nccl, src/graph/tuning.cc"
_PROTOCOLS = (
    Protocol(0.92, 14e-6, 1.9e-6, 4e-6, 8.5e-6),  # LL128: 120 of 128 bytes are data
    Protocol(1.0, 8.4e-6, 3.4e-6, 14e-6, 14e-6),  # Simple, of which the bandwidths above are
)
# Each channel of NCCL is a block of threads, which has a multiprocessor to itself (github.com/NVIDIA/nccl/issues/1656).
_CHANNELS = (
    "blocks: 24 channels in a machine of A100 (github.com/NVIDIA/nccl-tests/issues/100)"
    " or H100 (github.com/NVIDIA/nccl/issues/1259)"
)
_CHANNELS_BETWEEN = "blocks: 16 channels between machines, two a port: known, not looked up"
_INSIDE, _BETWEEN = (_NCCL, _CHANNELS), (_NCCL, _CHANNELS_BETWEEN)

# NVLink: all links of a GPU, one direction. PCIe: x16, one direction. InfiniBand: one port for each GPU. Ethernet: one
# port of 100 Gb/s for each machine.
LINKS = {
    link.name: link
    for link in (
        Link("memory", 5e9, 1e-5, peak=5e9, sources=("Gloo between processes of one machine, as measured here",)),
        _link(
            "nvlink3",
            300e9,
            0.775,
            3e-6,
            "NVIDIA A100, data sheet",
            _NVLINK3,
            *_INSIDE,
            protocols=_PROTOCOLS,
            blocks=24,
        ),
        _link(
            "nvlink4", 450e9, 0.82, 3e-6, "NVIDIA H100, data sheet", _NVLINK4, *_INSIDE, protocols=_PROTOCOLS, blocks=24
        ),
        _link(
            "nvlink5",
            900e9,
            0.82,
            3e-6,
            "NVIDIA HGX B200, data sheet",
            f"as NVLink 4: {_NVLINK4}",
            *_INSIDE,
            protocols=_PROTOCOLS,
            blocks=24,
        ),
        _link("pcie4", 32e9, 0.8, 5e-6, "PCI Express 4.0", "share: assumed", _NCCL),
        _link("pcie5", 64e9, 0.8, 5e-6, "PCI Express 5.0", "share: assumed", _NCCL),
        _link("ib200", 25e9, 0.96, 5e-6, "InfiniBand HDR", _HDR, *_BETWEEN, ports=8, protocols=_PROTOCOLS, blocks=16),
        _link("ib400", 50e9, 0.94, 5e-6, "InfiniBand NDR", _NDR, *_BETWEEN, ports=8, protocols=_PROTOCOLS, blocks=16),
        _link(
            "ib800",
            100e9,
            0.94,
            5e-6,
            "InfiniBand XDR",
            f"as NDR: {_NDR}",
            *_BETWEEN,
            ports=8,
            protocols=_PROTOCOLS,
            blocks=16,
        ),
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
        record = recorded(call, mesh.ranks)
        measured = (Measured(kind, record.ranks, *figures) for kind, *figures in record.collectives)
        return Link("profiled", **record.link, measured=tuple(sorted(measured, key=lambda each: each.bytes)))
    if call.name not in LINKS:
        bandwidth, latency = (float(call.arguments[each]) for each in ("bandwidth", "latency"))
        link = Link(f"link of {bandwidth:g} and {latency:g}", bandwidth, latency)
    else:
        link = LINKS[call.name]
    node = device_of(mesh).node
    if link.ports and node > 1:
        together = 1 if pairs else _together(mesh, axis, node, 1)
        link = evolve(link, bandwidth=link.bandwidth * min(together * link.ports / node, link.ports), inside=together)
    leaf = call.arguments.get("leaf")
    if leaf is None:
        return link
    link = evolve(link, beneath=_together(mesh, axis, leaf, 0), oversubscribed=call.arguments["oversubscribed"])
    # Messages between two ranks are as fast as those that cross: who waits for one waits for all before it.
    return evolve(link, bandwidth=link.bandwidth / link.crossing(mesh.size(axis))) if pairs else link


def _together(mesh: Mesh, axis: str, place: int, all: int) -> int:
    """The number of ranks of a group along an axis that share a place, such as a machine, which has so many devices;
    `all` if the whole group does.
    """
    names = [name for name, _ in mesh.axes]
    size, stride = mesh.size(axis), prod(size for _, size in mesh.axes[names.index(axis) + 1 :])
    inside = max(1, place // stride)
    return inside if inside < size else all
