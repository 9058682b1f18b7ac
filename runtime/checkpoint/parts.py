"""Which part of a tensor is in which rank's file, and where any region of it can be read.

A saved tensor is a grid of parts: each tensor axis is divided by the mesh axes that shard it, outermost first. If it is
flat, each of them is a row of elements, which is divided further, and saved without the zeros at its end. A part was
saved by one rank: its coordinates along the sharding mesh axes follow from the part's index in the grid, and those
along the other mesh axes are the tensor's `at`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from attrs import evolve, frozen

from partita.compiler.layout import Flat, Layout, padded_type
from partita.compiler.mesh import Mesh
from partita.compiler.ops.groups import ANCHOR
from partita.compiler.ops.optimizer import EMA
from partita.compiler.program import ParameterRecord, Program
from partita.dsl.types import Type
from partita.runtime.checkpoint.manifest import Tensor
from partita.runtime.regions import Region, pieces_between, pieces_of, region_of, shape_of, whole_region


def state_name(state: str, parameter: str) -> str:
    """The name of an optimizer state tensor in a checkpoint."""
    return f"{state}/{parameter}"


def mean_name(parameter: str) -> str:
    """The name in a checkpoint of the mean that `ema` keeps of a parameter."""
    return state_name(EMA, parameter)


@frozen
class SavedTensor:
    """A tensor that ranks keep, and its name in a checkpoint: the master of a parameter, or one of its states. A tensor
    of a replica group is kept only by the ranks of this group.
    """

    name: str
    type: Type
    layout: Layout
    parameter: str
    state: str | None = None
    group: int | None = None


def state_tensors(program: Program) -> Iterator[SavedTensor]:
    """Yields all tensors that are kept between steps. With replica groups, a parameter's name refers to the outer
    parameter (the anchor), from which all groups start after an average.
    """
    for record in program.parameters:
        name = record.name
        apart = any(each.name == ANCHOR for each in record.companions)
        if not apart:
            yield from _of_group(record, None)
        for each in record.companions:
            own = name if each.name == ANCHOR else state_name(each.name, name)
            yield SavedTensor(own, each.type, record.stored(each), name, each.name)
        for group in range(program.groups if apart else 0):
            yield from _of_group(record, group)


def _of_group(record: ParameterRecord, group: int | None) -> Iterator[SavedTensor]:
    """A parameter's master, and the states of its optimizer; those of a group have names of their own."""
    name, prefix = record.name, "" if group is None else f"group{group}"
    yield SavedTensor(state_name(prefix, name) if prefix else name, record.type, record.layout, name, None, group)
    for state in record.states:
        own = f"{prefix}_{state.name}" if prefix else state.name
        yield SavedTensor(state_name(own, name), state.type, record.stored(state), name, state.name, group)


def copies_of_parameters(program: Program) -> dict[str, str]:
    """What begins as a parameter, by its name in a checkpoint: means, and the copies of groups."""
    records = {each.name: each for each in program.parameters}
    copied = {name: {each.name for each in record.states if each.copy} for name, record in records.items()}
    return {
        each.name: each.parameter
        for each in state_tensors(program)
        if each.name != each.parameter and (each.state is None or each.state in copied[each.parameter])
    }


def saved_tensors(program: Program) -> tuple[Tensor, ...]:
    """Everything that a program keeps between steps, with the ranks that save it.

    Replicas share the work: among tensors with the same layout and stages, each is saved by the replica that has the
    fewest bytes so far.
    """
    mesh = program.mesh
    stages_of: dict[str, tuple[int, ...]] = {}
    for each in program.parameters:
        stages_of[each.name] = tuple(sorted({program.stages[stage].rank for stage in each.stages}))
    all_loads: dict[object, list[int]] = {}
    tensors = []
    for saved in state_tensors(program):
        pipe_ranks, layout = stages_of[saved.parameter], saved.layout
        place = None if saved.group is None else saved.group // program.replicas_per_rank
        copies = [
            at
            for at in _copies(mesh, layout, pipe_ranks)
            if place is None or mesh.replica_axis is None or dict(at)[mesh.replica_axis] == place
        ]
        loads = all_loads.setdefault((layout.states, pipe_ranks, place), [0] * len(copies))
        replica = min(range(len(copies)), key=loads.__getitem__)
        loads[replica] += saved.type.bytes
        # Of a flat part on disk, no more matters than which elements it has.
        flat = layout.flat and evolve(layout.flat, kept=())
        tensors.append(Tensor(saved.name, saved.type, Layout(layout.states, flat, layout.padded), copies[replica]))
    return tuple(tensors)


