"""Cumulative sums along one dimension."""

from __future__ import annotations

from torch import Tensor

from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.registry import kernel


@kernel
def cumsum(
    x: Tensor,
    before: Tensor | None = None,
    *,
    dim: int,
    block: int = 0,
    backward: bool = False,
    exclusive: bool = False,
) -> Tensor:
    """The sums of the elements up to each position along `dim`, accumulated in f32 at least; `backward`: from each on.

    `exclusive`: of the elements before each position. `before` has, for each block of `block` positions, what is added
    to its sums.
    """
    along = dim + bool(block)
    sums = _blocks(x, dim, block) if block else x
    # Each replaces the one before: `CumulativeSum.workspace` counts two.
    sums = widened(sums.flip(along) if backward else sums)
    sums = sums.cumsum(along)
    if backward:
        sums = sums.flip(along)
    if exclusive:
        sums = sums.roll(-1 if backward else 1, along)
        sums.select(along, -1 if backward else 0).zero_()
    if before is not None:
        sums = sums + before.unsqueeze(along)
    if block:
        sums = sums.flatten(dim, along)
    return sums.to(x.dtype)


@kernel
def block_sums(x: Tensor, *, dim: int, block: int) -> Tensor:
    """The sum of each block of `block` positions along `dim`, in f32 at least."""
    wide = widened(x)
    return _blocks(wide, dim, block).sum(dim + 1, dtype=wide.dtype)


def _blocks(x: Tensor, dim: int, block: int) -> Tensor:
    """The dimension as blocks of so many positions: blocks first, then positions."""
    return x.reshape(*x.shape[:dim], -1, block, *x.shape[dim + 1 :])
