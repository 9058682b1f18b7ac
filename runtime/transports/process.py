"""The transport between processes: Gloo between CPUs, NCCL between GPUs, both over `torch.distributed`.

In every column of the mesh each channel has its own communicator (a process group of its two ranks), so that no
transfer blocks behind an unrelated one, and transfers match by order, without tags. Two CPU ranks of one machine use
shared memory instead, if a step sends no more than fits (`shared`). The ranks along a mesh axis have a communicator for
their collectives. All ranks go through all communicators in the same order, create those they belong to, and warm each
up in that order: communicators set up lazily, in whatever order a schedule first uses them, can deadlock.

Groups are made one by one rather than by `DeviceMesh`, which would also connect ranks along the pipeline axis, and
would let an axis that spans all ranks share the default group. A rank takes part in making groups it does not belong to
only because torch names groups by number; that takes about 20 µs each.

The process group must exist (`partita.runtime.supervision.rendezvous.connect`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from hmac import new
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve

from partita.compiler.instructions import Channel, Traffic
from partita.compiler.mesh import Mesh
from partita.compiler.streams import SUMS, along
from partita.runtime.streams import Streams, streams_of
from partita.runtime.tracing.flight import machine
from partita.runtime.transports.failures import CLOSING, ConnectionLost, UntrustedPeer, post, wait
from partita.runtime.transports.groups import AxisGroup, CollectiveSteps, CollectiveWork, all_gather_single
from partita.runtime.transports.posted import Posted, posted, posting
from partita.runtime.transports.same_host import SameHostPeers, find_same_host_peers
from partita.runtime.transports.shared import LIMIT, Incoming, Outgoing, size_for
from partita.runtime.transports.thread_blocks import allot
from partita.runtime.transports.transport import NO_STREAMS, Handle, PeerConnections, Tensors

__all__ = ["ConnectionLost", "ProcessTransport"]

CLOSE_SECONDS = 5.0
# The timeout of one operation. Stalls are the watchdog's to report: it knows what is slow on purpose, such as a first
# step that compiles or a checkpoint on a slow disk. torch's default for NCCL would be 10 minutes.
TIMEOUT = timedelta(days=1)


class _GroupEnd:
    """This rank's end of a channel: a transfer is a broadcast in the group of the two ranks.

    NCCL's is the same kernel as a send and a receive, which torch would run on a stream of its own, and whose memory it
    would keep from being used again until that has been seen to have passed (`record_stream`): up to as many messages
    as are under way at once, beyond the memory bound.
    """

    busy_wait = 0.0  # Gloo sleeps

    def __init__(self, between: Channel, rank: int, group: dist.ProcessGroup, posting: Callable[..., Handle]) -> None:
        self.posting = posting
        self.sends = between.source == rank
        self.broadcast = group.broadcast
        self.options = dist.BroadcastOptions()
        self.options.rootRank = dist.get_group_rank(group, between.source)
        self.options.asyncOp = posting is posted  # on a GPU in the current stream
        self.description = _described(between, rank)

    def close(self) -> None:
        """Nothing to do: groups are destroyed together."""

    def post(self, tensor: torch.Tensor) -> Handle:
        """Post the next transfer."""
        return self.posting(self.description, tensor, self.broadcast, [tensor], self.options)


class ProcessTransport:
    """One process's end of the communication; a `Transport`. Tensors live on `device`.

    Gloo takes whoever connects to its port first for the rank it waits for. So before anything else is sent, all
    connected processes prove that they know the run's `secret`. Raises `UntrustedPeer` if one does not.

    `sums`: whether to use the groups' own reductions; `shares`: whether ranks of one machine share memory; `options`
    makes those of a group that takes at most so many of a GPU's `multiprocessors`.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        secret: bytes = b"",
        sums: bool = False,
        shares: bool = True,
        options: Callable[[int], Any] | None = None,
        multiprocessors: int = 0,
    ) -> None:
        self.rank = dist.get_rank()
        self._secret = secret
        self.ranks = dist.get_world_size()
        self.device = torch.device(device)
        self._sums, self._shares, self._options, self._multiprocessors = sums, shares, options, multiprocessors
        self.still = False
        self._channels: dict[Channel, _GroupEnd | Outgoing | Incoming] = {}
        self._axes: dict[str, AxisGroup] = {}
        self._streams, self._posting = streams_of(self.device), posting(self.device)
        self._sums_stream = SUMS
        self._world = self._group(None, "gathers over all ranks")

    @property
    def busy_wait(self) -> float:
        """Seconds of waiting that count as CPU time of this thread."""
        return sum(end.busy_wait for end in self._channels.values())

    def streams(self, device: torch.device) -> Streams:
        """Where operations are enqueued."""
        assert device == self.device, f"tensors are on {device}, and were said to be on {self.device}"
        return self._streams

    def open(self, mesh: Mesh, channels: Mapping[Channel, Traffic], streams: Mapping[str, str] = NO_STREAMS) -> None:
        """Create and warm up the groups along the mesh's axes, and the channels of the whole program."""
        self._sums_stream = streams.get(SUMS, SUMS)
        assert mesh.ranks == self.ranks, f"{mesh} is not a mesh of {self.ranks} ranks"
        self._handshake("all ranks", self._world, range(self.ranks))
        blocks = None if self._options is None else allot(mesh, channels, self._machines(), self._multiprocessors)
        for axis in mesh.joined:
            for first in _first_ranks(mesh, axis):
                ranks = mesh.group(first, axis)
                group = self._group(ranks, axis, None if blocks is None else blocks.collective)
                if self.rank in ranks:
                    stream = streams.get(along(axis), along(axis))
                    how = self._sums, self._streams, stream, self._posting
                    self._axes[axis] = AxisGroup(axis, len(ranks), group, *how)
                    self._handshake(axis, group, ranks)
        columns = _first_ranks(mesh, mesh.pipe)
        peers = find_same_host_peers(self._world) if channels and self._shares else SameHostPeers()
        for channel, traffic in sorted(channels.items()):
            for column in columns:
                ends = mesh.peer(column, channel.source), mesh.peer(column, channel.destination)
                between = evolve(channel, source=ends[0], destination=ends[1])
                shared = traffic.bytes <= LIMIT and peers.is_local(*ends)
                max_blocks = None if blocks is None else blocks.of_messages(ends)
                group = None if shared else self._group(ends, str(between), max_blocks)
                if self.rank not in ends:
                    continue
                if group is None:
                    self._channels[channel] = _shared(between, self.rank, traffic, peers)
                else:
                    self._channels[channel] = _GroupEnd(between, self.rank, group, self._posting)
                    self._handshake(str(between), group, ends)
            if channel in self._channels:
                transfer = self.send if self._channels[channel].sends else self.receive
                transfer(channel, torch.zeros(1, device=self.device)).done()
        peers.close()
        # A barrier, so that network problems show before the first step.
        self.barrier()

    def send(self, channel: Channel, tensor: torch.Tensor) -> Handle:
        """Post a send of a contiguous tensor; it must not change until the handle is done."""
        end = self._channels[channel]
        assert end.sends, f"rank {self.rank} cannot send on {channel}"
        assert tensor.is_contiguous(), f"{end.description}: a tensor that is not contiguous"
        return Posted(None, tensor, end.description) if self.still else end.post(tensor)

    def receive(self, channel: Channel, buffer: torch.Tensor) -> Handle:
        """Post a receive into a contiguous tensor."""
        end = self._channels[channel]
        assert not end.sends, f"rank {self.rank} cannot receive on {channel}"
        assert buffer.is_contiguous(), f"{end.description}: a tensor that is not contiguous"
        return Posted(None, buffer.zero_(), end.description) if self.still else end.post(buffer)

    def collective(
        self, kind: str, axis: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]
    ) -> CollectiveWork:
        """Post a collective along a mesh axis."""
        return self._axes[axis].collective(kind, tensors, arguments)

    def gather_over_ranks(self, tensor: torch.Tensor) -> CollectiveWork:
        """Post an all-gather over all ranks, along a new first dimension."""
        steps = self._gather(tensor)
        return CollectiveWork("the gather over all ranks", steps, next(steps))

    def _gather(self, tensor: torch.Tensor) -> CollectiveSteps:
        if self.ranks == 1:
            yield []
            return (tensor.unsqueeze(0),)
        parts = tensor.new_empty(self.ranks, *tensor.shape)
        what, gathered = "the gather over all ranks", (parts.view(-1), tensor.view(-1))
        begin = partial(self._posting, what, (tensor, parts), all_gather_single, *gathered)
        yield [self._streams.launch(self._sums_stream, partial(begin, group=self._world, async_op=True))]
        return (parts,)

    def links(self) -> PeerConnections:
        """Connect all ranks once more, over Gloo. Raises `ConnectionLost`, `UntrustedPeer`."""
        group = dist.new_group(None, TIMEOUT, "gloo", group_desc="partita: copies in memory")
        self._handshake("copies in memory", group, range(self.ranks), "cpu")

        def starting(operation: Any, verb: str) -> Callable[[torch.Tensor, int], Callable[[], None]]:
            def start(tensor: torch.Tensor, peer: int) -> Callable[[], None]:
                what = f"the {verb} rank {peer} (a copy in memory)"
                work = post(what, operation, [tensor], peer, 0)
                return lambda: wait(work, what)

            return start

        return PeerConnections(starting(group.send, "send to"), starting(group.recv, "receive from"))

    def barrier(self) -> None:
        """Wait until all ranks have called this, and all that this one has enqueued is done."""
        self._streams.join()
        (greetings,) = self.gather_over_ranks(torch.zeros(1, device=self.device)).result()
        greetings.tolist()  # on a GPU, synchronizes the host

    def close(self) -> None:
        """Destroy all groups.

        If other ranks have died this may hang: it is given up after 5 s, and the process is to be ended (`end_with`).
        """
        for end in self._channels.values():
            end.close()
        self._channels.clear()
        self._axes.clear()
        closing = Thread(target=_destroy, args=(self.device,), name=CLOSING, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _handshake(
        self,
        what: str,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        device: torch.device | str | None = None,
    ) -> None:
        """Check that all in a group know the secret, and prove that this rank does. On NCCL this also connects them."""
        shown = (new(self._secret, f"{what} {rank}".encode(), sha256).digest() for rank in (self.rank, *sorted(ranks)))
        own, *others = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in shown)
        target_device = device or self.device
        digests = [torch.empty_like(own, device=target_device) for _ in ranks]
        post(f"connecting for {what}", dist.all_gather, digests, own.to(target_device), group=group)
        if not torch.equal(torch.stack(digests).cpu(), torch.stack(others)):
            raise UntrustedPeer(what)

    def _machines(self) -> list[int]:
        """The machine of each rank."""
        (gathered,) = self.gather_over_ranks(torch.tensor([machine()], device=self.device)).result()
        return gathered.flatten().tolist()

    def _group(self, ranks: Sequence[int] | None, what: str, blocks: int | None = None) -> dist.ProcessGroup | None:
        """A group of these ranks, or of all, on the backend that connects them, which takes at most so many thread
        blocks of a GPU; every rank must request every group.
        """
        options = self._options(blocks) if self._options is not None and blocks is not None else None
        if options is not None:
            options._timeout = TIMEOUT
        members = None if ranks is None else list(ranks)
        named = f"partita: {what}"
        group: dist.ProcessGroup | None = dist.new_group(members, TIMEOUT, pg_options=options, group_desc=named)
        return group


def _shared(between: Channel, rank: int, traffic: Traffic, peers: SameHostPeers) -> Outgoing | Incoming:
    """This rank's end of a channel in shared memory, whose size the sender determines."""
    what, name = _described(between, rank), str(between)
    if between.source == rank:
        return Outgoing(what, *peers.offer(name, between.destination, size_for(traffic)), traffic)
    return Incoming(what, *peers.take(name), traffic, peers.spins)


def _described(between: Channel, rank: int) -> str:
    """Description of a rank's end of a channel."""
    if between.source == rank:
        return f"the send to rank {between.destination} ({between})"
    return f"the receive from rank {between.source} ({between})"


def _first_ranks(mesh: Mesh, axis: str | None) -> list[int]:
    """The ranks at coordinate 0 of a mesh axis, in order: one per group along it."""
    return [rank for rank in range(mesh.ranks) if axis is None or mesh.coordinates(rank)[axis] == 0]


def _destroy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread: it would begin to use the first GPU
    # The only errors expected are due to dead peers, and nobody is left to report them to.
    with suppress(RuntimeError):
        dist.destroy_process_group()
