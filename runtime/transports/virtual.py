"""All ranks in one process and one thread: deterministic, exact about deadlock, and unkind on purpose.

Each rank's step is a generator that yields while it waits; `VirtualCluster.run` resumes whoever can go on
until all are through. Strict mode behaves as NCCL may at its least helpful:

- rendezvous: a transfer completes only when both ends have posted it and every earlier one of its channel is
  through;
- nothing completes before nobody can go on without it, and then in an order that the seed chooses;
- data is copied at completion, so a sender that writes to its buffer too early is caught (by comparing), and
  a receiver that reads too early sees garbage (NaN, or the smallest integer), with which a posted buffer is
  filled;
- at the end of a run nothing may be left that was posted at one end only.

Otherwise (`strict=False`) operations complete as soon as both ends have posted them. Both modes refuse ends
that differ in dtype or shape, and both find deadlock exactly: when no rank can go on, the error names for
every rank what it waits for, and the cycle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from random import Random

import torch
from attrs import define, field

from partita.compiler.instructions import Channel


class CommunicationError(RuntimeError):
    """The ranks' programs do not fit together."""


class Deadlock(CommunicationError):
    """No rank can go on.

    In `cycle` each rank waits for the next, the last for the first; it is empty where a rank waits for one
    that has finished.
    """

    def __init__(self, message: str, cycle: tuple[int, ...]) -> None:
        super().__init__(message)
        self.cycle = cycle


class Mismatch(CommunicationError):
    """The two ends of a transfer, or the ranks of a reduction, differ in dtype or shape."""


class BufferReused(CommunicationError):
    """A tensor was changed between the post of its send and its completion."""


class Stray(CommunicationError):
    """A run ended with operations that only one end has posted."""


@define(eq=False, slots=True)
class _Post:
    """One end's operation: a `Handle`. `index` counts the rank's operations on this channel."""

    transport: VirtualTransport
    kind: str
    line: _Line
    index: int
    tensor: torch.Tensor
    sent: torch.Tensor | None  # what the tensor held when it was posted, in strict mode
    complete: bool = False

    def done(self) -> bool:
        if not self.complete:
            self.transport.waiting.append(self)
        return self.complete

    def __str__(self) -> str:
        return f"{self.kind} {self.index} on {self.line.name}"


@define(eq=False, slots=True)
class _Line:
    """What completes in order: a channel (its ends: source, destination), or the reductions of all ranks.

    `posted[end]` holds the posted operations of each end that are not complete.
    """

    name: str
    ends: tuple[int, ...]
    posted: tuple[deque[_Post], ...]
    counts: list[int]

    def ready(self) -> bool:
        return all(self.posted)

    def missing(self) -> tuple[int, ...]:
        """The ranks without which the next operation of this line cannot complete."""
        return tuple(rank for rank, posts in zip(self.ends, self.posted, strict=True) if not posts)


def _line(name: str, ends: tuple[int, ...]) -> _Line:
    return _Line(name, ends, tuple(deque() for _ in ends), [0] * len(ends))


@define(eq=False)
class VirtualTransport:
    """One rank's end of a `VirtualCluster`; a `Transport`."""

    rank: int
    ranks: int
    cluster: VirtualCluster = field(repr=False)
    waiting: list[_Post] = field(factory=list, repr=False)

    def open(self, channels: Sequence[Channel]) -> None:
        """Open the channels of the program; every rank must name the same ones."""
        self.cluster.open(channels)

    def send(self, channel: Channel, tensor: torch.Tensor) -> _Post:
        """Post a send; the tensor must not change until it is done."""
        assert channel.source == self.rank, f"rank {self.rank} cannot send on {channel}"
        return self.cluster.post(self, "send", self.cluster.channels[channel], 0, tensor)

    def receive(self, channel: Channel, buffer: torch.Tensor) -> _Post:
        """Post a receive; in strict mode the buffer holds garbage until it is done."""
        assert channel.destination == self.rank, f"rank {self.rank} cannot receive on {channel}"
        return self.cluster.post(self, "receive", self.cluster.channels[channel], 1, buffer)

    def all_reduce(self, tensor: torch.Tensor) -> _Post:
        """Post a sum over all ranks, in place; added in the order of the ranks."""
        return self.cluster.post(self, "all-reduce", self.cluster.reductions, self.rank, tensor)

    def close(self) -> None:
        """Nothing to release."""


