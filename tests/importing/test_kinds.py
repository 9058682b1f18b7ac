"""What modules of strangers were refused for, each in few lines: the proof says that the file computes it."""

from __future__ import annotations

import re

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


class Empty(nn.Module):
    """Queries of places that are padded see no key: their masked scores are one number."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(EMBED, EMBED) for _ in range(3))

    def forward(self, x: Tensor, kept: Tensor, wanted: Tensor) -> Tensor:
        scores = (self.q(x) @ self.k(x).mT * EMBED**-0.5).masked_fill(~kept[:, :, None], -1e9)
        return F.mse_loss(torch.softmax(scores, -1) @ self.v(x), wanted)


class Pairs(nn.Module):
    """A pair representation: triangles of it, counts of what all rows have, and the norm of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(EMBED, 5), nn.Linear(EMBED, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor, kept: Tensor, wanted: Tensor) -> Tensor:
        rows = kept[:, None].expand(x.shape[:3]).to(x.dtype)  # as many times as there are rows
        count = torch.einsum("bsi,bsj->bij", rows, rows)
        pair = torch.einsum("bsic,bsjc->bijc", self.left(x), self.right(x)) / (count[..., None] + 0.5)
        pair = pair + self.norm(torch.zeros_like(pair))
        out = torch.einsum("bikc,bjkc->bijc", pair, pair) + torch.einsum("bkic,bkjc->bijc", pair, pair.sin())
        return F.mse_loss(out, wanted)


class Angles(nn.Module):
    """Cosines and sines of positions, stacked in one table; and what stacks three."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(16.0), 10_000 ** (-torch.arange(4.0) / 4))
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin()), -1), persistent=False)
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        one, two = self.project(x).view(*x.shape[:2], 4, 2).unbind(-1)
        cosines, sines = self.table[: x.shape[1]].unbind(-1)
        turned = torch.stack((one * cosines - two * sines, two * cosines + one * sines), -1).flatten(2)
        three = torch.stack((one, two, one * two), -1)
        return F.mse_loss(turned, wanted) + three.view(*x.shape[:2], 12).square().mean()


class Nearest(nn.Module):
    """Each of a batch chooses another one; flags are written where ids say."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.gate = nn.Linear(EMBED, EMBED), nn.Linear(EMBED, 6)

    def forward(self, x: Tensor) -> Tensor:
        z, own = self.project(x), torch.eye(len(x), dtype=torch.bool)
        nearest = (z @ z.T).masked_fill(own, -2.0).argmax(1)
        scores = self.gate(x)
        closed = torch.ones_like(scores, dtype=torch.bool).scatter_(1, scores.topk(2, 1)[1], False)
        return (z - z[nearest]).square().mean() + scores.masked_fill(closed, 0.0).square().mean()


class Meeting(nn.Module):
    """All examples of one input meet all of another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(EMBED, 8), nn.Linear(7, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        blended = torch.lerp(self.one(x), self.one(x).tanh(), torch.sigmoid(x[:, :1]))
        return F.cross_entropy(blended @ self.other(y).T, torch.arange(len(x)))


class Noisy(nn.Module):
    """What is drawn in training alone: noise, and a sample of a distribution of which evaluation takes the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(EMBED), nn.Dropout(0.1)
        self.mean, self.spread, self.out = nn.Linear(EMBED, 5), nn.Linear(EMBED, 5), nn.Linear(5, EMBED)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        noisy = x + 0.1 * torch.randn_like(x) if self.training else x
        h = self.drop(torch.tanh(self.norm(noisy)))
        mean = self.mean(h)
        z = mean + torch.randn_like(mean) * self.spread(h).exp() if self.training else mean
        made = self.out(z)
        return F.mse_loss(made, x), made


class Frames(nn.Module):
    """A transcript of all frames, each of which counts; and a loop whose first step reads zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(EMBED, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        h, made = x.new_zeros(len(x), 6), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            made.append(self.out(h))
        log_p = torch.stack(made).log_softmax(-1)
        return F.ctc_loss(log_p, labels, torch.full((len(x),), len(log_p)), lengths)


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


def test_queries_without_keys_average_over_all():
    kept = torch.arange(9) < torch.tensor([[9], [6], [7]])
    text = imported(Empty(), x=torch.randn(3, 9, EMBED), kept=kept, wanted=torch.randn(3, 9, EMBED))
    assert "softmax(where(" in text or "attend(" not in text


def test_pairs_have_two_names_for_one_axis():
    kept = torch.arange(9) < torch.tensor([[9], [6]])
    text = imported(Pairs(), x=torch.randn(2, 4, 9, EMBED), kept=kept, wanted=torch.randn(2, 9, 9, 5))
    assert "layer_norm(zeros(" in text


def test_tables_of_angles_are_rotary_positions():
    text = imported(Angles(), x=torch.randn(3, 9, 8), wanted=torch.randn(3, 9, 8))
    assert "interleaved = true" in text


def test_one_chooses_another_of_its_kind():
    text = imported(Nearest(), x=torch.randn(5, EMBED))
    assert "arg_max(where(" in text


def test_inputs_have_one_batch():
    text = imported(Meeting(), x=torch.randn(5, EMBED), y=torch.randn(5, 7))
    assert "y: [batch, " in text
    assert "rename(" in text


def test_evaluation_draws_nothing_that_training_alone_draws():
    text = imported(Noisy(), x=torch.randn(5, EMBED))
    assert "where(training(), x + noise * 0.1, x)" in text
    assert re.search(r"where\(training\(\), (\w+) \+ .*, \1\)", text)


def test_each_frame_counts_and_the_loop_is_a_scan():
    lengths = torch.tensor([3, 2])
    text = imported(Frames(), x=torch.randn(2, 8, EMBED), labels=torch.randint(1, 5, (2, 3)), lengths=lengths)
    assert text.count("scan ") == 2
    assert "ends" not in text
