"""Ranks that are processes: Gloo between CPUs, NCCL between GPUs, both over `torch.distributed`.

Each channel has a communicator of its own (a process group of its two ranks), so that no transfer blocks
behind an unrelated one, and transfers are matched by their order in it, without tags. Every rank creates all
of them, in one sorted order, and warms each up with a small transfer in that order: communicators that are
set up lazily, in whichever order a schedule first meets them, can deadlock.

The process group must exist (`partita.runtime.rendezvous.connect`). What NCCL does beyond that is assumed,
not checked: kernels of different communicators run side by side as long as their thread blocks (CTAs) fit on
the device together, which is why channels ask for few.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from attrs import define

from partita.compiler.instructions import Channel

CTAS_PER_CHANNEL = 2  # enough for a link's bandwidth, few enough that dozens of channels share a GPU with its work
CLOSE_SECONDS = 5.0


class ConnectionLost(RuntimeError):
    """Another rank has gone; the message names the operation and the rank at its other end."""


@define(eq=False)
class Transferring:
    """A posted send or receive. Keeps its tensor alive until it is done."""

    work: Any
    tensor: torch.Tensor
    description: str

    def done(self) -> bool:
        """Wait (on NCCL: let the current stream wait) and answer True; raises `ConnectionLost`."""
        _wait(self.work, self.description)
        return True


@define(eq=False)
class Reducing:
    """A posted sum."""

    work: Any
    tensor: torch.Tensor
    parts: list[torch.Tensor]
    summed: bool = False

    def done(self) -> bool:
        """Wait, add the ranks' parts into the tensor and answer True; raises `ConnectionLost`."""
        if not self.summed:
            _wait(self.work, "the sum over all ranks")
            total = self.parts[0].clone()
            for part in self.parts[1:]:
                total += part
            self.tensor.copy_(total)
            self.summed = True
        return True


class ProcessTransport:
    """One process's end of the communication; a `Transport`. Tensors live on `device`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.device = torch.device(device)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._world = dist.new_group(backend=self.backend, group_desc="partita: sums over all ranks")

    def open(self, channels: Sequence[Channel]) -> None:
        """Create and warm up the channels of the whole program, on every rank the same ones."""
        for channel in sorted(set(channels) - set(self._groups)):
            self._groups[channel] = dist.new_group(
                [channel.source, channel.destination],
                backend=self.backend,
                pg_options=self._options(),
                group_desc=f"partita: {channel}",
            )
            greeting = torch.zeros(1, device=self.device)
            if channel.source == self.rank:
                self.send(channel, greeting).done()
            elif channel.destination == self.rank:
                self.receive(channel, greeting).done()
        # All wait here, so that whatever is wrong with the network shows before the first step.
        self.all_reduce(torch.zeros(1, device=self.device)).done()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, channel: Channel, tensor: torch.Tensor) -> Transferring:
        """Post a send of a contiguous tensor; it must not change until it is done."""
        assert channel.source == self.rank, f"rank {self.rank} cannot send on {channel}"
        assert tensor.is_contiguous(), f"send on {channel} of a tensor that is not contiguous"
        description = f"the send to rank {channel.destination} ({channel})"
        work = _post(description, dist.isend, tensor, channel.destination, group=self._groups[channel])
        return Transferring(work, tensor, description)

    def receive(self, channel: Channel, buffer: torch.Tensor) -> Transferring:
        """Post a receive into a contiguous tensor."""
        assert channel.destination == self.rank, f"rank {self.rank} cannot receive on {channel}"
        assert buffer.is_contiguous(), f"receive on {channel} into a tensor that is not contiguous"
        description = f"the receive from rank {channel.source} ({channel})"
        work = _post(description, dist.irecv, buffer, channel.source, group=self._groups[channel])
        return Transferring(work, buffer, description)

    def all_reduce(self, tensor: torch.Tensor) -> Reducing:
        """Post a sum over all ranks, in place.

        Every rank gathers the parts and adds them in the order of the ranks: meant for what is small (losses,
        norms, metrics), where it gives the same bits on every rank and on every transport.
        """
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        work = _post("the sum over all ranks", dist.all_gather, parts, tensor, group=self._world, async_op=True)
        return Reducing(work, tensor, parts)

    def close(self) -> None:
        """Destroy all groups.

        Where other ranks have died this may not come to an end: then it is left after 5 s.
        """
        self._groups.clear()
        closing = Thread(target=_destroy, name="partita-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def _options(self) -> Any:
        if self.backend != "nccl":
            return None
        options = dist.ProcessGroupNCCL.Options()
        if hasattr(options, "config"):
            options.config.min_ctas = 1
            options.config.max_ctas = CTAS_PER_CHANNEL
        return options


def _post(description: str, operation: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return operation(*arguments, **options)
    except RuntimeError as error:
        raise ConnectionLost(f"{description} failed: {_cause(error)}") from error


def _wait(work: Any, description: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise ConnectionLost(f"{description} failed: {_cause(error)}") from error


def _cause(error: RuntimeError) -> str:
    """The first sentence of a backend's message, without the place in its source that stands before it."""
    first = str(error).strip().split("\n")[0]
    if first.startswith("["):
        first = first.partition("] ")[2]
    return first.split(". ")[0]


def _destroy() -> None:
    # Only what a dead peer causes is to be expected here, and there is nobody left to be told.
    with suppress(RuntimeError):
        dist.destroy_process_group()
