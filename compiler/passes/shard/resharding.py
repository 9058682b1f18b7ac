"""Resharding: what it costs, and the cheapest path of steps.

One cost function serves both the choice of layouts and the paths between them: seconds over the link of the mesh axis,
by rings or trees, whichever are faster (Thakur, Rabenseifner and Gropp 2005; NCCL's double trees). Where several mesh
axes split one tensor axis, only the innermost can be gathered, reduced or exchanged, since parts are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from attrs import define, field, frozen

from partita.compiler.layout import (
    MAX,
    SUM,
    Layout,
    State,
    is_split,
    layout_of,
    local_type,
    tensor_type,
)
from partita.compiler.mesh import Mesh
from partita.compiler.ops.collective import LOCAL_SECONDS, Flatten, Reshard, Unflatten, transition
from partita.dsl.types import Type

IMPOSSIBLE = float("inf")


@frozen
class Step:
    """One step of a path: the operation, and the layout and local type after it."""

    op: Reshard
    layout: Layout
    type: Type
    seconds: float


@define(eq=False)
class Resharding:
    """Paths on one mesh, each searched once, and what changes cost, each estimated once."""

    mesh: Mesh
    _paths: dict[tuple[Type, Layout, Layout], tuple[Step, ...]] = field(factory=dict)
    _changes: dict[tuple[float, str, State, State, State], float] = field(factory=dict)

    def seconds(self, op: Reshard, local_bytes: float) -> float:
        """The time of one step, for tensors of which a rank holds `local_bytes` bytes."""
        if op.reforms:
            return LOCAL_SECONDS
        return sum(op.seconds(local_bytes, self.mesh.link(op.over)))

    def change_seconds(self, bytes: float, over: str, source: State, target: State, default: State) -> float:
        """The time to change the state along one mesh axis only; the ranks along it hold `bytes` of the tensor
        together. A partial sum is first reduced to the tensor's default state.

        An estimate: a path may find other steps, over other mesh axes too.
        """
        key = (bytes, over, source, target, default)
        seconds = self._changes.get(key)
        if seconds is None:
            seconds = self._changes[key] = self._change_seconds(*key)
        return seconds

    def _change_seconds(self, bytes: float, over: str, source: State, target: State, default: State) -> float:
        if source == target:
            return 0.0
        if target in (SUM, MAX):
            return IMPOSSIBLE
        parts = self.mesh.sizes[over]

        def step(before: State, after: State) -> float:
            op = transition(over, parts, before, after)
            return IMPOSSIBLE if op is None else self.seconds(op, bytes / parts if is_split(before) else bytes)

        if source is None:
            return step(None, target)
        if is_split(source):
            return step(source, target) + (LOCAL_SECONDS if target is not None else 0.0)
        if source == MAX or default is None:
            return step(source, None)  # a part of that is free
        if target in (None, default):
            return step(source, target)
        return step(source, default) + step(default, target)

    def cost(self, type: Type, source: Layout, target: Layout) -> float:
        """The time of the cheapest path."""
        return sum(step.seconds for step in self.path(type, source, target))

    def path(self, type: Type, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest steps from one layout to another; `type` is the local type in `source`."""
        key = (type, source, target)
        steps = self._paths.get(key)
        if steps is None:
            steps = self._paths[key] = self._search(type, source, target)
        return steps

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
                seconds = self.seconds(op, local.bytes)
                if cost + seconds < best.get(reached, float("inf")):
                    best[reached] = cost + seconds
                    count += 1
                    step = Step(op, reached, result, seconds)
                    heappush(queue, (cost + seconds, count, reached, result, (*path, step)))
        raise AssertionError(f"no way from {source} to {target} for {type}")

    def _steps(self, type: Type, layout: Layout, target: Layout) -> Iterator[tuple[Reshard, Layout]]:
        """The steps from a layout toward a target, with the layout that each leads to."""
        yield from self._reforms(type, layout, target)
        states: dict[str, State] = dict(layout.states)
        sizes = self.mesh.sizes
        axes = self.mesh.sharding
        kept = layout.flat.kept if layout.flat is not None else ()
        for i, over in enumerate(axes):
            state, target_state, parts = states.get(over), target.state(over), sizes[over]
            later = {states.get(other) for other in axes[i + 1 :]}

            if is_split(state) and (state in later or state in kept):
                continue
            possible: list[State] = []
            if state is not None:
                possible.append(None)
            # A split must become the innermost one of its axis, and divide evenly.
            here = is_split(target_state) and type.has(target_state) and target_state not in kept
            if here and target_state not in later and type.axis(str(target_state)).size % parts == 0:
                possible.append(target_state)
            # A partial maximum is not a partial sum: the order of reductions matters.
            if target_state == SUM and MAX not in states.values():
                possible.append(SUM)
            for new in possible:
                if (op := transition(over, parts, state, new)) is not None:
                    moved = ((axis, new if axis == over else states.get(axis)) for axis in axes)
                    yield op, layout_of(moved, layout.flat)

    def _reforms(self, type: Type, layout: Layout, target: Layout) -> Iterator[tuple[Reshard, Layout]]:
        """The step to or from a flat form, if it is time for one."""
        before, after = _own_splits(layout), _own_splits(target)
        if layout.flat == target.flat and (layout.flat is None or before == after):
            return
        states, sizes = layout.states, self.mesh.sizes
        if layout.flat is not None:
            if not layout.over(layout.flat.axis):
                own = Layout(states)
                yield Unflatten(local_type(tensor_type(type, layout, sizes), own, sizes).axes), own
        elif target.flat is not None and before == after:
            flat, form = Layout(states, target.flat), target.flat
            size = local_type(Type(type.dtype, form.axes), flat, sizes).axis(form.axis).size
            names = tuple(axis.name for axis in form.axes)
            yield Flatten(form.axis, names, type.elements, size, form.kept), flat


def _own_splits(layout: Layout) -> tuple[tuple[str, str], ...]:
    """The mesh axes that split the tensor's own axes, each with the axis."""
    own = layout.flat.axis if layout.flat is not None else None
    return tuple((over, state) for over, state in layout.states if is_split(state) and state != own)
