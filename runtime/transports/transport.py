"""The transport interface of the executor: in-order channels between two ranks, collectives along the mesh's axes, and
small all-gathers over all ranks.

The executor's step is a generator that asks a handle whether it is done and yields while it is not. Real transports
block inside `done` (each rank is a process), so there a step never yields; the virtual transport answers at once and
its driver runs another rank. The transports are listed in `registry`.

Channels name pipeline ranks. Each column of the mesh (the ranks with equal coordinates on all axes but the pipeline's)
has its own copy of every channel.

A collective is among the ranks of `mesh.group(rank, axis)`, in order of their coordinate. It takes a bucket of tensors,
of any strides and possibly several dtypes, with arguments for each. They must not change until the handle is done;
results are new, contiguous tensors. The ranks of a group post the same collectives along an axis, and wait for them, in
the same order. Sums are in the dtype of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from attrs import frozen

from partita.compiler.instructions import Channel, Traffic
from partita.compiler.mesh import Mesh
from partita.runtime.streams import Handle, Streams

__all__ = ["Cluster", "Collective", "Handle", "ProcessEnd", "Tensors", "Transport", "awaited", "run_alone"]

Tensors = tuple[torch.Tensor, ...]
NO_STREAMS: Mapping[str, str] = {}


class Collective(Handle, Protocol):
    """A posted collective."""

    def result(self) -> Tensors:
        """A tensor for each one given. To be taken once, when the handle is done; the handle then drops all tensors."""


def awaited(collective: Collective) -> Generator[None, None, Tensors]:
    """Wait for a collective; returns its results."""
    while not collective.done():
        yield
    return collective.result()


def run_alone(steps: Iterator[None]) -> None:
    """Run what one rank does to its end, on a transport of processes: that waits inside its handles."""
    for _ in steps:
        raise AssertionError("a real transport waits inside its handles")


class Transport(Protocol):
    """One rank's end of the communication."""

    rank: int
    ranks: int

    @property
    def busy_wait(self) -> float:
        """Seconds of waiting since the transport was made that count as CPU time of this thread."""

    def streams(self, device: torch.device) -> Streams:
        """Where operations are enqueued that a rank with its tensors on this device posts."""

    def open(self, mesh: Mesh, channels: Mapping[Channel, Traffic], streams: Mapping[str, str] = NO_STREAMS) -> None:
        """Create and warm up the groups along the mesh's axes, and the channels of the whole program. `streams` are
        those of the program's communicators (`partita.compiler.streams.communicators`).

        Every rank calls it once, with the same arguments. No step sends more on a channel than the channel's traffic,
        and there is a gather over all ranks between two steps.
        """

    def send(self, channel: Channel, tensor: torch.Tensor) -> Handle:
        """Post a send of a contiguous tensor; it must not change until the handle is done. On a GPU it is on the
        current stream, as is a receive, and done when that gets behind it.
        """

    def receive(self, channel: Channel, buffer: torch.Tensor) -> Handle:
        """Post a receive into a contiguous tensor; its content is undefined until the handle is done."""

    def collective(self, kind: str, axis: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]) -> Collective:
        """Post a collective of a kind (`partita.runtime.transports.collectives`), with arguments for each tensor."""

    def gather_over_ranks(self, tensor: torch.Tensor) -> Collective:
        """Post an all-gather of a small contiguous tensor over all ranks. Its result is one tensor: theirs in order,
        along a new first dimension, whose sum has the same bits on all ranks.
        """

    def close(self) -> None:
        """Release everything; called once at the end, also after a failure."""


# Posts a transfer of the bytes of a CPU tensor to or from a rank; returns what waits for it. Raise `ConnectionLost`.
Post: TypeAlias = Callable[[torch.Tensor, int], Callable[[], None]]


@frozen
class PeerConnections:
    """What connects any two ranks, apart from the program's communicators. Transfers between two match by order."""

    send: Post
    receive: Post


class ProcessEnd(Transport, Protocol):
    """The transport of a rank that is a process. If it is `still`, messages are not sent, and zeros are received."""

    still: bool

    def links(self) -> PeerConnections:
        """Connect all ranks once more, for bytes; every rank must call this. Raises `ConnectionLost`."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""


class Cluster(Protocol):
    """All ranks in one process."""

    def transport(self, rank: int) -> Transport:
        """The transport of one rank."""

    def run(self, steps: Sequence[Iterator[None]]) -> None:
        """Run one generator per rank, each until it yields to wait, until all are exhausted."""
