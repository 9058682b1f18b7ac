"""Which part of a tensor is in which rank's file, and where any region of it can be read.

A saved tensor is a grid of parts: each tensor axis is divided by the mesh axes that shard it, outermost first. A part
was saved by one rank: its coordinates along the sharding mesh axes follow from the part's index in the grid, and those
along the other mesh axes are the tensor's `at`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from partita.compiler.layout import Layout
from partita.compiler.mesh import Mesh
from partita.compiler.ops.optimizer import EMA
from partita.compiler.program import ParameterRecord, Program
from partita.dsl.types import Type
from partita.runtime.checkpoint.manifest import Tensor

if TYPE_CHECKING:
    from partita.runtime.regions import Region


def state_name(state: str, parameter: str) -> str:
    """The name of an optimizer state tensor in a checkpoint."""
    return f"{state}/{parameter}"


def mean_name(parameter: str) -> str:
    """The name in a checkpoint of the mean that `ema` keeps of a parameter."""
    return state_name(EMA, parameter)


def saved_tensors(program: Program) -> tuple[Tensor, ...]:
    """Every parameter and optimizer state of a program, with the ranks that save it.

    Replicas share the work: among tensors with the same layout and stages, each is saved by the replica that has the
    fewest bytes so far.
    """
    mesh = program.mesh
    stages_of: dict[str, tuple[int, ...]] = {}
    for each in program.parameters:
        stages_of[each.name] = tuple(sorted({program.stages[stage].rank for stage in each.stages}))
    taken: dict[object, list[int]] = {}
    found = []
    for name, type, layout, parameter in _tensors(program.parameters):
        pipe_ranks = stages_of[parameter]
        copies = list(_copies(mesh, layout, pipe_ranks))
        loads = taken.setdefault((layout, pipe_ranks), [0] * len(copies))
        least = min(range(len(copies)), key=loads.__getitem__)
        loads[least] += type.bytes
        found.append(Tensor(name, type, layout, copies[least]))
    return tuple(found)


def _tensors(parameters: Sequence[ParameterRecord]) -> Iterator[tuple[str, Type, Layout, str]]:
    """Yields parameters and their states: name, type, layout, and the parameter's name."""
    for record in parameters:
        yield record.name, record.type, record.layout, record.name
        for state in record.states:
            yield state_name(state.name, record.name), state.type, record.stored(state), record.name


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


def sources(tensor: Tensor, mesh: Mesh, wanted: Region) -> Iterator[tuple[int, Region, Region]]:
    """Yields where to read a region of a tensor: the rank, and the region within its part and within `wanted`."""
    grid, sizes = [], []
    for axis, part in zip(tensor.type.axes, wanted, strict=True):
        size = axis.size // prod(mesh.sizes[over] for over in tensor.layout.over(axis.name))
        sizes.append(size)
        grid.append(range(part.start // size, -(-part.stop // size)))
    for indices in product(*grid):
        coordinates = dict(tensor.at)
        inner, outer = [], []
        for axis, part, size, index in zip(tensor.type.axes, wanted, sizes, indices, strict=True):
            first = index * size
            start, stop = max(part.start, first), min(part.stop, first + size)
            inner.append(slice(start - first, stop - first))
            outer.append(slice(start - part.start, stop - part.start))
            for over in reversed(tensor.layout.over(axis.name)):
                index, coordinates[over] = divmod(index, mesh.sizes[over])
        yield mesh.rank(coordinates), tuple(inner), tuple(outer)
