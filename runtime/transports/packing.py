"""Buckets: several tensors, of any strides and dtypes, packed as rows of bytes for one operation, and unpacked.

Moving a tensor does not depend on its dtype, so buckets are bytes. Each piece is aligned for every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from attrs import evolve, frozen

from partita.compiler.ops.buffers import ALIGNMENT
from partita.runtime.transports.transport import Tensors


@frozen
class Piece:
    """Where one tensor's part is in each row: its first byte, dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The piece in all rows [rows, bytes], as a view [rows, *shape]."""
        stop = self.start + prod(self.shape) * self.dtype.itemsize
        return rows[:, self.start : stop].view(self.dtype).view(len(rows), *self.shape)


@frozen(eq=False)
class Bucket:
    """Rows [parts, bytes]: row j has the j-th parts of all tensors, each at its place in a row. `copied`: they are not
    the memory of the tensors themselves.
    """

    rows: torch.Tensor
    pieces: tuple[Piece, ...]
    copied: bool

    def filled(self, multiple: int) -> Bucket:
        """With rows of a multiple of so many bytes; the pieces stay where they are."""
        over = -self.rows.shape[1] % multiple
        return evolve(self, rows=torch.nn.functional.pad(self.rows, (0, over)), copied=True) if over else self

    def free(self) -> None:
        """Give the memory of a copy back."""
        if self.copied:
            release_storage(self.rows)


def pack(tensors: Tensors, dims: Sequence[int], parts: int) -> Bucket:
    """The parts of tensors along `dims`. A single tensor whose parts are contiguous already is not copied."""
    cut = [_cut(tensor, dim, parts) for tensor, dim in zip(tensors, dims, strict=True)]
    pieces = []
    width = 0
    for each in cut:
        pieces.append(Piece(width, each.dtype, tuple(each.shape[1:])))
        width += each[0].nbytes + -each[0].nbytes % ALIGNMENT
    if len(cut) == 1:
        rows = as_bytes(cut[0]).view(parts, cut[0][0].nbytes)
        return Bucket(rows, tuple(pieces), not cut[0].is_contiguous())
    rows = torch.empty(parts, width, dtype=torch.uint8, device=cut[0].device)
    for piece, each in zip(pieces, cut, strict=True):
        piece.of(rows).copy_(each)
    return Bucket(rows, tuple(pieces), True)


def unpack(rows: torch.Tensor, pieces: Sequence[Piece], dims: Sequence[int]) -> Tensors:
    """Contiguous tensors: each piece of the rows, concatenated along its dimension. They may be views of `rows`."""
    tensors = []
    for piece, dim in zip(pieces, dims, strict=True):
        parts = piece.of(rows)
        tensors.append(parts[0] if len(rows) == 1 else parts.movedim(0, dim).flatten(dim, dim + 1).contiguous())
    return tuple(tensors)


def release_storage(tensor: torch.Tensor) -> None:
    """Give a tensor's memory back, whoever refers to it: a thread of Gloo's does for a moment, after what it did is
    done.
    """
    tensor.untyped_storage().resize_(0)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes in order, one-dimensional; a view if the tensor is contiguous."""
    # Not `view(-1)`: it keeps the stride that a contiguous tensor may have along an axis of size 1.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _cut(tensor: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """The parts along a dimension: [parts, …]."""
    if parts == 1:
        return tensor.unsqueeze(0)
    cut: torch.Tensor = tensor.unflatten(dim, (parts, -1))  # type: ignore[no-untyped-call]
    return cut.movedim(dim, 0)
