"""The model in an ordinary torch loop on one process, microbatch by microbatch or the whole batch at once."""

from __future__ import annotations

import torch

from peers.workload import Workload


class Plain:
    """The model, its optimizer and a loop over microbatches."""

    def __init__(self, workload: Workload, compiled: bool, microbatches: int = 1) -> None:
        written = workload.written
        self.model = written.Piece(workload.weights, range(workload.layers), True, True)
        if compiled:
            self.model.compile()
        self.microbatches = microbatches
        self.loss_of = written.loss_of
        self.optimizer = written.optimizer_of([self.model], workload.optimizer)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One step of training; returns the loss."""
        total = 0.0
        for x, y in zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True):
            loss = self.loss_of(self.model(x), y) / self.microbatches
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total
