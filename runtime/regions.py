"""Which part of a tensor a rank holds, and global tensors assembled from the ranks' shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from partita.compiler.layout import Layout
from partita.compiler.mesh import Mesh
from partita.dsl.types import Type
from partita.runtime.transports.lines import same_bits

Region = tuple[slice, ...]


def region_of(type: Type, layout: Layout, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> Region:
    """The part of a global tensor of `type` at `coordinates` of a mesh of `sizes`: a slice for each axis.

    If several mesh axes shard one axis, the first in mesh order is the outermost. Mesh axes along which the tensor is
    replicated or partial do not matter.
    """
    region = []
    for axis in type.axes:
        parts, index = 1, 0
        for name in layout.over(axis.name):
            parts, index = parts * sizes[name], index * sizes[name] + coordinates[name]
        size, rest = divmod(axis.size, parts)
        assert rest == 0, f"{type} does not divide as {layout}"
        region.append(slice(index * size, (index + 1) * size))
    return tuple(region)


def shape_of(region: Region) -> tuple[int, ...]:
    """The sizes of a region."""
    return tuple(each.stop - each.start for each in region)


def assemble(name: str, type: Type, layout: Layout, mesh: Mesh, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Assemble a global tensor from `parts`, the ranks' shards; together they must cover it.

    Raises AssertionError, naming the tensor and the ranks, if two hold the same region but differ in any bit.
    """
    holders: dict[tuple[int, ...], int] = {}
    whole = next(iter(parts.values())).new_empty(type.shape)
    for rank, part in parts.items():
        region = region_of(type, layout, mesh.sizes, mesh.coordinates(rank))
        assert tuple(part.shape) == shape_of(region), f"rank {rank} holds {tuple(part.shape)} of {name}, not {region}"
        start = tuple(each.start for each in region)
        holder = holders.setdefault(start, rank)
        if holder == rank:
            whole[region] = part
        elif not same_bits(parts[holder], part):
            raise AssertionError(f"copies of {name} on ranks {holder} and {rank} differ")
    held = sum(parts[rank].numel() for rank in holders.values())
    assert held == whole.numel(), f"ranks {', '.join(map(str, parts))} do not hold all of {name}"
    return whole