def _copies(mesh: Mesh, layout: Layout, pipe_ranks: Sequence[int]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yields the coordinates of each replica along the mesh axes that do not shard the tensor."""
    split = {axis for axis, _ in layout.states}
    free = [(axis, size) for axis, size in mesh.axes if axis not in split]
    ranges = [pipe_ranks if axis == mesh.pipe else range(size) for axis, size in free]
    for indices in product(*ranges):
        yield tuple((axis, index) for (axis, _), index in zip(free, indices, strict=True))


def saves(tensor: Tensor, coordinates: dict[str, int]) -> bool:
    """Whether the rank at `coordinates` saves a part of a tensor."""
    return all(coordinates[axis] == index for axis, index in tensor.at)


def saved_shape(tensor: Tensor, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the part of a tensor that the rank at `coordinates` saves: without zeros that pad it."""
    if tensor.layout.flat is None:
        return shape_of(region_of(tensor.type, tensor.layout, sizes, coordinates))
    pieces = pieces_of(tensor.type, tensor.layout, sizes, coordinates)
    return (max((piece.stop for piece in pieces), default=0),)


@frozen
class Source:
    """Where to read a region of a tensor: from the file of a rank the region `inner` of its part, which is the region
    `outer` of what is wanted. Elements of a flat part are seen in a `shape`, of which they are `within`.
    """

    rank: int
    inner: Region
    outer: Region
    shape: tuple[int, ...] | None = None
    within: Region = ()


def sources(tensor: Tensor, mesh: Mesh, region: Region) -> Iterator[Source]:
    """Yields where to read a region of a tensor."""
    grid, sizes = [], []
    for axis, part in zip(padded_type(tensor.type, tensor.layout).axes, region, strict=True):
        size = axis.size // prod(mesh.sizes[over] for over in tensor.layout.over(axis.name))
        sizes.append(size)
        grid.append(range(part.start // size, -(-part.stop // size)))
    for indices in product(*grid):
        coordinates = dict(tensor.at)
        inner, outer = [], []
        for axis, part, size, index in zip(tensor.type.axes, region, sizes, indices, strict=True):
            first = index * size
            start, stop = max(part.start, first), min(part.stop, first + size)
            inner.append(slice(start - first, stop - first))
            outer.append(slice(start - part.start, stop - part.start))
            for over in reversed(tensor.layout.over(axis.name)):
                index, coordinates[over] = divmod(index, mesh.sizes[over])
        if tensor.layout.flat is None:
            yield Source(mesh.rank(coordinates), tuple(inner), tuple(outer))
        else:
            yield from _in_flat_parts(tensor.layout, tensor.layout.flat, mesh, coordinates, sizes, inner, outer)


def _in_flat_parts(
    layout: Layout,
    flat: Flat,
    mesh: Mesh,
    coordinates: Mapping[str, int],
    shape: Sequence[int],
    inner: Sequence[slice],
    outer: Sequence[slice],
) -> Iterator[Source]:
    """Yields where the region `inner` of a shard of that shape is, which was made flat and split. Of a piece of a part
    its rows are read in which the region is: consecutive elements.
    """
    over = layout.over(flat.axis)
    size = flat.length(prod(shape)) // prod(mesh.sizes[each] for each in over)
    first = last = 0
    for length, each in zip(shape, inner, strict=True):
        first, last = first * length + each.start, last * length + each.stop - 1
    whole = whole_region(shape)
    for part in range(first // size, last // size + 1):
        own, index = dict(coordinates), part
        for name in reversed(over):
            index, own[name] = divmod(index, mesh.sizes[name])
        for piece in pieces_between(whole, part * size, (part + 1) * size):
            both = list(zip(piece.region, inner, strict=True))
            overlap = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in both]
            if any(each.start >= each.stop for each in overlap):
                continue
            # Rows lie along the first axis with more than one position: axes after it are whole.
            row = next((i for i, size in enumerate(shape_of(piece.region)) if size > 1), 0)
            rows = (*piece.region[:row], overlap[row], *piece.region[row + 1 :])
            begin = piece.start + (rows[row].start - piece.region[row].start) * prod(shape[row + 1 :])
            end = begin + prod(shape_of(rows))
            into = tuple(_relative(each, *pair) for each, *pair in zip(overlap, inner, outer, strict=True))
            within = tuple(map(_relative, overlap, rows))
            yield Source(mesh.rank(own), (slice(begin, end),), into, shape_of(rows), within)


def _relative(part: slice, whole: slice, at: slice = slice(0, None)) -> slice:
    """A slice relative to the start of another, which itself begins at `at`."""
    offset = at.start - whole.start
    return slice(part.start + offset, part.stop + offset)
