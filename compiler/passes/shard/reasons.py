"""Explains a tensor's layout: for each mesh axis the rule that split it, or why none did; and rules that came too late.

The answers are those of `partita.compiler.passes.shard.defaults`, put into words.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from partita.compiler.layout import Layout
from partita.compiler.passes.shard.defaults import DefaultLayouts, LayoutRule
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type


@frozen(eq=False)
class Split:
    """Along one mesh axis of `parts` ranks: the axis that `rule` splits; or None, with the reason in `because`."""

    mesh_axis: str
    parts: int
    axis: str | None
    rule: Span | None
    because: str = ""


@frozen(eq=False)
class ShadowedRule:
    """A rule that would split `axis` but does not, `because` of an earlier one."""

    axis: str
    rule: Span
    because: str


def splits(defaults: DefaultLayouts, name: str, type: Type) -> tuple[Split, ...]:
    """How a tensor is split in its default layout, for each mesh axis."""
    assigned = {mesh_axis: (axis, rule) for mesh_axis, rule, axis in defaults.taken(name, type)}
    rules = defaults.rules(name)
    result = []
    for mesh_axis in defaults.mesh.sharding:
        parts = defaults.mesh.sizes[mesh_axis]
        if mesh_axis in assigned:
            axis, rule = assigned[mesh_axis]
            result.append(Split(mesh_axis, parts, axis, rule.span))
        else:
            result.append(Split(mesh_axis, parts, None, None, _untouched(type, mesh_axis, rules)))
    return tuple(result)


def shadowed_rules(defaults: DefaultLayouts, name: str, type: Type) -> tuple[ShadowedRule, ...]:
    """The rules that come too late for a tensor."""
    return tuple(ShadowedRule(rule.target.name, rule.span, because) for rule, because, _ in defaults.late(name, type))


def storing(defaults: DefaultLayouts, kind: str, name: str, compute: Layout, stored: Layout) -> tuple[Span, ...]:
    """The rules for a class by which the `kind` of a parameter is stored in another layout than it is computed with:
    rules for states also where masters are part of them.
    """
    moved = [mesh_axis for mesh_axis, state in stored.states if compute.state(mesh_axis) != state]
    rules = [_storing(defaults, kind, name, each) or _storing(defaults, "state", name, each) for each in moved]
    return tuple(dict.fromkeys(candidates[0].span for candidates in rules))


def undivided(defaults: DefaultLayouts, kind: str, name: str, stored: Layout) -> tuple[str, ...]:
    """The mesh axes of such rules along which it is still replicated: none of its axes divides evenly, and its update
    needs it whole.
    """
    return tuple(
        mesh_axis
        for mesh_axis in defaults.mesh.sharding
        if stored.state(mesh_axis) is None and _storing(defaults, kind, name, mesh_axis)
    )


def _storing(defaults: DefaultLayouts, kind: str, parameter: str, mesh_axis: str) -> list[LayoutRule]:
    """The rules that say how this kind of tensor of a parameter is stored along a mesh axis."""
    return [rule for rule in defaults.class_rules if mesh_axis in rule.mesh_axes and rule.stores(kind, parameter)]


def _untouched(type: Type, mesh_axis: str, rules: Sequence[LayoutRule]) -> str:
    """Why a tensor is replicated along a mesh axis."""
    axes = list(dict.fromkeys(rule.target.name for rule in rules if mesh_axis in rule.mesh_axes))
    if not axes:
        return f"no rule splits its axes over `{mesh_axis}`"
    own = [name for name in axes if type.has(name)]
    if own:
        return f"`{own[0]}` is split over another mesh axis"
    return f"it has no {' or '.join(f'`{name}`' for name in axes)}"
