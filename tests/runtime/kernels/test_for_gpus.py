"""Kernels that GPUs compute otherwise, by fewer passes over memory, compute the same; here they run on a CPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch._decomp import decomposition_table

from partita.runtime.kernels import products, rows
from partita.runtime.kernels.positions import Places, rope

positions = import_module("partita.runtime.kernels.positions")  # there is a kernel of this name
GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("start", [0, 3, ((1, 2), (8, 2))], ids=["first", "later", "runs"])
def test_pairs_turn_as_complex_numbers(
    start: Places, inverse: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    scaling = ("llama3", 4.0, 8, 1.0, 4.0)
    x = drawn(2, 3, 4, 6, dtype=dtype)
    given = (x, start, 100.0, inverse, (0, 2, 1, 3), scaling, 12)
    expected = rope(*given)
    monkeypatch.setattr(positions, "by_complex", lambda x: True)
    found = rope(*given)
    assert found.dtype == dtype
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("over", [(-1,), (-2, -1)])
def test_norms_are_those_of_torch(over: tuple[int, ...], plus: bool, monkeypatch: pytest.MonkeyPatch):
    x, d, other = drawn(3, 4, 6), drawn(3, 4, 6), drawn(3, 4, 6) if plus else None
    scale = drawn(*x.shape[over[0] :])

    def all_of_it() -> tuple[torch.Tensor, ...]:
        y, rate = rows.normalize(x, over, 1e-5, False)
        return (
            y,
            rate,
            rows.normalize_gradient(d, y, rate, over, False, other),
            *rows.rms_norm_gradient(d, y, rate, scale, over, other),
        )

    expected = all_of_it()
    backward = torch.ops.aten._fused_rms_norm_backward
    monkeypatch.setattr(rows, "fused_rms", lambda x, over: True)
    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm_backward", decomposition_table[backward.default])
    found = all_of_it()
    monkeypatch.undo()  # what torch imports to compare reads the operation
    for one, each in zip(found, expected, strict=True):
        torch.testing.assert_close(one, each)


def test_a_total_may_be_wider_than_the_products_that_are_added():
    a, b = drawn(3, 4, dtype=torch.bfloat16), drawn(4, 5, dtype=torch.bfloat16)
    total = drawn(3, 5, dtype=torch.float32)
    expected = total + torch.mm(a, b)
    assert torch.equal(products.add_matmul(total, a, b), expected)
