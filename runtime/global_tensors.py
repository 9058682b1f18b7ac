"""Ranks' parts of global tensors: views of their regions, and the whole of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from partita.compiler.layout import Layout, is_split, local_type
from partita.compiler.mesh import Mesh
from partita.dsl.types import Type
from partita.runtime.regions import Piece, pieces_of, shape_of, whole_region
from partita.runtime.transports.lines import same_bits


def piece_view(part: torch.Tensor, layout: Layout, piece: Piece) -> torch.Tensor:
    """A view of a rank's part of a tensor: a piece of it, in the shape of its region."""
    if layout.padded:
        return part[whole_region(shape_of(piece.region))]
    if layout.flat is None:
        return part
    return part.view(-1)[piece.start : piece.stop].view(shape_of(piece.region))


def assemble(name: str, type: Type, layout: Layout, mesh: Mesh, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Assemble a global tensor from `parts`, the ranks' shards; together they must cover it.

    Raises AssertionError, naming the tensor and the ranks, if two hold the same region but differ in any bit.
    """
    holders: dict[tuple[int, ...], int] = {}
    whole = next(iter(parts.values())).new_empty(type.shape)
    covered = 0
    for rank, part in parts.items():
        shape = local_type(type, layout, mesh.sizes).shape
        assert tuple(part.shape) == shape, f"rank {rank} holds {tuple(part.shape)} of {name}, not {shape}"
        coordinates = mesh.coordinates(rank)
        holder = holders.setdefault(tuple(coordinates[over] for over, state in layout.states if is_split(state)), rank)
        if holder == rank:
            for piece in pieces_of(type, layout, mesh.sizes, coordinates):
                whole[piece.region] = piece_view(part, layout, piece)
                covered += prod(shape_of(piece.region))
        elif not same_bits(parts[holder], part):
            raise AssertionError(f"copies of {name} on ranks {holder} and {rank} differ")
    assert covered == whole.numel(), f"ranks {', '.join(map(str, parts))} do not hold all of {name}"
    return whole
