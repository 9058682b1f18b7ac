"""Linear recurrences in one loop, in chunks and in chunks of chunks: all equal one position after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from partita.runtime.kernels.linear_scan import linear_scan, linear_scan_blocks, linear_scan_gradient


def by_hand(a: Tensor, b: Tensor, start: Tensor, backward: bool) -> Tensor:
    """Along the first dimension."""
    states, state = [], start
    for t in reversed(range(len(b))) if backward else range(len(b)):
        state = a[t] * state + b[t]
        states.append(state)
    return torch.stack(states[::-1] if backward else states)


# One row of a few positions, and of many; many rows; numbers of positions that no chunk divides.
SHAPES = [(1, 3), (127, 1), (128, 1), (5000, 1), (300, 3), (1031, 4), (40, 5000), (2048, 64)]


@pytest.mark.few(2)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("count", "rows"), SHAPES)
def test_it_is_one_position_after_the_other(count: int, rows: int, backward: bool):
    generator = torch.Generator().manual_seed(count)
    a, b, d = (torch.randn((count, rows), generator=generator, dtype=torch.float64) for _ in range(3))
    a = a.tanh()
    a[count // 2] = 0
    a.requires_grad_(), b.requires_grad_()
    start = torch.zeros(rows, dtype=torch.float64)
    expected = by_hand(a, b, start, backward)
    expected.backward(d)
    for dim in (0, 1):  # the axis first in memory, and last
        x, y, z, out = (each.detach().movedim(0, dim).contiguous() for each in (a, b, d, expected))
        found = linear_scan(x, y, dim=dim, backward=backward)
        torch.testing.assert_close(found, out, rtol=1e-9, atol=1e-9)
        to_a, to_b = linear_scan_gradient(x, found, z, dim=dim, backward=backward, summed=(), order=(0, 1))
        torch.testing.assert_close(to_a.movedim(dim, 0), a.grad, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(to_b.movedim(dim, 0), b.grad, rtol=1e-9, atol=1e-9)
        options = {"product": (0, 1), "order": (0, 1), "backward": backward}
        product, last = linear_scan_blocks(x, y, dim=dim, block=count, **options)
        torch.testing.assert_close(product.movedim(dim, 0)[0], a.detach().prod(0), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            last.movedim(dim, 0)[0], expected.detach()[0 if backward else -1], rtol=1e-9, atol=1e-9
        )


def test_products_beyond_the_range_of_floats_leave_zero_states_zero():
    a, b = torch.full((1024, 1), 100.0), torch.zeros((1024, 1))
    b[-1] = 1.0
    assert torch.equal(linear_scan(a, b, dim=0), b)


def test_bf16_keeps_its_state_in_f32():
    """A sum of a thousand small numbers, which bf16 alone would stop adding up at 2."""
    x = torch.full((1024, 2), 2.0**-8, dtype=torch.bfloat16)
    h = linear_scan(torch.ones_like(x), x, dim=0)
    assert h.dtype == torch.bfloat16
    assert float(h[-1, 0]) == 4.0
