"""The lines of a virtual cluster: what its ranks post, the order of completion, and the errors.

A *line* is an in-order sequence of operations: a channel between two ranks, the collectives of a group along a mesh
axis, or the gathers over all ranks. Operation i of a line is the i-th that each of its ends posts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from attrs import Factory, define, field

from partita.runtime.transports.collectives import collect
from partita.runtime.transports.packing import as_bytes


class CommunicationError(RuntimeError):
    """The ranks' programs do not match."""


class Deadlock(CommunicationError):
    """No rank can make progress.

    In `cycle` each rank waits for the next, and the last for the first; it is empty if one waits for a finished rank.
    """

    def __init__(self, message: str, cycle: tuple[int, ...]) -> None:
        super().__init__(message)
        self.cycle = cycle


class Mismatch(CommunicationError):
    """The ends of an operation differ in kind, dtype, shape or dimensions."""


class BufferReused(CommunicationError):
    """A tensor was changed between the post of its operation and its completion."""


class UnmatchedOperation(CommunicationError):
    """A run ended with operations that not all ends had posted."""


@define(eq=False, slots=True)
class PostedOperation:
    """One end's operation: a `Handle` and a `Collective`. `index` counts the rank's operations on this line.

    A collective has `arguments` for each tensor. `sent` is what the tensors held when they were posted.
    """

    rank: int
    kind: str
    line: OrderedQueue
    index: int
    tensors: tuple[torch.Tensor, ...]
    arguments: tuple[tuple[Any, ...], ...]
    sent: tuple[torch.Tensor, ...]
    waiting: list[PostedOperation]  # where the rank records what it waits for
    complete: bool = False
    results: tuple[torch.Tensor, ...] | None = None

    def done(self) -> bool:
        """Whether the operation is complete; if not, records that the rank waits for it."""
        if not self.complete:
            self.waiting.append(self)
        return self.complete

    def result(self) -> tuple[torch.Tensor, ...]:
        """The results of a collective; to be taken once."""
        assert self.complete, f"rank {self.rank} takes the result of its {self} before that is complete"
        assert self.results is not None, f"rank {self.rank} takes the result of its {self} again"
        results, self.results = self.results, None
        return results

    def __str__(self) -> str:
        return f"{self.kind} {self.index} on {self.line.name}"


@define(eq=False, slots=True)
class OrderedQueue:
    """`posted[end]` holds the incomplete operations of each of the `ends` (ranks)."""

    name: str
    ends: tuple[int, ...]
    posted: tuple[deque[PostedOperation], ...] = field(
        init=False, default=Factory(lambda self: tuple(deque() for _ in self.ends), takes_self=True)
    )
    counts: list[int] = field(init=False, default=Factory(lambda self: [0] * len(self.ends), takes_self=True))

    def post(
        self,
        rank: int,
        kind: str,
        tensors: tuple[torch.Tensor, ...],
        arguments: tuple[tuple[Any, ...], ...],
        waiting: list[PostedOperation],
        strict: bool,
    ) -> PostedOperation:
        """Post a rank's next operation. Strict: receive buffers are filled with garbage, and sent data is saved."""
        end = self.ends.index(rank)
        sent: tuple[torch.Tensor, ...] = ()
        if strict and kind == "receive":
            for tensor in tensors:
                fill_with_garbage(tensor)
        elif strict:
            sent = tuple(tensor.detach().clone() for tensor in tensors)
        post = PostedOperation(rank, kind, self, self.counts[end], tensors, arguments, sent, waiting)
        self.counts[end] += 1
        self.posted[end].append(post)
        return post

    def ready(self) -> bool:
        """Whether all ends have posted the next operation."""
        return all(self.posted)

    def missing(self) -> tuple[int, ...]:
        """The ranks that the line's next operation still waits for."""
        return tuple(rank for rank, posts in zip(self.ends, self.posted, strict=True) if not posts)

    def oldest(self, post: PostedOperation) -> PostedOperation:
        """The operation that must complete before any other on this line can."""
        return min((posts[0] for posts in self.posted if posts), key=lambda each: each.index, default=post)

    def complete(self) -> None:
        """Run the oldest operation, which all ends have posted. Raises `Mismatch`, `BufferReused`."""
        posts = [queue.popleft() for queue in self.posted]
        self._hold_equal(posts)
        for post in posts:
            if post.sent and not all(map(same_bits, post.sent, post.tensors)):
                raise BufferReused(f"rank {post.rank} changed the tensor of its {post} before that was complete")
        kind = posts[0].kind
        if kind == "send":
            source, destination = posts
            _fill(destination.tensors[0], source.tensors[0])
        else:
            outputs = collect(kind, [post.tensors for post in posts], posts[0].arguments)
            for post, results in zip(posts, outputs, strict=True):
                post.results = results
        for post in posts:
            post.complete = True
            post.tensors = post.sent = ()

    def _hold_equal(self, posts: Sequence[PostedOperation]) -> None:
        forms = [_form(post) for post in posts]
        if any(form != forms[0] for form in forms):
            ends = ", ".join(f"{post.kind} of rank {post.rank}: {_described(post)}" for post in posts)
            raise Mismatch(f"operation {posts[0].index} on {self.name} differs between its ends: {ends}")


@torch.inference_mode()  # like the executors' buffers
def _fill(buffer: torch.Tensor, content: torch.Tensor) -> None:
    buffer.copy_(content)


def _form(post: PostedOperation) -> tuple[object, ...]:
    kind = "transfer" if post.kind in ("send", "receive") else post.kind
    return kind, post.arguments, [(tensor.dtype, tuple(tensor.shape)) for tensor in post.tensors]


def _described(post: PostedOperation) -> str:
    """`float32[3, 4] (1,)`: dtype and shape of each tensor, and the arguments."""
    tensors = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in post.tensors]
    if post.arguments:
        tensors = [f"{tensor} {own}" for tensor, own in zip(tensors, post.arguments, strict=True)]
    return " + ".join(tensors)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit, NaN and the sign of zero included."""
    return torch.equal(as_bytes(a), as_bytes(b))


def fill_with_garbage(tensor: torch.Tensor) -> None:
    """Fill with what nobody should read: NaN, the smallest integer, or the negation."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
