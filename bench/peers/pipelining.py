"""The model under `torch.distributed.pipelining`, on the ranks of the current process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from peers.workload import Workload

# Name → class, stages of each rank, whether they are placed in a V.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1, False),
    "1f1b": ("Schedule1F1B", 1, False),
    "interleaved": ("ScheduleInterleaved1F1B", 2, False),
    "zb1p": ("ScheduleInterleavedZeroBubble", 1, False),
    "zero_bubble": ("ScheduleInterleavedZeroBubble", 2, False),
    "zbv": ("ScheduleZBVZeroBubble", 2, True),
    "dualpipev": ("ScheduleDualPipeV", 2, True),
}


class Pipeline:
    """One rank's part of the model, its optimizer and torch's schedule."""

    def __init__(self, workload: Workload, schedule: str, compiled: bool) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        kind, chunks, v = SCHEDULES[schedule]
        count = ranks * chunks
        own = [(2 * ranks - 1 - rank if v else c * ranks + rank) if c else rank for c in range(chunks)]
        per_stage = workload.layers // count
        device = torch.device("cpu")
        written = workload.written
        self.pieces = []
        stages = []
        for index in own:
            layers = range(index * per_stage, (index + 1) * per_stage)
            piece = written.Piece(workload.weights, layers, index == 0, index == count - 1)
            if compiled:
                piece.compile()
            self.pieces.append(piece)
            stages.append(PipelineStage(piece, index, count, device))
        make = getattr(torch_schedules, kind)
        given = stages[0] if issubclass(make, torch_schedules.PipelineScheduleSingle) else stages
        self.schedule = make(given, workload.microbatches, loss_fn=written.loss_of)
        self.first, self.last = 0 in own, count - 1 in own
        self.optimizer = written.optimizer_of(self.pieces, workload.optimizer)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One step of training; returns the loss, on every rank."""
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.first else ()
        if self.last:
            self.schedule.step(*arguments, target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*arguments, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if self.last else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item()
