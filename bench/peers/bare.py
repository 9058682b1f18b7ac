"""What any system must do, with nothing around it: the messages of a pipeline, and the products of a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from partita.compiler.instructions import Channel, Compute, PostReceive, PostSend, Transfer
from partita.compiler.program import Program
from partita.runtime.transports.transport import Transport


class Messages:
    """The messages of a rank's step, without the step: posted and waited for in the order of its instructions.

    They go over our transport, or over the process group of all ranks, with tags, as in torch's pipelining. What is
    sent is always the same.
    """

    def __init__(self, program: Program, transport: Transport | None) -> None:
        rank = program.ranks[dist.get_rank()]
        tags = {channel: tag for tag, channel in enumerate(program.channels)}
        self.transport = transport
        if transport is not None:
            transport.open(program.mesh, program.channels)
        works: dict[Transfer, Any] = {}
        self.runs = [self._bound(each, tags, works) for each in rank.instructions if not isinstance(each, Compute)]

    def _bound(self, instruction: Any, tags: Mapping[Channel, int], works: dict[Transfer, Any]) -> Callable[[], None]:
        transfer, ours = instruction.transfer, self.transport
        channel, tensor = transfer.channel, torch.zeros(transfer.message.bytes // 4)
        if isinstance(instruction, PostSend):
            there = partial(dist.isend, tensor, channel.destination, tag=tags[channel])
            post = partial(ours.send, channel, tensor) if ours else there
        elif isinstance(instruction, PostReceive):
            here = partial(dist.irecv, tensor, channel.source, tag=tags[channel])
            post = partial(ours.receive, channel, tensor) if ours else here
        elif ours:
            return lambda: works.pop(transfer).done()
        else:
            return lambda: works.pop(transfer).wait()
        return lambda: works.update({transfer: post()})

    def run(self) -> None:
        """Those of one step; with our transport, which asks for that, the ranks meet after it."""
        for run in self.runs:
            run()


class Layer:
    """A linear layer's forward and backward pass."""

    def __init__(self, rows: int, width: int) -> None:
        self.x, self.gradient = torch.randn(rows, width), torch.randn(rows, width)
        self.weight, self.total = torch.randn(width, width), torch.zeros(width, width)

    def run(self, times: int) -> None:
        """Its three products, so many times."""
        for _ in range(times):
            torch.mm(self.x, self.weight)
            torch.mm(self.gradient, self.weight.t())
            self.total.addmm_(self.x.t(), self.gradient)
