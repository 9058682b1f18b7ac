"""The layout of a tensor on the mesh: a state for each mesh axis.

A state is the name of the tensor axis that is split over the mesh axis, `SUM` or `MAX` (partial: each rank holds one
term of the sum, or of the maximum), or None (replicated). Where several mesh axes split one tensor axis, the mesh axis
declared first is the outermost: its ranks hold the largest contiguous parts.

A tensor none of whose axes divides is stored *flat* (`Flat`): each rank's shard along other mesh axes becomes one
axis, padded with zeros, which divides. Its states then are those of the flat tensor.

An axis that does not divide may be *padded* by rule: programs have it with a larger size, at whose end are zeros. What
is stored has its own size: the last ranks hold less of it, or nothing (`Layout.padded`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeAlias, TypeGuard

from attrs import evolve, field, frozen

from partita.dsl.types import Axis, Type

SUM, MAX = "+", ">"  # cannot clash with the names of axes
State: TypeAlias = str | None


@frozen(cache_hash=True)
class Flat:
    """How a tensor with these `axes` is flat: the elements of a rank's shard in order, padded with zeros to a multiple
    of `parts`, are one axis. The axes `kept` were split before: they follow it, and count shards.

    So a tensor `[embed=6, heads=4]` split into 2 along `heads`, and flat in 5 parts, is `[flat=15, heads=2]`; a rank
    has `[flat=15, heads=1]` of it, or `[flat=3, heads=1]` once `flat` is split into 5.
    """

    axes: tuple[Axis, ...]
    parts: int
    kept: tuple[str, ...] = ()

    @property
    def axis(self) -> str:
        """The name of the axis of elements, which none of the tensor's own has."""
        name = "flat"
        while any(axis.name == name for axis in self.axes):
            name += "_"
        return name

    def length(self, elements: int) -> int:
        """The size of the axis for so many elements of a shard."""
        return -(-elements // self.parts) * self.parts


@frozen(cache_hash=True)
class Layout:
    """States by mesh axis, in mesh order (but see `of_parts`); mesh axes along which the tensor is replicated are left
    out. `flat`: how the tensor is flat, if it is. `padded`: the sizes that programs have of axes which are padded, by
    axis; only records of what is stored say so, since in programs tensors have these sizes.
    """

    states: tuple[tuple[str, str], ...] = field(default=())
    flat: Flat | None = None
    padded: tuple[tuple[str, int], ...] = ()

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


def layout_of(
    states: Iterable[tuple[str, State]], flat: Flat | None = None, padded: tuple[tuple[str, int], ...] = ()
) -> Layout:
    """A layout from states by mesh axis, in mesh order."""
    entries = tuple((name, state) for name, state in states if state is not None)
    return Layout(entries, flat, padded) if entries or flat or padded else REPLICATED


def padded_type(type: Type, layout: Layout) -> Type:
    """A stored tensor's type in programs: with the sizes that padded axes have there."""
    for name, size in layout.padded:
        type = type.resized(name, size)
    return type


def stored_form(type: Type, layout: Layout, own_sizes: Mapping[str, int]) -> tuple[Type, Layout]:
    """How a program's tensor is stored, from the own sizes of axes that are padded: its type and its layout."""
    padded = tuple((axis.name, axis.size) for axis in type.axes if axis.name in own_sizes)
    for name, _ in padded:
        type = type.resized(name, own_sizes[name])
    return type, evolve(layout, padded=padded) if padded else layout


def flat_form(layout: Layout, type: Type, parts: int) -> Flat:
    """How a tensor of `type` in a layout is made flat, to be split into `parts`."""
    split = split_axes(state for _, state in layout.states)
    return Flat(type.axes, parts, tuple(name for name in type.names if name in split))


def within_axes(layout: Layout, type: Type) -> Layout:
    """The layout of a tensor of `type` that goes with one that has more axes: split along those that it has too."""
    if layout.flat is not None and type.names == tuple(axis.name for axis in layout.flat.axes):
        return layout
    states = ((over, state if is_split(state) and type.has(state) else None) for over, state in layout.states)
    return layout_of(states, padded=tuple(each for each in layout.padded if type.has(each[0])))


def state_text(state: State) -> str:
    """A state for display: the name of an axis, `sum`, `max`, or `replicated`."""
    return {None: "replicated", SUM: "sum", MAX: "max"}.get(state) or str(state)


def is_split(state: State) -> TypeGuard[str]:
    """Whether a state splits an axis (rather than being replicated or partial)."""
    return state is not None and state not in (SUM, MAX)


def split_axes(states: Iterable[State]) -> list[str]:
    """The axes that some of these states split, without duplicates."""
    return [state for state in dict.fromkeys(states) if is_split(state)]


def local_type(type: Type, layout: Layout, sizes: Mapping[str, int]) -> Type:
    """One rank's part of a tensor of this global type. `sizes` are those of the mesh axes; all splits divide evenly, of
    a padded axis with its padding.
    """
    type = padded_type(type, layout)
    if layout.flat is not None and type.axes == layout.flat.axes:
        type = _flat_type(type.dtype, layout, layout.flat, sizes)
    for name, state in layout.states:
        if is_split(state) and (layout.flat is None or type.has(state)):
            size, parts = type.axis(state).size, sizes[name]
            assert size % parts == 0, (type, layout)
            type = type.resized(state, size // parts)
    return type


def _flat_type(dtype: str, layout: Layout, flat: Flat, sizes: Mapping[str, int]) -> Type:
    counts = {name: prod(sizes[over] for over in layout.over(name)) for name in flat.kept}
    others = prod(sizes[over] for over, state in layout.states if is_split(state) and state != flat.axis)
    elements = prod(axis.size for axis in flat.axes)
    assert elements % others == 0, (flat, layout)
    kept = (Axis(name, count) for name, count in counts.items())
    return Type(dtype, (Axis(flat.axis, flat.length(elements // others)), *kept))


def global_type(type: Type, layout: Layout, sizes: Mapping[str, int]) -> Type:
    """The type of the global tensor, from one rank's part: of the flat one, if it is flat."""
    for name, state in layout.states:
        if is_split(state) and (layout.flat is None or type.has(state)):
            type = type.resized(state, type.axis(state).size * sizes[name])
    return type


def tensor_type(type: Type, layout: Layout, sizes: Mapping[str, int]) -> Type:
    """The type of the global tensor with its own axes, from one rank's part."""
    if layout.flat is not None:
        return Type(type.dtype, layout.flat.axes)
    return global_type(type, layout, sizes)


def of_part(layout: Layout, over: str, axis: str, size: int) -> Layout:
    """The layout of the parts of a tensor along the outermost mesh axis `over`, which splits `axis`; each has `size` of
    it.
    """
    assert layout.states[:1] == ((over, axis),), layout
    return Layout(layout.states[1:], _with_size(layout.flat, axis, size))


def of_parts(layout: Layout, over: str, axis: str, size: int) -> Layout:
    """The layout of a tensor that a mesh axis, outermost, splits along `axis` of `size` into parts of this layout."""
    return Layout(((over, axis), *layout.states), _with_size(layout.flat, axis, size))


def _with_size(flat: Flat | None, axis: str, size: int) -> Flat | None:
    if flat is None:
        return None
    return evolve(flat, axes=tuple(Axis(each.name, size) if each.name == axis else each for each in flat.axes))
