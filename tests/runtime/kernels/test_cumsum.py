"""Cumulative sums are accumulated in a dtype in which they stay exact, and of integers in their own."""

from __future__ import annotations

import pytest
import torch

from partita.runtime import kernels


@pytest.mark.parametrize("options", [{}, {"block": 64}, {"exclusive": True}])
@pytest.mark.parametrize("backward", [False, True])
def test_many_small_numbers_add_up_in_bf16(options: dict[str, int], backward: bool) -> None:
    x = torch.full((1024, 2), 1.0, dtype=torch.bfloat16)
    before = torch.zeros(16, 2) if "block" in options else None
    found = kernels.cumsum(x, before, dim=0, backward=backward, **options)
    assert found.dtype == torch.bfloat16
    last = options.get("block", 1024 - ("exclusive" in options))  # beyond 256 bf16 has no odd numbers
    assert float(found.amax()) == float(torch.tensor(last).bfloat16())


def test_blocks_in_bf16() -> None:
    x = torch.full((3, 1024), 1.0, dtype=torch.bfloat16)
    assert kernels.block_sums(x, dim=1, block=512).equal(torch.full((3, 2), 512.0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_keep_their_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, -1, 2, 5]], dtype=dtype)
    assert kernels.cumsum(x, dim=1).equal(torch.tensor([[3, 2, 4, 9]], dtype=dtype))
    assert kernels.cumsum(x, dim=1, backward=True).equal(torch.tensor([[9, 6, 7, 5]], dtype=dtype))
    assert kernels.block_sums(x, dim=1, block=2).equal(torch.tensor([[2, 7]], dtype=dtype))
