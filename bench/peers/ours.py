"""Ours as the others are called: one rank of a workload, step by step, without data, observers and checkpoints."""

from __future__ import annotations

import torch
import torch.distributed as dist

from partita.runtime.heap import keep_pages
from partita.runtime.learning_rates import learning_rate
from partita.runtime.rank import Rank
from partita.runtime.transports.process import ProcessTransport
from peers.workload import Workload


def rank_of(workload: Workload) -> Rank:
    """One rank of a workload, on the ranks of the current process group, as `partita run` makes it."""
    keep_pages()
    device = torch.device("cpu")
    return Rank(workload.plan, dist.get_rank(), ProcessTransport(device), device)


class Ours:
    """A rank with its learning rates."""

    def __init__(self, workload: Workload) -> None:
        self.rank = rank_of(workload)
        self.names = [each.name for each in workload.plan.program.inputs]
        self.schedule = workload.optimizer["lr"]
        self.number = 0

    def step(self, *batch: torch.Tensor) -> float:
        """One step of training; returns the loss, on every rank."""
        self.number += 1
        rate = learning_rate(self.schedule, self.number)
        for _ in self.rank.step(self.number, dict(zip(self.names, batch, strict=True)), (rate,)):
            pass
        return self.rank.results(self.rank.training)[0]
