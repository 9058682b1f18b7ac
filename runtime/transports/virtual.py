"""All ranks in one process and one thread: deterministic, exact about deadlock, and adversarial on purpose.

Each rank's step is a generator that yields while it waits; `VirtualCluster.run` resumes the ranks that can continue
until all are finished. Strict mode simulates the worst behavior that NCCL permits:

- rendezvous: a transfer completes only when both ends have posted it and every earlier one of its channel is complete,
  a collective only when all ranks of its group have, and every earlier one of the group is complete;
- operations complete only when no rank can continue otherwise, and then in an order chosen by the seed;
- data is copied at completion, so a sender that overwrites its buffer too early is caught (by comparison), and a
  receiver that reads too early sees the garbage (NaN, or the smallest integer) with which a posted buffer is filled; a
  collective has no result before it is complete;
- at the end of a run no operation may remain that not all ends have posted.

With `strict=False`, operations complete as soon as all ends have posted them. Both modes reject ends that differ in
kind, dtype, shape or dimensions, and both detect deadlock exactly: when no rank can continue, the error names what each
rank waits for, and the cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, ClassVar

import torch
from attrs import define, evolve, field

from partita.compiler.instructions import Channel
from partita.compiler.mesh import Mesh
from partita.runtime.streams import HostStreams, Streams
from partita.runtime.transports.collectives import ALL_GATHER
from partita.runtime.transports.lines import Deadlock, OrderedQueue, PostedOperation, UnmatchedOperation
from partita.runtime.transports.registry import InProcess, register
from partita.runtime.transports.transport import NO_STREAMS, Tensors


@define(eq=False)
class VirtualTransport:
    """One rank's end of a `VirtualCluster`; a `Transport`."""

    busy_wait: ClassVar[float] = 0.0  # nobody waits
    rank: int
    ranks: int
    cluster: VirtualCluster = field(repr=False)
    waiting: list[PostedOperation] = field(factory=list, repr=False)
    channels: dict[Channel, OrderedQueue] = field(factory=dict, repr=False)
    groups: dict[str, OrderedQueue] = field(factory=dict, repr=False)

    def streams(self, device: torch.device) -> Streams:
        """A single stream: transfers complete in the order of the host."""
        return HostStreams(apart=device.type == "cuda")

    def open(self, mesh: Mesh, channels: Iterable[Channel], streams: Mapping[str, str] = NO_STREAMS) -> None:
        """Open the groups along the mesh's axes, and the program's channels that end at this rank."""
        assert mesh.ranks == self.ranks, f"{mesh} is not a mesh of {self.ranks} ranks"
        for axis in mesh.joined:
            ends = mesh.group(self.rank, axis)
            self.groups[axis] = self.cluster.line(f"{axis} (ranks {', '.join(map(str, ends))})", ends)
        own = mesh.pipe_rank(self.rank)
        for channel in channels:
            assert channel.source != channel.destination, f"{channel}: a rank needs no channel to itself"
            if own in (channel.source, channel.destination):
                ends = mesh.peer(self.rank, channel.source), mesh.peer(self.rank, channel.destination)
                name = str(evolve(channel, source=ends[0], destination=ends[1]))
                self.channels[channel] = self.cluster.line(name, ends)

    def send(self, channel: Channel, tensor: torch.Tensor) -> PostedOperation:
        """Post a send; the tensor must not change until it is done."""
        return self._transfer("send", channel, 0, tensor)

    def receive(self, channel: Channel, buffer: torch.Tensor) -> PostedOperation:
        """Post a receive; in strict mode the buffer holds garbage until it is done."""
        return self._transfer("receive", channel, 1, buffer)

    def collective(
        self, kind: str, axis: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]
    ) -> PostedOperation:
        """Post a collective along a mesh axis; sums are in coordinate order."""
        return self._post(kind, self.groups[axis], tensors, tuple(arguments))

    def gather_over_ranks(self, tensor: torch.Tensor) -> PostedOperation:
        """Post an all-gather over all ranks, along a new first dimension."""
        assert tensor.is_contiguous(), "a gather over all ranks of a tensor that is not contiguous"
        return self._post(ALL_GATHER, self.cluster.all_ranks, (tensor.unsqueeze(0),), ((0,),))

    def close(self) -> None:
        """Nothing to release."""

    def _transfer(self, kind: str, channel: Channel, end: int, tensor: torch.Tensor) -> PostedOperation:
        assert channel in self.channels, f"rank {self.rank} has no end of {channel}"
        line = self.channels[channel]
        assert line.ends[end] == self.rank, f"rank {self.rank} cannot {kind} on {channel}"
        assert tensor.is_contiguous(), f"rank {self.rank}: {kind} on {line.name} of a tensor that is not contiguous"
        return self._post(kind, line, (tensor,))

    def _post(
        self, kind: str, line: OrderedQueue, tensors: Tensors, arguments: tuple[tuple[Any, ...], ...] = ()
    ) -> PostedOperation:
        assert not arguments or len(arguments) == len(tensors), f"{kind}: an entry for each tensor"
        strict = self.cluster.strict
        post = line.post(self.rank, kind, tensors, arguments, self.waiting, strict)
        if not strict:
            while line.ready():
                line.complete()
        return post


