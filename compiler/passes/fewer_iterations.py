"""A file with some iterations of its repeats: which of them differ, and rules that name those that are left.

Iterations differ in their bodies, where these read their number, and in rules whose paths say iterations, such as
`layer[0..7]`. These mean, of the iterations that are left, those that they meant before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

from attrs import evolve

from partita.dsl import spec
from partita.dsl.names.paths import has_ranges, joined_part, split_part, without_ranges
from partita.dsl.syntax.source import Span

Path: TypeAlias = tuple[str, ...]
Place = TypeVar("Place", bound=Span | None)
# By name of a repeat, the iterations that are left, in order.
Kept: TypeAlias = Mapping[str, Sequence[int]]


def kinds(step: spec.Repeat, apart: Iterable[Mapping[str, set[int]]] = ()) -> list[int]:
    """The first iteration of each kind: those of a kind have the same options, but for the values of fractions, read
    the same values, and are in the same sets of those that are told `apart`. Each that keeps a value is of its own.
    """
    if step.kept:
        return list(range(step.count))
    sets = [own[name] for own in apart for name in dict.fromkeys((step.name, step.scope)) if name in own]
    found: dict[str, int] = {}
    for number in range(step.count if sets else len(step.bodies)):
        options = _options(step, number) if len(step.bodies) > 1 else []
        found.setdefault(repr((options, [number in each for each in sets])), number)
    return list(found.values())


def _options(step: spec.Repeat, number: int) -> list[object]:
    steps = [other for _, other in spec.pairs(step.body, step.iteration(number)) if other is not None]
    read = [[each for each in spec.operands_of(other) if isinstance(each, int)] for other in steps]
    options = (other.options for other in steps if isinstance(other, spec.Apply))
    return [read, *({k: bool(v) if isinstance(v, float) else v for k, v in each.items()} for each in options)]


def told_apart(file: spec.Spec) -> list[Mapping[str, set[int]]]:
    """The iterations that paths of a file's rules say, by name of the repeat. Rules of an optimizer that differ in
    numbers alone, as a rate by layer does, tell nothing apart.
    """
    sets: dict[object, dict[str, set[int]]] = {}
    for place, (rule, path) in enumerate(_paths(file)):
        alike = (without_ranges(path), rule.call and rule.call.name) if isinstance(rule, spec.OptimizerRule) else place
        for name, iterations in map(split_part, path):
            if iterations is not None:
                sets.setdefault(alike, {}).setdefault(name, set()).update(iterations)
    return list(sets.values())


def _paths(file: spec.Spec) -> Iterator[tuple[spec.Rule | spec.AdapterRule | spec.OptimizerRule, Path]]:
    for rule in file.layout.rules if file.layout is not None else ():
        if isinstance(rule, spec.ShardRule):
            yield from ((rule, target.path) for target in rule.targets if target.path is not None)
        elif isinstance(rule, spec.PlaceRule | spec.RecomputeRule | spec.OffloadRule):
            yield from ((rule, path) for path in rule.paths)
    for adapters in file.model.adapters if file.model is not None else ():
        yield from ((adapters, path) for path in adapters.targets)
    for own in file.train.optimizer.rules if file.train is not None else ():
        yield from ((own, path) for path in own.targets)


def renumbered(file: spec.Spec, kept: Kept) -> spec.Spec:
    """The file with rules for the iterations that are left, numbered from 0."""
    if not any(has_ranges(path) for _, path in _paths(file)):
        return file
    if file.layout is not None:
        rules = (_of_layout(rule, kept) for rule in file.layout.rules)
        file = evolve(file, layout=evolve(file.layout, rules=tuple(rule for rule in rules if rule is not None)))
    if file.model is not None:
        left = ((rule, *_left(rule.targets, rule.target_spans, kept)) for rule in file.model.adapters)
        adapters = tuple(evolve(rule, targets=paths, target_spans=spans) for rule, paths, spans in left if paths)
        file = evolve(file, model=evolve(file.model, adapters=adapters))
    if file.train is not None:
        own: list[spec.OptimizerRule] = []
        for rule in file.train.optimizer.rules:
            targets, spans = _left(rule.targets, rule.target_spans, kept)
            if targets:
                index = sum(each.call is not None for each in own)
                own.append(evolve(rule, targets=targets, target_spans=spans, index=index))
        optimizer = evolve(file.train.optimizer, rules=tuple(own))
        file = evolve(file, train=evolve(file.train, optimizer=optimizer))
    return file


def _of_layout(rule: spec.Rule, kept: Kept) -> spec.Rule | None:
    if isinstance(rule, spec.ShardRule):
        paths = [(target, target.path and _renumbered(target.path, kept)) for target in rule.targets]
        targets = [evolve(target, path=path) for target, path in paths if target.path is None or path is not None]
        return evolve(rule, targets=tuple(targets)) if targets else None
    if isinstance(rule, spec.PlaceRule | spec.RecomputeRule | spec.OffloadRule):
        left, spans = _left(rule.paths, rule.path_spans, kept)
        return evolve(rule, paths=left, path_spans=spans) if left else None
    return rule


def _left(paths: Sequence[Path], spans: Sequence[Place], kept: Kept) -> tuple[tuple[Path, ...], tuple[Place, ...]]:
    pairs = [(_renumbered(path, kept), span) for path, span in zip(paths, spans, strict=True)]
    return tuple(p for p, _ in pairs if p is not None), tuple(span for p, span in pairs if p is not None)


def _renumbered(path: Path, kept: Kept) -> Path | None:
    """A path of the iterations that are left; None if none of its own is."""
    parts = []
    for part in path:
        name, iterations = split_part(part)
        if iterations is not None and name in kept:
            left = [number for number, before in enumerate(kept[name]) if before in iterations]
            if not left:
                return None
            iterations = range(left[0], left[-1] + 1)
        parts.append(joined_part(name, iterations))
    return tuple(parts)
