"""What a slice of a microbatch's sequence adds to the tensors that it shares with the others, and takes from them."""

from __future__ import annotations

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
