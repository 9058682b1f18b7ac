"""What modules of strangers were refused for, each in few lines: the proof says that the file computes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partita
from partita.importing.sizes import Sized, of_sizes

EMBED = 12


class Translator(nn.Module):
    """A decoder that begins with the states and the cells of the encoder, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.LSTM(EMBED, 10, 2, batch_first=True) for _ in range(2))
        self.out = nn.Linear(10, EMBED)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        _, states = self.encoder(x)
        return F.mse_loss(self.out(self.decoder(y, states)[0]), y)


class Masks(nn.Module):
    """What no query may see is forbidden first, or last."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(EMBED, EMBED) for _ in range(3))

    def forward(self, x: Tensor, kept: Tensor, wanted: Tensor) -> Tensor:
        q, k, v, seq = self.q(x), self.k(x), self.v(x), x.shape[1]
        ahead = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        scores, lost = q @ k.mT * EMBED**-0.5, ~kept[:, None, :]
        first = scores.masked_fill(lost, -1e30).masked_fill(ahead, -1e30)
        last = scores.masked_fill(ahead, -1e30).masked_fill(lost, -1e30)
        a = torch.softmax(first, -1) @ v - 2 * (torch.softmax(last, -1) @ x)
        return ((a - wanted) * kept[..., None]).square().mean()


class Numbers(nn.Module):
    """A number one less than a size, one kernel for all planes, a table, lengths of vectors of other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(EMBED, EMBED)
        self.register_buffer("blur", torch.tensor([1.0, 2.0, 1.0]) / 4)

    def forward(self, x: Tensor, others: Tensor, rates: Tensor) -> Tensor:
        x = self.project(x)
        x = x - x.mean(0)
        spread = (x.mT @ x).square().mean() / (x.shape[0] - 1)
        smooth = F.conv1d(others.mT, self.blur[None, None].repeat(EMBED, 1, 1), padding=1, groups=EMBED).mT
        near = F.cosine_similarity(x, smooth.transpose(0, 1), dim=-1)
        weights = rates.exp()
        return spread + (near.mean() * torch.linspace(-1.0, 1.0, EMBED) * x).mean() + (weights * near.mT).sum(1).mean()


def imported(module: nn.Module, **inputs: Tensor) -> str:
    return str(partita.from_torch(module, inputs))


def test_states_and_cells_are_handed_on():
    text = imported(Translator(), x=torch.randn(3, 9, EMBED), y=torch.randn(3, 7, EMBED))
    assert "return h, c" in text
    assert "let output, cells = " in text or "let states, cells = " in text


def test_masks_are_kept_in_any_order():
    kept = torch.arange(9) < torch.tensor([[9], [6], [7]])
    text = imported(Masks(), x=torch.randn(3, 9, EMBED), kept=kept, wanted=torch.randn(3, 9, EMBED))
    assert text.count("attend(") == 2


def test_numbers_follow_sizes():
    text = imported(Numbers(), x=torch.randn(5, EMBED), others=torch.randn(5, 6, EMBED), rates=torch.randn(5, 6))
    assert "(size(batch) - 1)" in text
    assert "dot(exp(rates), near, over = frames)" in text


def test_the_shortest_formula_is_meant():
    """One less than the batch, and not so many times the root of the batch times the width, which grows alike."""
    batch, width = ("x", 0), ("y", 3)
    found = of_sizes(2, 3, {batch: 3, width: 16}, {batch: 4, width: 27})
    assert isinstance(found, Sized)
    assert (found.dims, found.coefficient, found.offset) == ((batch,), 1.0, -1)
