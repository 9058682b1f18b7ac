"""Ours as the others are called: one rank of a workload, step by step, without data, observers and checkpoints."""

from __future__ import annotations

import torch
import torch.distributed as dist

from partita.runtime.heap import keep_pages
from partita.runtime.learning_rates import learning_rate
from partita.runtime.training import Rank
from partita.runtime.transports.process import ProcessTransport
from peers.workload import Workload


class Ours:
    """One rank, on the ranks of the current process group."""

    def __init__(self, workload: Workload) -> None:
        keep_pages()
        device = torch.device("cpu")
        self.rank = Rank(workload.plan, dist.get_rank(), ProcessTransport(device), device)
        self.names = [each.name for each in workload.plan.program.inputs]
        self.schedule = workload.optimizer["lr"]
        self.number = 0

    def step(self, *batch: torch.Tensor) -> float:
        """One step of training; returns the loss, on every rank."""
        self.number += 1
        rate = learning_rate(self.schedule, self.number)
        for _ in self.rank.step(self.number, dict(zip(self.names, batch, strict=True)), rate):
            pass
        return self.rank.results(self.rank.training)[0]
