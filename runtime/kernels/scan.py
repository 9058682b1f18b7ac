"""Loops along an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.registry import kernel


@kernel
def scan(
    body: Callable[..., tuple[Tensor, ...]],
    states: Sequence[Tensor],
    sliced: Sequence[Tensor],
    shared: Sequence[Tensor],
    count: int,
    stacked: int,
    backward: bool,
) -> tuple[Tensor, ...]:
    """Apply a body at `count` positions, or with `backward` from the last, to the states, an entry of each `sliced`
    tensor's first dimension, and the `shared` tensors. It returns the next states, `stacked` tensors, and tensors to be
    added up. Returns the last states, the stacked tensors, and the sums.
    """
    state_count = len(states)
    rows = [each.unbind() for each in sliced]
    together: list[Tensor] = []
    sums: list[Tensor] = []
    for t in range(count - 1, -1, -1) if backward else range(count):
        outputs = body(*states, *[each[t] for each in rows], *shared)
        states = outputs[:state_count]
        if not together:
            together = [x.new_empty((count, *x.shape)) for x in outputs[state_count : state_count + stacked]]
        for whole, x in zip(together, outputs[state_count:], strict=False):
            whole[t] = x
        terms = outputs[state_count + stacked :]
        sums = [total + x for total, x in zip(sums, terms, strict=True)] if sums else [widened(x) for x in terms]
    return (*states, *together, *sums)
