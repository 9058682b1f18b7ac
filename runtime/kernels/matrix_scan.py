"""The recurrence h[t+1] = m[t]·h[t] + b[t] with matrices m[t]: one batched product for each position."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.runtime.kernels.registry import kernel


@kernel
def matrix_scan(m: Tensor, b: Tensor, before: Tensor | None = None, *, batch: int, backward: bool = False) -> Tensor:
    """The state before each position, or with `backward` after it.

    m: [positions, batch axes, rows, columns]; b: [positions, batch axes, rows, more]; `before` is like b, with the
    state before each block of positions, of equal lengths; without it the state is zero before the first.
    """
    count = len(b)
    blocks = 1 if before is None else len(before)
    x, y = _matrices(m, batch, blocks), _matrices(b, batch, blocks)
    states = torch.empty_like(y)
    first = states[-1 if backward else 0]
    if before is None:
        first.zero_()
    else:
        first.copy_(_matrices(before, batch, blocks)[0])
    length = count // blocks
    steps = range(length - 1, 0, -1) if backward else range(length - 1)
    for t in steps:
        torch.baddbmm(y[t], x[t], states[t], out=states[t - 1 if backward else t + 1])
    return states.view(length, blocks, -1, *states.shape[2:]).transpose(0, 1).reshape(b.shape)


@kernel
def matrix_scan_blocks(
    m: Tensor,
    b: Tensor,
    block: int,
    matrix: tuple[int, ...],
    vector: tuple[int, ...],
    *,
    batch: int,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """For each block of positions the product of m, and the state after it if that is zero before it; their dimensions
    in the given orders.
    """
    blocks = len(b) // block
    x, y = _matrices(m, batch, blocks), _matrices(b, batch, blocks)
    steps = range(block - 1, -1, -1) if backward else range(block)
    product, last = x[steps[0]], y[steps[0]]
    for t in steps[1:]:
        product, last = torch.bmm(x[t], product), torch.baddbmm(y[t], x[t], last)
    return (
        product.reshape(blocks, *m.shape[1:]).permute(matrix),
        last.reshape(blocks, *b.shape[1:]).permute(vector),
    )


def _matrices(x: Tensor, batch: int, blocks: int) -> Tensor:
    """[positions of a block, blocks · batch, rows, the rest]."""
    rows = x.shape[batch + 1]
    divided = x.reshape(blocks, len(x) // blocks, -1, rows, x.shape[batch + 2 :].numel())
    return divided.transpose(0, 1).reshape(len(x) // blocks, -1, *divided.shape[3:])
