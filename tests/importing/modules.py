"""Modules as people write them, with example inputs: what `partita import` is tested with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCAB, LENGTH = 32, 4, 61, 40


class CausalSelfAttention(nn.Module):
    """That of nanoGPT: fused where torch has it, or else with an explicit mask."""

    def __init__(self, flash: bool, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.flash, self.dropout = flash, dropout
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.size()
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (each.view(batch, seq, HEADS, width // HEADS).transpose(1, 2) for each in (q, k, v))
        if self.flash:
            rate = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * k.size(-1) ** -0.5
            att = att.masked_fill(self.bias[:, :, :seq, :seq] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(batch, seq, width)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, flash: bool, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention(flash, dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A small nanoGPT, with tied embeddings."""

    def __init__(self, flash: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([Block(flash, dropout) for _ in range(2)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class MLP(nn.Module):
    """Outputs alone: its loss is said elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Convolutions(nn.Module):
    """Batch norm, whose statistics a step changes, and dropout; what it returns has names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(12, 10)

    def forward(self, image: Tensor, label: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.bn1(self.conv1(image)))
        x = F.relu(self.bn2(self.conv2(x))).mean((2, 3))
        logits = self.head(self.drop(x))
        return {"logits": logits, "loss": F.cross_entropy(logits, label)}


class Branch(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if h.sum() > 0:
            h = h * 2
        return self.down(h)


class Sizes(MLP):
    """What it computes depends on the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * (2 if len(x) == 4 else 7))


class Fails(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {each: torch.randint(0, VOCAB, (2, 10), generator=generator) for each in ("tokens", "targets")}


class Moved(nn.Module):
    """What is read first is returned last; and a buffer that is saved waits for what a file makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("bias", torch.zeros(6))

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        moved = x + torch.tanh(self.up(x)) + self.bias
        h = torch.cat([h, torch.ones_like(h) * 0.5], dim=-1)
        return torch.tanh(self.down(h[:, :6] * h[:, 6:])) * h[:, :6], moved


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = Moved(), Moved(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, moved = self.two(*self.one(x, x * 2))
        return self.head(h * moved)


def rows() -> dict[str, Tensor]:
    return {"x": torch.ones(4, 6), "label": torch.arange(4) % 3}


def row() -> dict[str, Tensor]:
    return {"x": torch.ones(1, 6), "label": torch.zeros(1, dtype=torch.int64)}


def numbers() -> dict[str, int]:
    return {"x": 3}


def images() -> dict[str, Tensor]:
    return {"image": torch.randn(4, 3, 8, 8), "label": torch.arange(4)}


def plain() -> nn.Module:
    return GPT()


def masked() -> nn.Module:
    return GPT(flash=False, dropout=0.1)


def dropped() -> nn.Module:
    return GPT(dropout=0.1)


def fails_to_build() -> nn.Module:
    raise ValueError("no weights here")
