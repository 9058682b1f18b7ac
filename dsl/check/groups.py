"""How replica groups (`sync = local`) lie on the ranks of a mesh.

They share out the first mesh axis that splits the batch: with more ranks than groups, each group has an equal number of
neighboring ranks along it, which split its part of the batch; with more groups than ranks, each rank trains an equal
number of neighboring groups, one after the other. All other mesh axes are inside the groups. Without such a mesh axis,
all ranks train all groups.
"""

from __future__ import annotations

from attrs import evolve, field, frozen

from partita.dsl import spec
from partita.dsl.check.stages import stage_rules
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span


@frozen
class Groups:
    """So many groups in all: `spread` over ranks along a mesh axis, and `members` of them on each rank."""

    count: int
    along: str | None
    spread: int
    members: int
    span: Span | None = field(default=None, eq=False)


def groups_of(file: spec.Spec) -> Groups | None:
    """The groups of a file, None if it has none. Raises Refused (E0421) if they cannot be shared out evenly."""
    local = file.train.local if file.train is not None else None
    if file.train is None or local is None:
        return None
    count, span = file.train.groups, file.train.spans.get("sync")
    along = _splits_batch(file)
    if along is None or file.mesh is None:
        return Groups(count, None, 1, count, span)
    ranks = file.mesh.size(along)
    if ranks % count and count % ranks:
        raise refuse(
            "E0421",
            f"`{along}` has {ranks} ranks, over which {count} groups cannot be shared out evenly",
            span,
            help=f"a number of groups that divides {ranks}, or is a multiple of it",
        )
    spread = min(count, ranks)
    return Groups(count, along, spread, count // spread, span)


def _splits_batch(file: spec.Spec) -> str | None:
    """The first mesh axis of several ranks that splits the batch."""
    staged = {rule.mesh_axis for rule in stage_rules(file.layout)}
    for rule in spec.rules_of(file.layout, spec.ShardRule):
        if any(_is_batch(each, file.batch) for each in rule.targets):
            for name in rule.mesh_axes:
                if name not in staged and file.mesh is not None and file.mesh.size(name) > 1:
                    return name
    return None


def _is_batch(target: spec.Target, batch: str) -> bool:
    return target.path is None and not target.is_class and target.name == batch


def joined(file: spec.Spec, along: str, axis: str) -> spec.Spec:
    """The file with the batch split over a mesh axis of groups as well, outside of `along`: for what reads the means of
    all groups, on all ranks together.
    """
    if file.layout is None:
        return file
    rules = tuple(
        part
        for rule in file.layout.rules
        for part in (_over_groups(rule, file.batch, along, axis) if isinstance(rule, spec.ShardRule) else (rule,))
    )
    return evolve(file, layout=evolve(file.layout, rules=rules))


def _over_groups(rule: spec.ShardRule, batch: str, along: str, axis: str) -> tuple[spec.ShardRule, ...]:
    """A rule that splits the batch along a mesh axis, one for each target, as those for the batch change."""
    if along not in rule.mesh_axes or not any(_is_batch(target, batch) for target in rule.targets):
        return (rule,)
    at = rule.mesh_axes.index(along)
    wider = (*rule.mesh_axes[:at], axis, *rule.mesh_axes[at:])
    return tuple(
        evolve(rule, targets=(target,), mesh_axes=wider if _is_batch(target, batch) else rule.mesh_axes)
        for target in rule.targets
    )
