"""A tensor stored flat: its elements in order, with zeros at the end."""

from __future__ import annotations

from math import prod

from torch import Tensor

from partita.runtime.kernels.registry import kernel


@kernel
def flatten(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The elements of x in order, and zeros, in a tensor of this shape."""
    flat = x.new_empty(prod(shape))
    flat[: x.numel()].view(x.shape).copy_(x)
    flat[x.numel() :].zero_()
    return flat.view(shape)
