"""Why a tensor lies as it does: for each mesh axis the rule that split it, or why none did; and rules that came late.

It asks `partita.compiler.sharding.homes`, which gave the layouts, and puts the answers into words.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from partita.compiler.layout import Layout
from partita.compiler.sharding.homes import Homes, Wish
from partita.dsl.source import Span
from partita.dsl.types import Type


@frozen(eq=False)
class Split:
    """Along one mesh axis of `parts` ranks: the axis that is split, by `rule`; or None, `because`."""

    mesh_axis: str
    parts: int
    axis: str | None
    rule: Span | None
    because: str = ""


@frozen(eq=False)
class Late:
    """A rule that would split `axis`, and does not, `because` of one before it."""

    axis: str
    rule: Span
    because: str


def splits(homes: Homes, name: str, type: Type) -> tuple[Split, ...]:
    """What splits a tensor at home, one for each mesh axis."""
    taken = {mesh_axis: (axis, wish) for mesh_axis, wish, axis in homes.taken(name, type)}
    wishes = homes.wishes(name)
    found = []
    for mesh_axis in homes.mesh.sharding:
        parts = homes.mesh.sizes[mesh_axis]
        if mesh_axis in taken:
            axis, wish = taken[mesh_axis]
            found.append(Split(mesh_axis, parts, axis, wish.rule))
        else:
            found.append(Split(mesh_axis, parts, None, None, _untouched(type, mesh_axis, wishes)))
    return tuple(found)


def late(homes: Homes, name: str, type: Type) -> tuple[Late, ...]:
    """The rules that come too late for a tensor."""
    return tuple(Late(wish.target.name, wish.rule, because) for wish, because, _ in homes.late(name, type))


def storing(homes: Homes, kind: str, name: str, compute: Layout, stored: Layout) -> tuple[Span, ...]:
    """The rules for a class by which the `kind` of a parameter is stored otherwise than it is computed with."""
    moved = [mesh_axis for mesh_axis, state in stored.states if compute.state(mesh_axis) != state]
    return tuple(dict.fromkeys(_storing(homes, kind, name, mesh_axis)[0].rule for mesh_axis in moved))


def undivided(homes: Homes, kind: str, name: str, stored: Layout) -> tuple[str, ...]:
    """The mesh axes of such rules along which it is whole all the same, since none of its axes divides."""
    return tuple(
        mesh_axis
        for mesh_axis in homes.mesh.sharding
        if stored.state(mesh_axis) is None and _storing(homes, kind, name, mesh_axis)
    )


def _storing(homes: Homes, kind: str, parameter: str, mesh_axis: str) -> list[Wish]:
    """The rules that say how this kind of tensor of a parameter is stored along a mesh axis."""
    return [wish for wish in homes.class_wishes if mesh_axis in wish.mesh_axes and wish.stores(kind, parameter)]


def _untouched(type: Type, mesh_axis: str, wishes: Sequence[Wish]) -> str:
    """Why a tensor is whole along a mesh axis."""
    rules = list(dict.fromkeys(wish.target.name for wish in wishes if mesh_axis in wish.mesh_axes))
    if not rules:
        return f"no rule splits its axes over `{mesh_axis}`"
    own = [name for name in rules if type.has(name)]
    if own:
        return f"`{own[0]}` is split over another mesh axis"
    return f"it has no {' or '.join(f'`{name}`' for name in rules)}"
