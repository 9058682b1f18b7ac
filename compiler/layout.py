"""The layout of a tensor on the mesh: a state for each mesh axis.

A state is the name of the tensor axis that is split over the mesh axis, `SUM` or `MAX` (partial: each rank holds one
term of the sum, or of the maximum), or None (replicated). Where several mesh axes split one tensor axis, the mesh axis
declared first is the outermost: its ranks hold the largest contiguous parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, TypeGuard

from attrs import field, frozen

from partita.dsl.types import Type

SUM, MAX = "+", ">"  # cannot clash with the names of axes
State: TypeAlias = str | None


@frozen(cache_hash=True)
class Layout:
    """States by mesh axis, in mesh order; mesh axes along which the tensor is replicated are left out."""

    states: tuple[tuple[str, str], ...] = field(default=())

    def state(self, mesh_axis: str) -> State:
        """The state along a mesh axis."""
        for name, state in self.states:
            if name == mesh_axis:
                return state
        return None

    def over(self, axis: str) -> tuple[str, ...]:
        """The mesh axes that split a tensor axis, outermost first."""
        return tuple(name for name, state in self.states if state == axis)

    @property
    def partial(self) -> bool:
        """Whether the tensor is a partial sum or maximum along some mesh axis."""
        return any(state in (SUM, MAX) for _, state in self.states)

    def __str__(self) -> str:
        """Such as `batch/data seq/tensor`, `sum/tensor` or `replicated`."""
        return " ".join(f"{state_text(state)}/{name}" for name, state in self.states) or "replicated"


REPLICATED = Layout()


def layout_of(states: Iterable[tuple[str, State]]) -> Layout:
    """A layout from states by mesh axis, in mesh order."""
    found = tuple((name, state) for name, state in states if state is not None)
    return Layout(found) if found else REPLICATED


def within_axes(layout: Layout, type: Type) -> Layout:
    """The layout of a tensor of `type` that goes with one that has more axes: split along those that it has too."""
    return layout_of((over, state if is_split(state) and type.has(state) else None) for over, state in layout.states)


def state_text(state: State) -> str:
    """A state for display: the name of an axis, `sum`, `max`, or `replicated`."""
    return {None: "replicated", SUM: "sum", MAX: "max"}.get(state) or str(state)


def is_split(state: State) -> TypeGuard[str]:
    """Whether a state splits an axis (rather than being replicated or partial)."""
    return state is not None and state not in (SUM, MAX)


def split_axes(states: Iterable[State]) -> list[str]:
    """The axes that some of these states split, without duplicates."""
    return [state for state in dict.fromkeys(states) if is_split(state)]


def local_type(type: Type, layout: Layout, sizes: dict[str, int]) -> Type:
    """One rank's part of a tensor of this global type. `sizes` are those of the mesh axes; all splits divide evenly."""
    for name, state in layout.states:
        if is_split(state):
            size, parts = type.axis(state).size, sizes[name]
            assert size % parts == 0, (type, layout)
            type = type.resized(state, size // parts)
    return type


def global_type(type: Type, layout: Layout, sizes: dict[str, int]) -> Type:
    """The type of the global tensor, from one rank's part."""
    for name, state in layout.states:
        if is_split(state):
            type = type.resized(state, type.axis(state).size * sizes[name])
    return type
