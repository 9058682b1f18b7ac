"""Why a tensor lies as it does: for each mesh axis the rule that split it, or why none did; and rules that came late.

It asks `partita.compiler.homes`, which gave the layouts, and puts the answer into words.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field, frozen

from partita.compiler.homes import IMPLIED, Homes, Wish, homes_of
from partita.compiler.layout import Layout
from partita.compiler.mesh import Mesh
from partita.dsl.source import Span
from partita.dsl.spec import Layout as Rules
from partita.dsl.spec import ShardRule
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


@define(eq=False)
class Reasons:
    """The reasons of one layout on one mesh."""

    mesh: Mesh
    homes: Homes
    # Rules by the identity of their targets, which rules of one text share.
    rules: dict[int, Span] = field(factory=dict)

    def home(self, name: str, type: Type) -> tuple[tuple[Split, ...], tuple[Late, ...]]:
        """Those of a tensor's home: one for each mesh axis, and the rules that came late."""
        taken = {mesh_axis: (axis, target) for mesh_axis, target, axis in self.homes.reasons(name, type)}
        over = {axis: mesh_axis for mesh_axis, (axis, _) in taken.items()}
        wishes = self._wishes(name)
        late = []
        for wish in wishes:
            axis = wish.target.name
            if not type.has(axis) or any(target is wish.target for _, target in taken.values()):
                continue
            if axis in over:
                because = f"`{axis}` is split over `{over[axis]}` already"
            else:
                mesh_axis = next(each for each in wish.mesh_axes if each in taken)
                because = f"`{mesh_axis}` is taken by `{taken[mesh_axis][0]}`"
            late.append(Late(axis, self.rules[id(wish.target)], because))
        splits = []
        for mesh_axis in self.mesh.sharding:
            parts = self.mesh.sizes[mesh_axis]
            if mesh_axis in taken:
                axis, target = taken[mesh_axis]
                splits.append(Split(mesh_axis, parts, axis, self.rules[id(target)]))
            else:
                splits.append(Split(mesh_axis, parts, None, None, _untouched(type, mesh_axis, wishes)))
        return tuple(splits), tuple(late)

    def stored(self, kind: str, name: str, compute: Layout, stored: Layout) -> tuple[Span, ...]:
        """The rules for a class by which the `kind` of a parameter is stored otherwise than it is computed with."""
        found = []
        for mesh_axis, state in stored.states:
            if compute.state(mesh_axis) != state:
                wish = next(each for each in self.homes.class_wishes if _gives(each, kind, name, mesh_axis))
                found.append(self.rules[id(wish.target)])
        return tuple(dict.fromkeys(found))

    def unstored(self, kind: str, name: str, stored: Layout) -> tuple[str, ...]:
        """The mesh axes of such rules along which it is whole all the same, since none of its axes divides."""
        wishes = self.homes.class_wishes
        return tuple(
            mesh_axis
            for mesh_axis in self.mesh.sharding
            if stored.state(mesh_axis) is None and any(_gives(each, kind, name, mesh_axis) for each in wishes)
        )

    def _wishes(self, name: str) -> Sequence[Wish]:
        """The rules that are tried for a tensor: those for it alone, or those for axes."""
        plain = name.split("~")[0].removesuffix(".again")
        if plain.startswith("d(") and plain.endswith(")"):
            plain = plain[2:-1]
        return [wish for wish in self.homes.tensor_wishes if wish.names(plain)] or self.homes.axis_wishes


def reasons_of(layout: Rules | None, mesh: Mesh) -> Reasons:
    """The reasons of a layout's shard rules."""
    rules = [rule for rule in layout.rules if isinstance(rule, ShardRule)] if layout else []
    return Reasons(mesh, homes_of(layout, mesh), {id(target): rule.span for rule in rules for target in rule.targets})


def _gives(wish: Wish, kind: str, parameter: str, mesh_axis: str) -> bool:
    """Whether a rule for a class says how this kind of tensor of a parameter is stored along a mesh axis."""
    if kind not in IMPLIED[wish.target.name] or mesh_axis not in wish.mesh_axes:
        return False
    return wish.target.path is None or wish.names(parameter)


def _untouched(type: Type, mesh_axis: str, wishes: Sequence[Wish]) -> str:
    """Why a tensor is whole along a mesh axis."""
    rules = list(dict.fromkeys(wish.target.name for wish in wishes if mesh_axis in wish.mesh_axes))
    if not rules:
        return f"no rule splits its axes over `{mesh_axis}`"
    own = [name for name in rules if type.has(name)]
    if own:
        return f"`{own[0]}` is split over another mesh axis"
    return f"it has no {' or '.join(f'`{name}`' for name in rules)}"
