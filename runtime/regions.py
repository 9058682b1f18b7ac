"""Which part of a tensor a rank holds: a region, or if it is flat, several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from attrs import frozen

from partita.compiler.layout import Layout, padded_type
from partita.compiler.program import SLAB
from partita.dsl.types import Type

Region = tuple[slice, ...]


def region_of(type: Type, layout: Layout, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> Region:
    """The part of a global tensor of `type` at `coordinates` of a mesh of `sizes`: a slice for each axis.

    If several mesh axes shard one axis, the layout's first is the outermost. Mesh axes along which the tensor is
    replicated or partial do not matter. Of a padded axis, it has no more than there is.
    """
    region = []
    for axis, own in zip(padded_type(type, layout).axes, type.axes, strict=True):
        parts, index = 1, 0
        for name in layout.over(axis.name):
            parts, index = parts * sizes[name], index * sizes[name] + coordinates[name]
        size, rest = divmod(axis.size, parts)
        assert rest == 0, f"{type} does not divide as {layout}"
        region.append(slice(min(index * size, own.size), min((index + 1) * size, own.size)))
    return tuple(region)


def shape_of(region: Region) -> tuple[int, ...]:
    """The sizes of a region."""
    return tuple(each.stop - each.start for each in region)


def whole_region(shape: Sequence[int]) -> Region:
    """All of a tensor of this shape; of a larger one, what it begins with."""
    return tuple(slice(0, size) for size in shape)


def in_slabs(region: Region, elements: int = SLAB) -> Iterator[tuple[Region, Region]]:
    """Yields parts of a region, in order, of at most so many elements: the part within the region, and that of the
    tensor.
    """
    if not region:
        yield (), ()
        return
    first, *rest = region
    rows = elements // max(1, prod(shape_of(tuple(rest))))
    if not rows:  # one position is too much
        for start in range(first.start, first.stop):
            one = slice(start - first.start, start - first.start + 1)
            for inside, part in in_slabs(tuple(rest), elements):
                yield (one, *inside), (slice(start, start + 1), *part)
        return
    for start in range(first.start, first.stop, rows):
        stop = min(start + rows, first.stop)
        yield (slice(start - first.start, stop - first.start),), (slice(start, stop), *rest)


# ---------------------------------------------------------------- flat tensors


@frozen
class Piece:
    """A region of a tensor, whose elements are in order those from `start` on of a rank's flat part of it."""

    region: Region
    start: int = 0

    @property
    def stop(self) -> int:
        """The end of these elements."""
        return self.start + prod(shape_of(self.region))


def pieces_of(
    type: Type, layout: Layout, sizes: Mapping[str, int], coordinates: Mapping[str, int]
) -> tuple[Piece, ...]:
    """What a rank holds of a global tensor of `type`: one region, or if it is flat, the regions that make up its part;
    none if all of it is padding. Zeros that follow the last element belong to none.
    """
    region = region_of(type, layout, sizes, coordinates)
    if layout.flat is None:
        return (Piece(region),) if all(each.start < each.stop for each in region) else ()
    over = layout.over(layout.flat.axis)
    size = layout.flat.length(prod(shape_of(region))) // prod(sizes[name] for name in over)
    index = 0
    for name in over:
        index = index * sizes[name] + coordinates[name]
    return tuple(pieces_between(region, index * size, (index + 1) * size))


def pieces_between(region: Region, start: int, stop: int) -> Iterator[Piece]:
    """Yields the regions that the elements of a region from `start` to `stop`, in order, are: a few for each axis."""
    at = 0
    for part in _boxes(shape_of(region), start, min(stop, prod(shape_of(region)))):
        pairs = zip(region, part, strict=True)
        piece = Piece(tuple(slice(own.start + each.start, own.start + each.stop) for own, each in pairs), at)
        at = piece.stop
        yield piece


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Region]:
    """Yields the boxes of a shape that its elements from `start` to `stop` fill, in order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        for box in _boxes(shape[1:], start - first * row, stop - first * row):
            yield (slice(first, first + 1), *box)
        return
    if start % row:
        yield from _boxes(shape, start, (first + 1) * row)
        first += 1
    whole = stop // row
    if first < whole:
        yield (slice(first, whole), *whole_region(shape[1:]))
    yield from _boxes(shape, whole * row, stop)