class VirtualCluster:
    """`ranks` virtual ranks. In strict mode `seed` chooses the order in which operations complete."""

    def __init__(self, ranks: int, strict: bool = True, seed: int = 0) -> None:
        self.ranks = ranks
        self.strict = strict
        self.channels: dict[Channel, _Line] = {}
        self.reductions = _line("the reductions", tuple(range(ranks)))
        self._random = Random(seed)
        self._transports = tuple(VirtualTransport(rank, ranks, self) for rank in range(ranks))

    def transport(self, rank: int) -> VirtualTransport:
        """The end of one rank."""
        return self._transports[rank]

    def open(self, channels: Sequence[Channel]) -> None:
        """Make the channels that are not there yet."""
        for channel in channels:
            assert min(channel.source, channel.destination) >= 0, channel
            assert max(channel.source, channel.destination) < self.ranks, channel
            assert channel.source != channel.destination, f"{channel}: a rank needs no channel to itself"
            if channel not in self.channels:
                self.channels[channel] = _line(str(channel), (channel.source, channel.destination))

    def post(self, transport: VirtualTransport, kind: str, line: _Line, end: int, tensor: torch.Tensor) -> _Post:
        """Post an operation at one end of a line."""
        assert tensor.is_contiguous(), (
            f"rank {transport.rank}: {kind} on {line.name} of a tensor that is not contiguous"
        )
        sent = None
        if self.strict:
            if kind == "receive":
                _fill_with_garbage(tensor)
            else:
                sent = tensor.detach().clone()
        post = _Post(transport, kind, line, line.counts[end], tensor, sent)
        line.counts[end] += 1
        line.posted[end].append(post)
        if not self.strict:
            while line.ready():
                self._complete(line)
        return post

    def run(self, steps: Sequence[Iterator[None]]) -> None:
        """Run one generator per rank until all are exhausted.

        Raises `Deadlock`, `Mismatch`, and in strict mode `BufferReused` or `Stray`.
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
        """Nobody can go on: complete one operation that somebody waits for, or report the deadlock."""
        awaited = {
            id(post.line): post.line for rank in running for post in self._transports[rank].waiting if post.line.ready()
        }
        if not awaited:
            raise self._deadlock(running)
        self._complete(self._random.choice(list(awaited.values())))

    def _complete(self, line: _Line) -> None:
        """Do the oldest operation of a line that all its ends have posted."""
        posts = [queue.popleft() for queue in line.posted]
        _hold_equal(line, posts)
        for post in posts:
            if post.sent is not None and not _same_bits(post.sent, post.tensor):
                raise BufferReused(
                    f"rank {post.transport.rank} changed the tensor of its {post} before that was complete"
                )
        if line is self.reductions:
            total = posts[0].tensor.clone()
            for post in posts[1:]:
                total += post.tensor
            for post in posts:
                post.tensor.copy_(total)
        else:
            source, destination = posts
            destination.tensor.copy_(source.tensor)
        for post in posts:
            post.complete = True

    def _finish(self) -> None:
        lines = [*self.channels.values(), self.reductions]
        for line in lines:
            while line.ready():
                self._complete(line)
        left = [f"rank {post.transport.rank}: {post}" for line in lines for posts in line.posted for post in posts]
        if left:
            raise Stray("operations that no other rank has matched:\n  " + "\n  ".join(left))

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
                # An earlier operation of the same line may be what is in the way.
                head = min(
                    (line[0] for line in post.line.posted if line),
                    key=lambda oldest: oldest.index,
                    default=post,
                )
                behind = "" if head.index == post.index else f", which is behind operation {head.index} of it"
                reasons.append(f"{post}{behind}, which {_ranks(missing)} not posted")
            lines.append(f"rank {rank} waits for " + " or ".join(reasons))
        cycle = _cycle(next_rank)
        if cycle:
            lines.append("the cycle: " + " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0])))
        return Deadlock("no rank can go on:\n  " + "\n  ".join(lines), cycle)


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


def _hold_equal(line: _Line, posts: Sequence[_Post]) -> None:
    forms = [(post.tensor.dtype, tuple(post.tensor.shape)) for post in posts]
    if any(form != forms[0] for form in forms):
        ends = ", ".join(
            f"{post.kind} of rank {post.transport.rank}: {str(dtype).removeprefix('torch.')}{list(shape)}"
            for post, (dtype, shape) in zip(posts, forms, strict=True)
        )
        raise Mismatch(f"operation {posts[0].index} on {line.name} differs between its ends: {ends}")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.detach().reshape(-1).view(torch.uint8))


def _fill_with_garbage(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
