"""Ours as the others are called: one rank of a workload, step by step, without data, observers and checkpoints."""

from __future__ import annotations

from time import thread_time

import torch
import torch.distributed as dist

from partita.cli.training.devices import chosen
from partita.runtime.evaluation import results
from partita.runtime.heap import keep_pages
from partita.runtime.learning_rates import learning_rate
from partita.runtime.rank import CompiledRun, Rank
from partita.runtime.tracing.flight import TRAINING, Flight
from partita.runtime.transports.registry import Processes
from peers.workload import Workload


class Clock(Flight):
    """Reads the thread's CPU time at each mark of a step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        super().__init__(None)

    def begin(self, activity: int, step: int = 0) -> None:
        """A step forgets the marks before it."""
        if activity == TRAINING:
            self.times.clear()
        super().begin(activity, step)

    def mark(self) -> None:
        """Keeps the time."""
        super().mark()
        self.times.append(thread_time())

    @property
    def updated(self) -> float:
        """Seconds of CPU time of the last step's update. After it come two marks: its own, and the end of the step."""
        return self.times[-2] - self.times[-3]


CPU = torch.device("cpu")


def rank_of(plan: CompiledRun, flight: Flight | None = None, device: torch.device = CPU) -> Rank:
    """One rank of a plan, on the ranks of the current process group, as `partita run` makes it."""
    keep_pages()
    kind = chosen(None, 1 if device.type == "cuda" else 0, 1)
    assert isinstance(kind, Processes)
    return Rank(plan, dist.get_rank(), kind.end(device, b""), device, flight=flight)


class Ours:
    """A rank with its learning rates."""

    def __init__(self, workload: Workload, clock: Clock | None = None, device: torch.device = CPU) -> None:
        self.clock = clock
        self.rank = rank_of(workload.plan, self.clock, device)
        self.names = [each.name for each in workload.plan.program.inputs]
        self.schedule = workload.optimizer["lr"]
        self.number = 0

    def step(self, *batch: torch.Tensor) -> float:
        """One step of training; returns the loss, on every rank."""
        self.number += 1
        rate = learning_rate(self.schedule, self.number)
        for _ in self.rank.step(self.number, dict(zip(self.names, batch, strict=True)), (rate,)):
            pass
        return results(self.rank.training)[0]

    @property
    def computed(self) -> float:
        """Seconds of CPU time of the last step's actions, without its batch, reductions and update. Needs a clock."""
        assert self.clock is not None
        # The first mark begins the step, the second follows the prologue.
        return self.clock.times[1 + len(self.rank.training.record.instructions)] - self.clock.times[1]
