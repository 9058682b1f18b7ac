"""`bench/models/nanogpt.par` as a nanoGPT-like loop in torch: one process, eager, fused AdamW.

What nanoGPT does besides is left out on both sides: it also evaluates before the first step and on training data,
and writes checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import cos, pi
from statistics import fmean
from typing import Any

import torch
from attrs import Factory, define
from torch import Tensor, nn
from torch.nn import functional as F

from peers.workload import Workload

EPSILON = 1e-5


def _linear(matrix: Tensor) -> nn.Linear:
    """A layer without bias of a matrix [in, out], which torch keeps transposed."""
    layer = nn.Linear(*matrix.shape, bias=False)
    layer.weight = nn.Parameter(matrix.t().detach().clone(memory_format=torch.contiguous_format))
    return layer


def _norm(scale: Tensor) -> nn.LayerNorm:
    layer = nn.LayerNorm(len(scale), EPSILON, bias=False)
    layer.weight = nn.Parameter(scale.detach().clone())
    return layer


class Block(nn.Module):
    """Attention and MLP, each on the normed residual stream; queries, keys and values come from one product."""

    def __init__(self, weights: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        attention, mlp = f"{name}.attention", f"{name}.mlp"
        embed, self.heads, _ = weights[f"{attention}.wq"].shape
        self.attention_norm, self.mlp_norm = (_norm(weights[f"{each}.scale"]) for each in (attention, mlp))
        self.qkv = _linear(torch.cat([weights[f"{attention}.w{each}"].reshape(embed, -1) for each in "qkv"], 1))
        self.out = _linear(weights[f"{attention}.wo"].reshape(-1, embed))
        self.up, self.down = (_linear(weights[f"{mlp}.{each}"]) for each in ("up", "down"))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, embed] to the same."""
        batch, seq, embed = x.shape
        parts = self.qkv(self.attention_norm(x)).split(embed, 2)
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in parts)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, seq, embed))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Model(nn.Module):
    """The transformer; its output layer is its embedding."""

    def __init__(self, weights: Mapping[str, Tensor], layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = (
            nn.Embedding.from_pretrained(weights[f"nanogpt.{w}"].detach().clone(), freeze=False) for w in ("wte", "wpe")
        )
        self.blocks = nn.ModuleList(Block(weights, f"nanogpt.layer.{i}") for i in range(layers))
        self.norm = _norm(weights["nanogpt.scale"])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over all tokens."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """AdamW in torch's fused form. What has two dimensions or more decays, embeddings and positions too."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=tuple(settings["betas"]), eps=settings["eps"], fused=True)


def rate_at(step: int, *, peak: float, warmup: int, total: int, floor: float) -> float:
    """The learning rate of a step, counted from 1: linearly up to the peak, then half a cosine down to the floor."""
    if step < warmup:
        return peak * step / warmup
    if step >= total:
        return floor
    return floor + (peak - floor) * (1 + cos(pi * (step - warmup) / (total - warmup))) / 2


@define
class Losses:
    """Of every training step, and after them of every evaluation."""

    training: list[float] = Factory(list)
    evaluations: list[float] = Factory(list)


class Training:
    """The model and its optimizer, ready for the first step; torch.optim imports torch's compiler when it is made."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.model = Model(work.weights, work.layers)
        self.optimizer = optimizer_of(self.model, work.optimizer)

    def run(self) -> Losses:
        """All steps, each with its loss read as nanoGPT reads it for its log, and the evaluations between them."""
        settings, rates = self.work.plan.train, self.work.optimizer["lr"].arguments
        interval, batches = (int(settings.eval.arguments[each]) for each in ("interval", "batches"))
        losses = Losses()
        for step, batch in zip(range(1, settings.steps + 1), self.work.batches(), strict=False):
            losses.training.append(self.step(batch, rate_at(step, **rates), settings.clip))
            if step % interval == 0 or step == settings.steps:
                losses.evaluations.append(evaluate(self.model, held_out(self.work, batches)))
        return losses

    def step(self, batch: tuple[Tensor, ...], rate: float, clip: float) -> float:
        """One step; returns the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


@torch.no_grad()
def evaluate(model: Model, batches: Iterator[tuple[Tensor, ...]]) -> float:
    """The mean loss over batches."""
    model.eval()
    mean = fmean(model(*batch).item() for batch in batches)
    model.train()
    return mean


def held_out(work: Workload, count: int) -> Iterator[tuple[Tensor, ...]]:
    """The first batches of what training never sees: tokens and targets."""
    for index in range(count):
        batch = work.dataset.holdout_batch(index)
        yield torch.as_tensor(batch["tokens"]), torch.as_tensor(batch["targets"])
