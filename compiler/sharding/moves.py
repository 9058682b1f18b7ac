"""Changes of layout: what each step leads from and to, what it costs, and the cheapest path of steps.

One cost function serves both the choice of layouts and the paths between them: seconds over the link of the mesh
axis, by rings or trees, whichever are quicker (Thakur, Rabenseifner and Gropp 2005; NCCL's double trees). Where
several mesh axes split one tensor axis, only the innermost can be gathered, added or exchanged, since parts are
contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from attrs import define, field, frozen

from partita.compiler.costs.links import Link
from partita.compiler.layout import MAX, SUM, Layout, State, is_split, layout_of
from partita.compiler.mesh import Mesh
from partita.compiler.ops.collective import AllGather, AllReduce, AllToAll, Collective, Move, Once, Part, ReduceScatter
from partita.dsl.types import Type

# A local step costs next to nothing, but more than none.
LOCAL_SECONDS = 1e-9


@frozen
class Step:
    """One step of a path: the operation, and the layout and local type that it leads to."""

    op: Move
    layout: Layout
    type: Type
    seconds: float


def collective_seconds(op: Collective, types: Sequence[Type], link: Link) -> tuple[float, float]:
    """Of a collective of tensors of these local types: its latency, and the time that its bytes take."""
    held = sum(type.bytes for type in types)
    if isinstance(op, AllReduce):
        return link.add(op.parts, held)
    if isinstance(op, AllToAll):
        return link.exchange(op.parts, held)
    return link.gather(op.parts, held * op.parts if isinstance(op, AllGather) else held)


@define(eq=False)
class Moves:
    """Paths on one mesh, each found once."""

    mesh: Mesh
    _paths: dict[tuple[Type, Layout, Layout], tuple[Step, ...]] = field(factory=dict)

    def seconds(self, op: Move, type: Type) -> float:
        """The time of one step for one tensor of a local type."""
        if not isinstance(op, Collective):
            return LOCAL_SECONDS
        return sum(collective_seconds(op, (type,), self.mesh.link(op.over)))

    def cost(self, type: Type, source: Layout, target: Layout) -> float:
        """The time of the cheapest path."""
        return sum(step.seconds for step in self.path(type, source, target))

    def path(self, type: Type, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest steps from one layout to another, for a tensor of this local type under `source`."""
        key = (type, source, target)
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self._search(type, source, target)
        return found

    def _search(self, type: Type, source: Layout, target: Layout) -> tuple[Step, ...]:
        best: dict[Layout, float] = {source: 0.0}
        queue: list[tuple[float, int, Layout, Type, tuple[Step, ...]]] = [(0.0, 0, source, type, ())]
        count = 0
        while queue:
            cost, _, layout, local, path = heappop(queue)
            if layout == target:
                return path
            if cost > best[layout]:
                continue
            for op, reached in self._steps(local, layout, target):
                (result,) = op.infer(local)
                seconds = self.seconds(op, local)
                if cost + seconds < best.get(reached, float("inf")):
                    best[reached] = cost + seconds
                    count += 1
                    step = Step(op, reached, result, seconds)
                    heappush(queue, (cost + seconds, count, reached, result, (*path, step)))
        raise AssertionError(f"no way from {source} to {target} for {type}")

    def _steps(self, type: Type, layout: Layout, target: Layout) -> Iterator[tuple[Move, Layout]]:
        """The steps from a layout towards a target, with where each leads."""
        states: dict[str, State] = dict(layout.states)
        sizes = self.mesh.sizes
        axes = self.mesh.sharding
        for i, over in enumerate(axes):
            state, wanted, parts = states.get(over), target.state(over), sizes[over]
            later = {states.get(other) for other in axes[i + 1 :]}

            def to(new: State, over: str = over) -> Layout:
                return layout_of((axis, new if axis == over else states.get(axis)) for axis in axes)

            # What can be split next: nothing lies further inside, and the rest divides.
            splits = (
                is_split(wanted)
                and wanted != state
                and wanted not in later
                and type.axis(str(wanted)).size % parts == 0
            )
            if is_split(state):
                if state in later:
                    continue
                yield AllGather(over, parts, (str(state),)), to(None)
                if splits:
                    yield AllToAll(over, parts, (str(state),), (str(wanted),)), to(wanted)
            elif state == SUM:
                yield AllReduce(over, parts), to(None)
                if splits:
                    yield ReduceScatter(over, parts, (str(wanted),)), to(wanted)
            elif state == MAX:
                yield AllReduce(over, parts, 1, True), to(None)
            elif wanted == SUM:
                # Parts of a maximum are no parts of a sum: it matters which come together first.
                if MAX not in states.values():
                    yield Once(over, parts), to(SUM)
            elif splits:
                yield Part(over, parts, str(wanted)), to(wanted)
