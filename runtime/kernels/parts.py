"""Parts of tensors: the slices of a microbatch's sequence, what is stored flat, and what results keep of memory."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from partita.runtime.kernels.registry import kernel


@kernel
def scatter_slices(total: Tensor, term: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Add to a sum; returns `size` positions of the sum, from `start` of dimension `dim`, in the term's dtype."""
    total.add_(term)
    return total.narrow(dim, start, size).to(term.dtype)


@kernel
def place_slice(part: Tensor, dim: int, start: int, size: int) -> Tensor:
    """A part at `start` of dimension `dim`, which becomes `size`, with zeros around it."""
    shape = list(part.shape)
    shape[dim] = size
    whole = part.new_zeros(shape)
    whole.narrow(dim, start, part.shape[dim]).copy_(part)
    return whole


@kernel
def flatten(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor stored flat: the elements of x in order, and zeros at the end, in a tensor of this shape."""
    flat = x.new_empty(prod(shape))
    flat[: x.numel()].view(x.shape).copy_(x)
    flat[x.numel() :].zero_()
    return flat.view(shape)


def owned(part: Tensor, whole: Tensor) -> Tensor:
    """A part of a tensor that nothing else reads, in memory of its own: the rest is not kept."""
    return part if part.numel() == whole.numel() else part.clone(memory_format=torch.contiguous_format)
