"""What a program that goes through an axis part by part keeps in tensors that outlive the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.runtime.kernels.registry import kernel


@kernel
def keep(state: Tensor, part: Tensor, dim: int, start: int) -> Tensor:
    """Write a part into a state, at `start` of dimension `dim`; returns the state."""
    state.narrow(dim, start, part.shape[dim]).copy_(part)
    return state


@kernel
def carry(states: Sequence[Tensor], new: Sequence[Tensor], values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Write new values into states; returns `values`."""
    for state, value in zip(states, new, strict=True):
        state.copy_(value)
    return values


@kernel
def go_on(state: Tensor, part: Tensor, dim: int, first: float | None = None) -> Tensor:
    """A part after the positions before it, which the state has, or which are all a number before the `first` part; the
    state becomes the last ones of both.
    """
    if first is not None:
        state.fill_(first)
    joined = torch.cat((state, part), dim)
    by = state.shape[dim]
    state.copy_(joined.narrow(dim, part.shape[dim], by))
    return joined
