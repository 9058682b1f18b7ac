"""What any system must do, with nothing around it: the messages of a pipeline, and the products of a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from partita.compiler.instructions import Channel, Compute, PostReceive, PostSend, Transfer
from partita.compiler.program import Program


class Messages:
    """The messages of a rank's step, without the step: posted and waited for in the order of its instructions.

    They go through the process group of all ranks, as those of torch's pipelining do, with a tag for each channel. What
    is sent is always the same.
    """

    def __init__(self, program: Program) -> None:
        rank = program.ranks[dist.get_rank()]
        tags = {channel: tag for tag, channel in enumerate(program.channels)}
        works: dict[Transfer, Any] = {}
        self.runs = [self._bound(each, tags, works) for each in rank.instructions if not isinstance(each, Compute)]

    def _bound(self, instruction: Any, tags: Mapping[Channel, int], works: dict[Transfer, Any]) -> Callable[[], None]:
        transfer = instruction.transfer
        channel, tensor = transfer.channel, torch.zeros(transfer.message.bytes // 4)
        if isinstance(instruction, PostSend):
            post = partial(dist.isend, tensor, channel.destination, tag=tags[channel])
        elif isinstance(instruction, PostReceive):
            post = partial(dist.irecv, tensor, channel.source, tag=tags[channel])
        else:
            return lambda: works.pop(transfer).wait()
        return lambda: works.update({transfer: post()})

    def run(self) -> None:
        """Those of one step."""
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
