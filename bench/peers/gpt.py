"""`bench/models/gpt.par` written by hand in torch, in pieces that can be pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partita.runtime.learning_rates import learning_rate

EPSILON = 1e-5
WEIGHTS = ("scale", "shift")


def _parameter(weights: Mapping[str, Tensor], name: str, *shape: int) -> nn.Parameter:
    return nn.Parameter(weights[name].detach().clone().reshape(shape or weights[name].shape))


class Layer(nn.Module):
    """Attention and MLP. Weights are matrices, and the three that make queries, keys and values are one."""

    def __init__(self, weights: Mapping[str, Tensor], name: str) -> None:
        super().__init__()
        attention, mlp = f"{name}.attention", f"{name}.mlp"
        embed, self.heads, self.key = weights[f"{attention}.wq"].shape
        projections = [weights[f"{attention}.w{each}"].reshape(embed, -1) for each in "qkv"]
        self.qkv = nn.Parameter(torch.cat(projections, 1).detach().clone())
        self.out = _parameter(weights, f"{attention}.wo", self.heads * self.key, embed)
        self.up = _parameter(weights, f"{mlp}.up")
        self.down = _parameter(weights, f"{mlp}.down")
        self.attention_scale, self.attention_shift = (_parameter(weights, f"{attention}.{w}") for w in WEIGHTS)
        self.mlp_scale, self.mlp_shift = (_parameter(weights, f"{mlp}.{w}") for w in WEIGHTS)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, embed] to the same."""
        batch, seq, embed = x.shape
        h = F.layer_norm(x, (embed,), self.attention_scale, self.attention_shift, EPSILON)
        q, k, v = (h @ self.qkv).view(batch, seq, 3, self.heads, self.key).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.transpose(1, 2).reshape(batch, seq, -1) @ self.out
        h = F.layer_norm(x, (embed,), self.mlp_scale, self.mlp_shift, EPSILON)
        return x + F.gelu(h @ self.up, approximate="tanh") @ self.down


class Piece(nn.Module):
    """Some layers of the model in a row; the first piece embeds, the last one makes logits."""

    def __init__(self, weights: Mapping[str, Tensor], layers: Sequence[int], first: bool, last: bool) -> None:
        super().__init__()
        self.wte = _parameter(weights, "gpt.wte") if first else None
        self.wpe = _parameter(weights, "gpt.wpe") if first else None
        self.layers = nn.ModuleList(Layer(weights, f"gpt.layer.{i}") for i in layers)
        self.head = _parameter(weights, "gpt.head") if last else None
        self.scale, self.shift = (_parameter(weights, f"gpt.{w}") if last else None for w in WEIGHTS)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations to activations or logits."""
        if self.wte is not None:
            x = F.embedding(x, self.wte) + self.wpe
        for layer in self.layers:
            x = layer(x)
        if self.head is not None:
            x = F.layer_norm(x, (x.shape[-1],), self.scale, self.shift, EPSILON) @ self.head
        return x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(modules: Sequence[nn.Module], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """AdamW in torch's fused form; scales, shifts and positions do not decay."""
    named = [each for module in modules for each in module.named_parameters()]
    decays = [p for name, p in named if p.dim() > 1 and name != "wpe"]
    others = [p for name, p in named if p.dim() < 2 or name == "wpe"]
    groups = [{"params": decays, "weight_decay": settings["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate(settings["lr"], 1), betas=tuple(settings["betas"]), fused=True)
