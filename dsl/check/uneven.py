"""Axes that do not divide over their mesh axes, and which rules may still split: `padded`, or `repeated`.

A *padded* axis is longer in programs than it is (`partita.compiler.passes.padded`). A *repeated* one is split over as
many ranks as it divides into, and the others hold the same: its mesh axis is divided into two, of which it is split
over the outer one. So `shard groups -> tensor repeated` with 2 groups and `tensor` of 8 means a mesh with `tensor` of 2
and `tensor_repeats` of 4, whose ranks keep their numbers; other rules for `tensor` are rules for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import gcd, prod

from attrs import evolve, frozen

from partita.dsl import spec
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span

PADDED, REPEATED = "padded", "repeated"


@frozen
class Uneven:
    """How a padded axis is split: over these mesh axes, with sizes, by the rule at this place."""

    mesh_axes: tuple[tuple[str, int], ...]
    span: Span


def padded_axes(file: spec.Spec) -> dict[str, Uneven]:
    """The axes that a layout pads where they do not divide."""
    found: dict[str, Uneven] = {}
    axes = file.mesh.axes if file.mesh is not None else ()
    for rule in spec.rules_of(file.layout, spec.ShardRule):
        for target in rule.targets if rule.uneven == PADDED else ():
            before = found[target.name].mesh_axes if target.name in found else ()
            over = tuple(each for each in axes if each[0] in rule.mesh_axes or each in before)
            found[target.name] = Uneven(over, rule.span)
    return found


def with_divided_mesh(file: spec.Spec) -> spec.Spec:
    """The file with a mesh over which repeated axes divide. Raises Refused (E0411) if there is none."""
    mesh, layout = file.mesh, file.layout
    rules = [rule for rule in spec.rules_of(layout, spec.ShardRule) if rule.uneven == REPEATED]
    if mesh is None or layout is None or not rules:
        return file
    cuts: dict[str, set[int]] = {}
    own: dict[spec.ShardRule, dict[str, dict[str, int]]] = {}
    for rule in rules:
        own[rule] = {target.name: _shares(file.axes[target.name].size, rule, mesh) for target in rule.targets}
        for name, shares in own[rule].items():
            ranks = prod(mesh.size(each) for each in shares)
            if all(share == 1 for share in shares.values()) and file.axes[name].size > 1 and ranks > 1:
                over = " × ".join(f"`{each}` of {mesh.size(each)}" for each in shares)
                message = f"axis `{name}` of {file.axes[name].size} has no part that {over} could repeat"
                raise refuse("E0411", message, rule.span, help=f"`{PADDED}` in place of `{REPEATED}`")
            for mesh_axis, share in shares.items():
                cuts.setdefault(mesh_axis, set()).add(share)
    parts = {mesh_axis: _parts(mesh_axis, sorted(found), mesh, rules[0].span) for mesh_axis, found in cuts.items()}
    axes = tuple(part for name, size in mesh.axes for part in parts.get(name, ((name, size),)))
    of = {part: name for name, own_parts in parts.items() for part, _ in own_parts}
    links = {name: mesh.links[of.get(name, name)] for name, _ in axes if of.get(name, name) in mesh.links}
    divided = evolve(mesh, axes=axes, links=links)
    written = [each for rule in layout.rules for each in _rules(rule, own, parts)]
    return evolve(
        file,
        meshes={**file.meshes, mesh.name: divided},
        layout=evolve(layout, rules=tuple(written)),
    )


def _shares(size: int, rule: spec.ShardRule, mesh: spec.Mesh) -> dict[str, int]:
    """Over how many ranks of each mesh axis of a rule an axis of this size is split."""
    shares = {}
    for name, ranks in mesh.axes:
        if name in rule.mesh_axes:
            shares[name] = gcd(size, ranks)
            size //= shares[name]
    return shares


def _parts(name: str, shares: list[int], mesh: spec.Mesh, span: Span) -> tuple[tuple[str, int], ...]:
    """The mesh axes into which one is divided, outermost first."""
    ends = [1, *(each for each in shares if each > 1), mesh.size(name)]
    if any(after % before for before, after in pairwise(ends)):
        message = f"`{name}` of {mesh.size(name)} cannot be divided into {' and into '.join(map(str, ends[1:-1]))}"
        raise refuse("E0411", message, span, help="give axes that are repeated mesh axes of their own")
    sizes = [after // before for before, after in pairwise(ends)]
    taken = {each for each, _ in mesh.axes}
    parts: list[tuple[str, int]] = []
    called = name
    for size in sizes:
        if size > 1 or not parts:
            parts.append((called, size))
            called = f"{name}_repeats" if called == name else f"{called}_"
            while called in taken:
                called += "_"
    return tuple(parts)


def _rules(
    rule: spec.Rule,
    own: Mapping[spec.ShardRule, Mapping[str, Mapping[str, int]]],
    parts: Mapping[str, tuple[tuple[str, int], ...]],
) -> tuple[spec.Rule, ...]:
    """A rule for the divided mesh: one for each target, where these are split over different parts of it."""

    def wide(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(part for name in names for part, _ in parts.get(name, ((name, 0),)))

    if isinstance(rule, spec.ShardRule) and rule in own:
        return tuple(
            evolve(rule, targets=(target,), mesh_axes=_within(own[rule][target.name], parts), uneven=None)
            for target in rule.targets
        )
    if isinstance(rule, spec.ShardRule | spec.OverlapRule):
        return (evolve(rule, mesh_axes=wide(rule.mesh_axes)),)
    return (rule,)


def _within(shares: Mapping[str, int], parts: Mapping[str, tuple[tuple[str, int], ...]]) -> tuple[str, ...]:
    """The parts of mesh axes that make up an axis's shares of them."""
    names = []
    for mesh_axis, share in shares.items():
        for part, size in parts[mesh_axis]:
            if share > 1 or (share == 1 and size == 1):
                names.append(part)
                share //= size
    return tuple(names) or tuple(part for each in shares for part, _ in parts[each][:1])
