"""What values, weights and sizes of imported files are called and follow: as a person would have written it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partita


class Tower(nn.Module):
    def __init__(self, given: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(given, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Towers(nn.Module):
    """The first call is read behind the second."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.candidate = Tower(5), Tower(7)

    def forward(self, query: Tensor, candidate: Tensor) -> Tensor:
        q, c = self.query(query), self.candidate(candidate)
        return F.cross_entropy(2.0 * q @ c.T, torch.arange(len(q)))


def test_calls_of_a_block_stand_in_their_order():
    text = str(partita.from_torch(Towers(), {"query": torch.randn(3, 5), "candidate": torch.randn(3, 7)}))
    calls = [line for line in text.splitlines() if re.search(r"\btower\(", line) and not line.startswith("block")]
    assert len(calls) == 2
    assert "candidate" in calls[1]
    assert "other_batch = batch" in text


class Attention(nn.Module):
    """Elements of queries are shuffled, and those of keys alike or not."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.alike = alike
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))

    def shuffled(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:-1], count, -1).transpose(-1, -2).reshape(x.shape)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        q = self.shuffled(self.q(x), 3)
        k = self.shuffled(self.k(x), 3) if self.alike else self.k(x)
        v = self.v(x)
        a = F.scaled_dot_product_attention(q, k, v)
        return F.mse_loss(self.out(a), wanted)


def test_what_is_shuffled_alike_is_read_as_it_was():
    inputs = {"x": torch.randn(2, 5, 12), "wanted": torch.randn(2, 5, 12)}
    alike, apart = (str(partita.from_torch(Attention(each), inputs)) for each in (True, False))
    assert "attend(q, k, v, " in alike
    assert "attend(merge(q, " in apart
    for text in (alike, apart):  # weights of a short name give way to what they make
        assert "param wq" in text


class Cell(nn.Module):
    """A formula in a method, a root that was rounded, and gates of a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell, self.out = nn.Embedding(11, 6), nn.GRUCell(6, 8), nn.Linear(8, 11)
        self.register_buffer("root", torch.tensor(6**0.5), persistent=False)

    def faded(self, x: Tensor) -> Tensor:
        distance = torch.abs(torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None, :])
        weight = torch.where(distance < 3, distance, 3 + torch.log(distance.clamp(min=3) / 3.0).long())
        return torch.einsum("bsd,ts->btd", x, torch.exp(-weight.float()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.faded(self.table(tokens) * self.root)
        h = x.new_zeros(len(x), 8)
        states = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            states.append(h)
        logits = self.out(torch.stack(states, 1))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_formulas_roots_and_gates_have_names():
    ids = torch.randint(11, (2, 14))
    text = str(partita.from_torch(Cell(), {"tokens": ids, "targets": ids}))
    assert "let distance = abs(" in text
    assert "sqrt(size(embed))" in text
    assert "let r = sigmoid(" in text
    assert "w_hr" in text


class Mixing(nn.Module):
    """The first of several makes the weights of all: of a table alone, or also of what it reads."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.table = nn.Embedding(16, 8) if first else None

    def forward(self, x: Tensor, weights: Tensor | None, reads: bool) -> tuple[Tensor, Tensor]:
        if weights is None:
            weights = torch.tanh(self.table(torch.arange(x.shape[1]).remainder(5)))
            weights = weights * x.mean(1, keepdim=True) if reads else weights
        return x + self.out(x * weights), weights


class Mixings(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layers, self.reads = nn.ModuleList(Mixing(not i) for i in range(4)), reads

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        weights = None
        for layer in self.layers:
            x, weights = layer(x, weights, self.reads)
        return F.mse_loss(x, wanted)


def test_what_the_first_layer_makes_for_all_is_made_before_them():
    inputs = {"x": torch.randn(3, 10, 8), "wanted": torch.randn(3, 10, 8)}
    shared, own = (str(partita.from_torch(Mixings(reads), inputs)) for reads in (False, True))
    assert "const layers = 4" in shared
    assert shared.index("= tanh(") < shared.index("repeat layers")
    assert "const layers = 3" in own  # the first differs: what it makes reads what it is given


class Deeper(nn.Module):
    """A layer that drops whole rows, the first none: by zeros and ones, or by numbers that are below a share, or that
    are rounded down.
    """

    def __init__(self, rate: float, way: str = "ones") -> None:
        super().__init__()
        self.up, self.down, self.rate, self.way = nn.Linear(8, 24), nn.Linear(24, 8), rate, way

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(x)))
        kept = 1 - self.rate
        if not self.rate or not self.training:
            return x + h
        if self.way == "ones":
            return x + h * h.new_empty(len(x), 1).bernoulli_(kept) / kept
        if self.way == "below":
            return x + torch.div(h, kept) * (torch.rand(len(x), 1) < kept)
        if self.way == "above":
            return x + h * (torch.rand(len(x), 1) >= self.rate).float() / kept
        rows = kept + torch.rand(len(x), 1)
        rows.floor_()
        return x + h * rows.div_(kept)


class Deep(nn.Module):
    def __init__(self, rates: list[float], way: str = "ones") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Deeper(rate, way) for rate in rates)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, wanted)


@pytest.mark.parametrize(
    ("rates", "way", "written"),
    [
        (torch.linspace(0, 0.1, 4).tolist(), "ones", "drop * layer / (layers - 1)"),
        ([0.1, 0.2, 0.3], "below", "drop * (layer + 1) / layers"),
        ([0.1, 0.15, 0.2], "rounded", "drop + drop_2 * layer"),
        ([0.25, 0.5, 0.75], "above", "drop * (layer + 1) / layers"),
    ],
)
def test_numbers_of_layers_grow_with_them(rates: list[float], way: str, written: str):
    text = str(partita.from_torch(Deep(rates, way), {"x": torch.randn(3, 8), "wanted": torch.randn(3, 8)}))
    assert f"dropout(zeros([batch]) + 1, {written})" in text
    assert "repeat layers as layer {" in text


def test_numbers_that_do_not_grow_evenly_stay():
    module = Deep([0.1, 0.3, 0.35])
    text = str(partita.from_torch(module, {"x": torch.randn(3, 8), "wanted": torch.randn(3, 8)}))
    assert text.count("dropout(") == 3
