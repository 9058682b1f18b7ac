"""What the executor asks of a transport: in-order channels between two ranks, collectives along the axes of the mesh,
and sums over all ranks.

Transports (`registry`) differ only behind this interface. The executor's step is a
generator: it asks a handle whether it is done and yields while it is not. Real transports block inside `done` (their
ranks are processes of their own), so there a step never yields; the virtual transport answers at once and its driver
steps another rank.

Channels name pipeline ranks. Each column of the mesh (the ranks on equal coordinates but the pipeline's) has a copy of
its own of every channel.

A collective is among the ranks of `mesh.group(rank, axis)`, in order of their coordinate. It takes a bucket of tensors,
of any strides and not all of one dtype, that travel together, with arguments for each. They must not change
until the handle is done; results are new, contiguous tensors. The ranks of a group post the same collectives along an
axis, and wait for them, in the same order. Sums are in the dtype of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from partita.compiler.instructions import Channel, Traffic
from partita.compiler.mesh import Mesh

Tensors = tuple[torch.Tensor, ...]


class Handle(Protocol):
    """A posted operation. It keeps its tensors alive until it is done."""

    def done(self) -> bool:
        """Whether the operation is complete; a real transport waits for it and answers True."""


class Collective(Handle, Protocol):
    """A posted collective."""

    def result(self) -> Tensors:
        """A tensor for each that was given. To be taken once, when it is done; the handle then lets go of all."""


class Transport(Protocol):
    """One rank's end of the communication."""

    rank: int
    ranks: int

    @property
    def spun(self) -> float:
        """Seconds of waiting that count as CPU time of this thread, since the transport was made."""

    def open(self, mesh: Mesh, channels: Mapping[Channel, Traffic]) -> None:
        """Create and warm up the groups along the mesh's axes, and the channels of the whole program.

        Every rank calls it once, with the same arguments. No step sends more on a channel than it says, and between
        two steps are sums over all ranks.
        """

    def send(self, channel: Channel, tensor: torch.Tensor) -> Handle:
        """Post a send of a contiguous tensor; it must not be changed until the handle is done."""

    def receive(self, channel: Channel, buffer: torch.Tensor) -> Handle:
        """Post a receive into a contiguous tensor; its content is undefined until the handle is done."""

    def collective(self, kind: str, axis: str, tensors: Tensors, arguments: Sequence[tuple[Any, ...]]) -> Collective:
        """Post a collective of a kind (`partita.runtime.transports.collectives`), with arguments for each tensor."""

    def sum_over_ranks(self, tensor: torch.Tensor) -> Handle:
        """Post the sum of a small contiguous tensor over all ranks, in place, added in the order of the ranks."""

    def close(self) -> None:
        """Release everything; called once at the end, also after a failure."""


class ProcessEnd(Transport, Protocol):
    """The end of a rank that is a process."""

    def meet(self) -> None:
        """Wait until all ranks have come to this."""


class Cluster(Protocol):
    """All ranks in one process."""

    def transport(self, rank: int) -> Transport:
        """The end of one rank."""

    def run(self, steps: Sequence[Iterator[None]]) -> None:
        """Run one generator per rank, each until it yields because it waits, until all are exhausted."""
