"""Where an experiment begins: the first step of its model on one device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from attrs import define, field

from partita.runtime.checkpoint.four_bits import forms_of
from partita.runtime.inputs import Batch
from partita.runtime.kernels.four_bits import dequantized
from partita.runtime.rank import CompiledRun
from partita.runtime.training import VirtualRun

# A gradient norm below this counts as zero.
NO_NORM = 1e-8


@define(eq=False)
class Point:
    """The first step of a run, on one device: what it begins with, and what it computes.

    `parameters` include buffers, and matrices in four bits as numbers; `updated` are they after the step. Raises
    NotFinite if the loss or the norm of the gradient is not finite.
    """

    plan: CompiledRun
    batch: Batch
    parameters: Mapping[str, torch.Tensor] = field(init=False)
    loss: float = field(init=False)
    norm: float = field(init=False)
    metrics: Mapping[str, float] = field(init=False)
    gradients: Mapping[str, torch.Tensor] = field(init=False)
    updated: Mapping[str, torch.Tensor] = field(init=False)

    def __attrs_post_init__(self) -> None:
        run = VirtualRun(self.plan)
        stored = {name: tensor.clone() for name, tensor in run.parameters().items()}
        forms = forms_of(self.plan.program)
        matrices = {name: {part: stored[f"{name}.{part}"] for part in form.types} for name, form in forms.items()}
        self.parameters = stored | {name: dequantized(parts, forms[name]) for name, parts in matrices.items()}
        self.loss, self.norm = run.step(1, self.batch)
        self.metrics, self.gradients = run.metrics(), run.gradients()
        self.updated = run.parameters()

    @cached_property
    def losses(self) -> Mapping[str, str | None]:
        """The name of the loss that each trained parameter has the gradient of; None is the whole."""
        return {each.name: each.loss for each in self.plan.training.forward.parameters if each.trained}
