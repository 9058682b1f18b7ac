"""What the executor asks of a transport: in-order channels between two ranks, and sums over all ranks.

The three transports (`virtual`, `gloo`, `nccl`) differ only behind this interface. The executor's step is a
generator: it asks a handle whether it is done and yields while it is not. Real transports block inside `done` (their
ranks are processes of their own), so there a step never yields; the virtual transport answers at once and its driver
steps another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from partita.compiler.instructions import Channel


class Handle(Protocol):
    """A posted operation."""

    def done(self) -> bool:
        """Whether the operation is complete; a real transport waits for it and answers True."""


class Transport(Protocol):
    """One rank's end of the communication."""

    rank: int
    ranks: int

    def open(self, channels: Sequence[Channel]) -> None:
        """Create and warm up the channels of the whole program. Every rank calls it once, in the same order."""

    def send(self, channel: Channel, tensor: torch.Tensor) -> Handle:
        """Post a send of a contiguous tensor; it must not be changed until the handle is done."""

    def receive(self, channel: Channel, buffer: torch.Tensor) -> Handle:
        """Post a receive into a contiguous tensor; its content is undefined until the handle is done."""

    def all_reduce(self, tensor: torch.Tensor) -> Handle:
        """Post the sum of a tensor over all ranks, in place."""

    def close(self) -> None:
        """Release everything; called once at the end, also after a failure."""
