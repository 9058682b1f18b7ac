"""The model in an ordinary torch loop on one process, microbatch by microbatch or the whole batch at once."""

from __future__ import annotations

import torch

from peers.workload import Workload

CPU = torch.device("cpu")


class Plain:
    """The model, its optimizer and a loop over microbatches; with `autocast` products are in bf16, and weights are kept
    in f32.
    """

    def __init__(
        self,
        workload: Workload,
        compiled: bool,
        microbatches: int = 1,
        device: torch.device = CPU,
        autocast: bool = False,
    ) -> None:
        written = workload.written
        self.device, self.autocast = device, autocast
        self.model = written.Piece(workload.weights, range(workload.layers), True, True).to(device)
        if compiled:
            self.model.compile()
        self.microbatches = microbatches
        self.loss_of = written.loss_of
        self.optimizer = written.optimizer_of([self.model], workload.optimizer)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """One step of training; returns the loss."""
        inputs, targets = (each.to(self.device, non_blocking=True) for each in (inputs, targets))
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for x, y in zip(inputs.chunk(self.microbatches), targets.chunk(self.microbatches), strict=True):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                loss = self.loss_of(self.model(x), y) / self.microbatches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()