class VirtualCluster:
    """`ranks` virtual ranks. In strict mode `seed` chooses the order in which operations complete."""

    transports: type[VirtualTransport] = VirtualTransport

    def __init__(self, ranks: int, strict: bool = True, seed: int = 0) -> None:
        self.ranks = ranks
        self.strict = strict
        self.lines: dict[str, OrderedQueue] = {}
        self.all_ranks = self.line("all ranks", tuple(range(ranks)))
        self.begin(seed)
        self._transports = tuple(self.transports(rank, ranks, self) for rank in range(ranks))

    def begin(self, seed: int) -> None:
        """Choose anew, by this seed."""
        self._random = Random(seed)

    def transport(self, rank: int) -> VirtualTransport:
        """The transport of one rank."""
        return self._transports[rank]

    def line(self, name: str, ends: tuple[int, ...]) -> OrderedQueue:
        """The line of this name, shared by all its ends; created on first use."""
        queue = self.lines.setdefault(name, OrderedQueue(name, ends))
        assert queue.ends == ends, f"{name} has ends {queue.ends} and {ends}"
        return queue

    def run(self, steps: Sequence[Iterator[None]]) -> None:
        """Run one generator per rank until all are exhausted.

        Raises `Deadlock`, `Mismatch`, and in strict mode `BufferReused` or `UnmatchedOperation`.
        """
        assert len(steps) == self.ranks, "one step per rank"
        running = dict(enumerate(steps))
        for transport in self._transports:
            transport.waiting.clear()
        while running:
            moved = False
            for rank in tuple(running):
                waiting = self._transports[rank].waiting
                if waiting and not any(post.complete for post in waiting):
                    continue
                waiting.clear()
                moved = True
                if next(running[rank], _EXHAUSTED) is _EXHAUSTED:
                    waiting.clear()
                    del running[rank]
            if running and not moved:
                self._relent(running)
        if self.strict:
            self._finish()

    def _relent(self, running: dict[int, Iterator[None]]) -> None:
        """No rank can continue: complete one operation that some rank waits for, or report the deadlock."""
        awaited = {
            id(post.line): post.line for rank in running for post in self._transports[rank].waiting if post.line.ready()
        }
        if not awaited:
            raise self._deadlock(running)
        self._random.choice(list(awaited.values())).complete()

    def _finish(self) -> None:
        for each in self.lines.values():
            while each.ready():
                each.complete()
        left = [f"rank {post.rank}: {post}" for each in self.lines.values() for posts in each.posted for post in posts]
        if left:
            raise UnmatchedOperation("operations that no other rank has matched:\n  " + "\n  ".join(left))

    def _deadlock(self, running: dict[int, Iterator[None]]) -> Deadlock:
        lines = []
        next_rank: dict[int, int] = {}
        for rank, transport in enumerate(self._transports):
            if rank not in running:
                lines.append(f"rank {rank} has finished")
                continue
            reasons = []
            for post in transport.waiting:
                missing = post.line.missing()
                next_rank.setdefault(rank, missing[0])
                # An earlier operation on the same line may be in the way.
                oldest = post.line.oldest(post)
                behind = "" if oldest.index == post.index else f", which is behind operation {oldest.index} of it"
                reasons.append(f"{post}{behind}, which {_ranks(missing)} not posted")
            lines.append(f"rank {rank} waits for " + " or ".join(reasons))
        cycle = _cycle(next_rank)
        if cycle:
            lines.append("the cycle: " + " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0])))
        return Deadlock("deadlock: no rank can continue:\n  " + "\n  ".join(lines), cycle)


_EXHAUSTED = object()


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"


def _cycle(next_rank: dict[int, int]) -> tuple[int, ...]:
    """A cycle of a functional graph, or ()."""
    for start in next_rank:
        path: list[int] = []
        rank = start
        while rank in next_rank and rank not in path:
            path.append(rank)
            rank = next_rank[rank]
        if rank in path:
            return tuple(path[path.index(rank) :])
    return ()


register(InProcess(name="virtual", cluster=VirtualCluster))
