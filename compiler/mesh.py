"""The device mesh as the compiler sees it: one axis for the pipeline, the others for sharding.

A pipeline rank is a *column* of ranks, one for each coordinate along the other axes. All ranks of a column run one
program, and the ranks of a pipeline with equal other coordinates exchange its messages. So nothing that is compiled
grows with the number of ranks in a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from attrs import evolve, frozen

from partita.compiler.costs.links import Link, link_of
from partita.dsl import spec
from partita.dsl.check.groups import Groups
from partita.dsl.reprs import Shortened


@frozen(repr=False)
class Mesh(Shortened):
    """`axes` in declared order, the last varying fastest over ranks; `pipe` is that of the pipeline, if any. Ranks at
    different coordinates of the axis `replica_axis` train different groups: a step splits nothing over it.
    """

    axes: tuple[tuple[str, int], ...] = ()
    pipe: str | None = None
    links: tuple[tuple[str, Link], ...] = ()
    replica_axis: str | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(size for _, size in self.axes)

    @property
    def sharding(self) -> tuple[str, ...]:
        """The mesh axes that a step shards tensors over: all larger than 1, but for those of stages and of groups."""
        return tuple(name for name, size in self.axes if size > 1 and name not in (self.pipe, self.replica_axis))

    @property
    def joined(self) -> tuple[str, ...]:
        """The mesh axes along which ranks have collectives: those of steps, and that of groups."""
        return tuple(name for name, size in self.axes if size > 1 and name != self.pipe)

    @property
    def groups(self) -> int:
        """The number of ranks along the axis of groups."""
        return self.sizes[self.replica_axis] if self.replica_axis is not None else 1

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by mesh axis."""
        return dict(self.axes)

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of parts into which mesh axes may split an axis of a tensor."""
        counts = {1}
        for name in self.sharding:
            counts |= {parts * self.sizes[name] for parts in counts}
        return tuple(sorted(counts - {1}))

    def link(self, axis: str) -> Link:
        """The link along a mesh axis."""
        return dict(self.links)[axis]

    def joined_by(self, link: Link) -> Mesh:
        """The mesh with one link along all its axes."""
        return evolve(self, links=tuple((name, link) for name, _ in self.axes))

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's coordinate along every mesh axis."""
        coordinates: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, coordinates[name] = divmod(rank, size)
        return {name: coordinates[name] for name, _ in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def pipe_rank(self, rank: int) -> int:
        """The pipeline rank whose program a rank runs."""
        return self.coordinates(rank)[self.pipe] if self.pipe else 0

    def peer(self, rank: int, pipe_rank: int) -> int:
        """The rank on another pipeline rank with the same other coordinates."""
        if self.pipe is None:
            assert pipe_rank == 0
            return rank
        return self.rank({**self.coordinates(rank), self.pipe: pipe_rank})

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along one mesh axis only, in order of that coordinate."""
        own = self.coordinates(rank)
        return tuple(self.rank({**own, axis: i}) for i in range(self.sizes[axis]))


ONE_RANK = Mesh()


def mesh_of(declared: spec.Mesh | None, pipe: str | None, groups: Groups | None = None) -> Mesh:
    """The mesh of a layout; a single rank if it has none. With groups over several ranks, their mesh axis is divided
    into one of groups, on the outside, and one within them. Ranks keep their numbers.
    """
    if declared is None:
        return ONE_RANK
    links = {name: link_of(declared, name, name == pipe) for name, _ in declared.axes}
    if groups is None or groups.along is None:
        return Mesh(declared.axes, pipe, tuple(links.items()))
    axis = group_axis(declared, groups.along)
    parts = {
        name: ((axis, groups.spread), (name, size // groups.spread)) if name == groups.along else ((name, size),)
        for name, size in declared.axes
    }
    axes = tuple(part for own in parts.values() for part in own)
    of = {part: name for name, own in parts.items() for part, _ in own}
    return Mesh(axes, pipe, tuple((name, links[of[name]]) for name, _ in axes), axis)


def group_axis(declared: spec.Mesh, along: str) -> str:
    """The name of the mesh axis of the groups that share out another one: `data_groups`."""
    name = f"{along}_groups"
    while any(name == other for other, _ in declared.axes):
        name += "_"
    return name
