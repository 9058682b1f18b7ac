"""One matrix for several projections: each has a weight of its own, wherever its rows lie in the matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partita

EMBED, HEADS = 24, 4


class Fused(nn.Module):
    """Queries, keys and values of one matrix: of each position `before`, so many `parts` of each."""

    def __init__(self, before: int, parts: tuple[int, ...], key: int) -> None:
        super().__init__()
        self.before, self.parts, self.key = before, parts, key
        self.fused = nn.Linear(EMBED, before * sum(parts) * key)
        self.out = nn.Linear(before * parts[0] * key, EMBED)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        every = self.fused(x).view(batch, seq, self.before, sum(self.parts), self.key).split(self.parts, dim=3)
        heads = (each.expand(-1, -1, -1, self.parts[0], -1) for each in every)
        q, k, v = (each.reshape(batch, seq, -1, self.key).transpose(1, 2) for each in heads)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, -1)
        return F.mse_loss(self.out(a), wanted)


class Gated(nn.Module):
    """Gates and values in alternate columns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(EMBED, 80), nn.Linear(40, EMBED)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return F.mse_loss(self.down_proj(torch.sigmoid(both[..., ::2]) * both[..., 1::2]), wanted)


class Partly(nn.Module):
    """The last third of a matrix is read by nothing, or all is read whole, or returned, beside its parts."""

    def __init__(self, parts: int, read: bool, returned: bool) -> None:
        super().__init__()
        self.fused, self.out, self.read, self.returned = (
            nn.Linear(EMBED, 20 * parts),
            nn.Linear(20, EMBED),
            read,
            returned,
        )

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        every = self.fused(x)
        some = torch.tanh(every[..., :20]) * every[..., 20:40]
        loss = F.mse_loss(self.out(some), wanted) + (every.square().mean() if self.read else 0)
        return (loss, every) if self.returned else loss


INPUTS = {"x": torch.randn(3, 10, EMBED), "wanted": torch.randn(3, 10, EMBED)}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (lambda: Fused(HEADS, (1, 1, 1), 6), 'fused.wq, fused.wk, fused.wv = "fused.weight" [heads * + key, features]'),
        (lambda: Fused(1, (HEADS, HEADS, HEADS), 6), '"fused.weight" [+ heads * key, features]'),
        (lambda: Fused(2, (3, 1, 1), 4), '"fused.weight" [groups * (heads * key + key + key), features]'),
        (Gated, 'gated.w_gate, gated.w_up = "gate_up_proj.weight" [hidden * + 1, features]'),
        (lambda: Partly(3, False, False), 'partly.fused = "fused.weight" [hidden, features]'),
        (lambda: Partly(2, True, False), 'partly.fused = "fused.weight" [hidden, features]'),
        (lambda: Partly(2, False, True), 'partly.fused = "fused.weight" [hidden, features]'),
    ],
    ids=["heads", "apart", "groups", "alternate", "a part unread", "read whole", "returned whole"],
)
def test_parts_have_weights_of_their_own(module: object, line: str):
    assert callable(module)
    text = str(partita.from_torch(module(), INPUTS))
    assert line in text.replace("\n      ", " ")
