"""The recurrence h[t+1] = a[t]·h[t] − x[t]ᵀ·(y[t]·h[t]) + b[t]: batched products, one position after the other.

States are kept in the dtype of accumulation; products are of the operands' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.registry import kernel

Step = tuple[Tensor, Tensor, Tensor, Tensor]  # a: [n, keys or 1, 1]; x and y: [n, rows, keys]; b: [n, keys, more]


@kernel
def delta_scan(
    a: Tensor, x: Tensor, y: Tensor, b: Tensor, before: Tensor | None = None, *, batch: int, backward: bool = False
) -> Tensor:
    """The state before each position, or with `backward` after it.

    a: [positions, batch axes, maybe keys]; x and y: [positions, batch axes, rows, keys]; b: [positions, batch axes,
    keys, more]. `before` is like b, with the state before each block of positions, of equal lengths; without it the
    state is zero before the first.
    """
    blocks = 1 if before is None else len(before)
    steps = list(_steps((a, x, y, b), batch, blocks))
    state = torch.zeros_like(widened(steps[0][3])) if before is None else widened(_flat(before, batch, blocks)[0])
    states = []
    for t in range(len(steps) - 1, -1, -1) if backward else range(len(steps)):
        states.append(state.to(b.dtype))
        if len(states) < len(steps):
            state = _next(steps[t], state)
    if backward:
        states.reverse()
    # [positions of a block, blocks, …] → [positions, …]
    return torch.stack(states).view(len(steps), blocks, -1).transpose(0, 1).reshape(b.shape)


@kernel
def delta_scan_blocks(
    a: Tensor,
    x: Tensor,
    y: Tensor,
    b: Tensor,
    *,
    block: int,
    product: tuple[int, ...],
    last: tuple[int, ...],
    batch: int,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """For each block of positions the product of its steps, [blocks, batch axes, keys, keys], and the state after it if
    that is zero before it; their dimensions in the orders `product` and `last`.
    """
    blocks, keys = len(b) // block, b.shape[batch + 1]
    steps = list(_steps((a, x, y, b), batch, blocks))
    state = torch.zeros_like(widened(steps[0][3]))
    matrix = torch.eye(keys, dtype=state.dtype, device=state.device).expand(len(state), keys, keys)
    for step in reversed(steps) if backward else steps:
        state, matrix = _next(step, state), _next((*step[:3], matrix.new_zeros(())), matrix)
    shape = b.shape[1 : batch + 1]
    return (
        matrix.reshape(blocks, *shape, keys, keys).permute(product),
        state.reshape(blocks, *b.shape[1:]).permute(last),
    )


def _next(step: Step, state: Tensor) -> Tensor:
    a, x, y, b = step
    read = torch.bmm(y, state.to(y.dtype))
    kept = a * state + b
    if x.dtype == state.dtype:
        return torch.baddbmm(kept, x.mT, read, alpha=-1)
    return kept - torch.bmm(x.mT, read)


def _steps(operands: Step, batch: int, blocks: int) -> Iterator[Step]:
    """The operands at each position of all blocks."""
    a, x, y, b = operands
    gates = widened(a)
    gates = gates.unsqueeze(-1) if gates.dim() == batch + 2 else gates[..., None, None]
    yield from zip(*(_flat(each, batch, blocks).unbind() for each in (gates, x, y, b)), strict=True)


def _flat(x: Tensor, batch: int, blocks: int) -> Tensor:
    """[positions of a block, blocks · batch, keys or rows, the rest]."""
    length = len(x) // blocks
    matrices = x.reshape(blocks, length, -1, x.shape[batch + 1], x.shape[batch + 2 :].numel())
    return matrices.transpose(0, 1).reshape(length, -1, *matrices.shape[3:])
