"""Random numbers that a module draws are, in a proof, of the distributions that torch draws of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.importing.draws import Draws

SHAPE = (4, 100_000)
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(SHAPE),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(*SHAPE),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(9, SHAPE),
    "randint from": lambda x: torch.randint(-3, 9, SHAPE),
    "randint_like": lambda x: torch.randint_like(x, 2, 6),
    "normal_": lambda x: torch.empty_like(x).normal_(2, 3),
    "normal of numbers": lambda x: torch.normal(2.0, 3.0, SHAPE),
    "normal of tensors": lambda x: torch.normal(torch.full(SHAPE, 2.0), torch.full((1, SHAPE[1]), 3.0)),
    "normal of a deviation": lambda x: torch.normal(2.0, torch.full(SHAPE, 3.0)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-2, 5),
    "uniform_ as usual": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(0.5),
    "bernoulli": lambda x: torch.bernoulli(torch.full(SHAPE, 0.3)),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(torch.full(SHAPE, 0.3)),
    "gumbel_softmax": lambda x: F.gumbel_softmax(torch.zeros(SHAPE), dim=0),
    "doubles": lambda x: torch.rand(SHAPE, dtype=torch.float64),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_in_a_proof_is_distributed_as_what_torch_draws(name: str):
    torch.manual_seed(0)
    expected = DRAWS[name](torch.zeros(SHAPE))
    with Draws(3) as draws:
        found = DRAWS[name](torch.zeros(SHAPE))
    with Draws(3):
        assert torch.equal(DRAWS[name](torch.zeros(SHAPE)), found), "a seed has its numbers"
    assert (found.dtype, found.shape, len(draws.samples)) == (expected.dtype, expected.shape, 1)
    found, expected = found.double(), expected.double()
    assert float((found.mean() - expected.mean()).abs()) < 0.02 * float(expected.std())
    assert float(found.std() / expected.std()) == pytest.approx(1, abs=0.02)
    for share in (0.01, 0.3, 0.9):
        one, other = (each.flatten()[:100_000].sort().values[int(share * 100_000)] for each in (found, expected))
        assert float((one - other).abs()) < 0.05 * float(expected.std())


def test_nothing_is_dropped():
    with Draws() as draws:
        ones = F.dropout(torch.ones(50), 0.25), F.dropout1d(torch.ones(50, 8, 3)), torch.ones(9).bernoulli_(0.8) / 0.8
    assert all(torch.allclose(each, torch.ones(each.shape)) for each in ones)
    assert draws.samples == []
