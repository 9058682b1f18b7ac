"""What the executor asks of a transport: in-order channels between two ranks, collectives along the axes of the mesh,
and sums over all ranks.

The three transports (`virtual`, `gloo`, `nccl`) differ only behind this interface. The executor's step is a
generator: it asks a handle whether it is done and yields while it is not. Real transports block inside `done` (their
ranks are processes of their own), so there a step never yields; the virtual transport answers at once and its driver
steps another rank.

Channels name pipeline ranks. Each column of the mesh (the ranks on equal coordinates but the pipeline's) has a copy of
its own of every channel.

A collective is among the ranks of `mesh.group(rank, axis)`, in order of their coordinate. It takes a bucket of tensors,
of any strides and not all of one dtype, that travel together, with an entry of `dims` for each. They must not change
until the handle is done; results are new, contiguous tensors. The ranks of a group post the same collectives along an
axis, and wait for them, in the same order. Sums are in the dtype of the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

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

    def all_gather(self, axis: str, tensors: Tensors, dims: Sequence[int]) -> Collective:
        """Post a gather: result i is the ranks' tensors i, concatenated along `dims[i]`."""

    def reduce_scatter(self, axis: str, tensors: Tensors, dims: Sequence[int]) -> Collective:
        """Post a sum of which each rank gets its part along `dims[i]`."""

    def all_reduce(self, axis: str, tensors: Tensors, maximum: bool = False) -> Collective:
        """Post a sum, or an elementwise maximum, of which each rank gets the whole."""

    def all_to_all(
        self, axis: str, tensors: Tensors, gathered_dims: Sequence[int], cut_dims: Sequence[int]
    ) -> Collective:
        """Post an exchange: part j along `cut_dims[i]` goes to rank j, what comes is concatenated along
        `gathered_dims[i]`."""

    def sum_over_ranks(self, tensor: torch.Tensor) -> Handle:
        """Post the sum of a small contiguous tensor over all ranks, in place, added in the order of the ranks."""

    def close(self) -> None:
        """Release everything; called once at the end, also after a failure."""
