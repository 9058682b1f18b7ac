"""Fragments of Python in the syntax trees of definitions, whatever their formatting and whatever locals are called."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import repeat
from typing import TypeAlias, cast

from attrs import Factory, evolve, frozen

# What `ast` holds in a field of a node, and sequences of it.
Value: TypeAlias = object
Fragment: TypeAlias = ast.expr | list[ast.stmt]
# A definition by itself, of a class where it is a method.
Holder: TypeAlias = ast.Module | ast.ClassDef
# Names that are bound, by the kind of node that binds or reads them.
NAMES = {
    ast.Name: "id",
    ast.arg: "arg",
    ast.ExceptHandler: "name",
    ast.FunctionDef: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
}
UNREAD = ("ctx", "kind", "type_comment")
# What a statement has beside its body.
TAILS = ("orelse", "handlers", "finalbody")
FIXED = ("self", "cls")


@frozen
class Fit:
    """How a fragment is a piece of a definition, which has locals and other names: the local that each name of the
    fragment is, and what each `...` stands for.
    """

    locals: frozenset[str]
    others: frozenset[str]
    names: Mapping[str, str] = Factory(dict)
    gaps: tuple[Value, ...] = ()

    def named(self, name: str, actual: str) -> Iterator[Fit]:
        """Where a name of the fragment is `actual`: local names may be called otherwise, one to one."""
        if actual not in self.locals:
            if name == actual and name not in self.names:
                yield self
        elif self.names.get(name) == actual:
            yield self
        elif name not in self.names and name not in self.others and actual not in self.names.values():
            yield evolve(self, names={**self.names, name: actual})

    def gap(self, value: Value) -> Fit:
        return evolve(self, gaps=(*self.gaps, value))


@frozen
class Place:
    """Where a fragment stands: in a field of a node, from one index to another where the field is a list."""

    node: ast.AST
    field: str
    start: int | None
    stop: int
    fit: Fit

    def unparsed(self, holder: Holder, made: Value) -> str:
        """The text of a holder, which has the place, with something else in it."""
        before = getattr(self.node, self.field)
        if self.start is not None:
            more = made if isinstance(made, list) else [made]
            made = [*before[: self.start], *more, *before[self.stop :]]
        setattr(self.node, self.field, made)
        try:
            return ast.unparse(holder)
        finally:
            setattr(self.node, self.field, before)


def parsed(text: str) -> Fragment:
    """An expression or statements. SyntaxError where they are neither."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        body = ast.parse(f"({text}\n)").body
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else body


def local_names(root: ast.AST) -> frozenset[str]:
    """What a function binds, and what functions and comprehensions in it do."""
    if not isinstance(root, ast.FunctionDef):
        return frozenset()
    found, outside = set[str](), {*FIXED}
    for node in ast.walk(root):
        if isinstance(node, ast.Global):
            outside.update(node.names)
        elif type(node) in NAMES and node is not root and not isinstance(getattr(node, "ctx", None), ast.Load):
            found.add(getattr(node, NAMES[type(node)]))
    return frozenset(found - outside - {None})


@cache
def _start(root: ast.AST) -> Fit:
    local = local_names(root)
    return Fit(local, frozenset(node.id for node in ast.walk(root) if isinstance(node, ast.Name)) - local)


def places(holder: Holder, fragment: Fragment, beside: Sequence[Fragment] = ()) -> list[Place]:
    """All places in the definition that a holder has where a fragment stands, with names that others have there."""
    starts = [_start(holder.body[0])]
    for other in beside:
        names = [place.fit.names for start in starts for place in _all_places(holder, other, start)]
        starts = [evolve(starts[0], names=each) for i, each in enumerate(names) if each not in names[:i]]
    return [place for start in starts for place in _all_places(holder, fragment, start)]


@cache
def _slots(holder: Holder) -> Mapping[type, list[tuple[ast.AST, str, int | None]]]:
    """Where expressions stand, by their kind; and all bodies."""
    found = defaultdict[type, list[tuple[ast.AST, str, int | None]]](list)
    for node in ast.walk(holder):
        for field, value in ast.iter_fields(node):
            if not isinstance(value, list):
                found[type(value)].append((node, field, None))
            elif value and isinstance(value[0], ast.stmt):
                found[list].append((node, field, 0))
            else:
                for i, each in enumerate(value):
                    found[type(each)].append((node, field, i))
    return found


def _all_places(holder: Holder, fragment: Fragment, start: Fit) -> Iterator[Place]:
    for node, field, i in _slots(holder)[type(fragment)]:
        value = getattr(node, field)
        if isinstance(fragment, ast.expr):
            one = value if i is None else value[i]
            yield from (Place(node, field, i, 0 if i is None else i + 1, fit) for fit in _fits(fragment, one, start))
        else:
            least = len(fragment) - sum(map(_is_gap, fragment))
            for first in range(len(value) - least + 1):
                for stop in range(first + least, (len(value) if least < len(fragment) else first + least) + 1):
                    fits = _fits(fragment, value[first:stop], start)
                    yield from (Place(node, field, first, stop, fit) for fit in fits)


def _is_gap(value: Value) -> bool:
    """Whether a part of a fragment is `...`, or `**...` of arguments."""
    match value:
        case ast.Constant(value=inner):
            return inner is ...
        case ast.Expr(value=inner) | ast.keyword(arg=None, value=inner):
            return _is_gap(inner)
    return False


def _is_head(pattern: ast.AST) -> bool:
    """Whether a compound statement is said only as far as somewhere in its body."""
    body = getattr(pattern, "body", None)
    return isinstance(body, list) and bool(body) and _is_gap(body[-1])


def _fits(pattern: Value, value: Value, fit: Fit) -> Iterator[Fit]:
    if isinstance(pattern, list):
        yield from _all_fit(pattern, cast(list[Value], value), fit)
    elif _is_gap(pattern) and isinstance(value, ast.expr):
        yield fit.gap(value)
    elif not isinstance(pattern, ast.AST):
        if type(pattern) is type(value) and pattern == value:
            yield fit
    elif type(pattern) is type(value):
        fits: Iterator[Fit] = iter((fit,))
        for field in _fields(pattern):
            fits = _field_fits(pattern, cast(ast.AST, value), field, fits)
        yield from fits


def _field_fits(pattern: ast.AST, value: ast.AST, field: str, fits: Iterator[Fit]) -> Iterator[Fit]:
    said, actual = getattr(pattern, field), getattr(value, field)
    for fit in fits:
        if _is_tail(pattern, field):
            yield fit.gap(actual)
        elif NAMES.get(type(pattern)) == field and said and actual:
            yield from fit.named(said, actual)
        else:
            yield from _fits(said, actual, fit)


def _fields(node: ast.AST) -> list[str]:
    return [field for field in node._fields if field not in UNREAD]


def _is_tail(pattern: ast.AST, field: str) -> bool:
    """Whether a field says nothing beside one that says `...`: what follows a head, named arguments."""
    if getattr(pattern, field):
        return False
    if isinstance(pattern, ast.Call):
        return field == "keywords" and any(map(_is_gap, pattern.args))
    return field in TAILS and _is_head(pattern)


def _all_fit(patterns: Sequence[Value], values: Sequence[Value], fit: Fit) -> Iterator[Fit]:
    if not patterns:
        if not values:
            yield fit
    elif _is_gap(patterns[0]):
        for i in range(len(values) + 1):
            yield from _all_fit(patterns[1:], values[i:], fit.gap(list(values[:i])))
    elif values:
        for each in _fits(patterns[0], values[0], fit):
            yield from _all_fit(patterns[1:], values[1:], each)


def filled(fragment: Fragment, fit: Fit) -> Value:
    """A fragment in the names of a definition, with what each `...` stands for. ValueError where there are more of
    these than stand for something, or fewer, but some.
    """
    gaps = iter(fit.gaps)
    try:
        made = _filled(fragment, fit, gaps if fit.gaps else repeat(None))
    except StopIteration:
        raise ValueError("more `...` than there were") from None
    left = len(list(gaps))
    if 0 < left < len(fit.gaps):
        raise ValueError("fewer `...` than there were")
    return made


def _filled(pattern: Value, fit: Fit, gaps: Iterator[Value]) -> Value:
    if isinstance(pattern, list):
        made: list[Value] = []
        for each in pattern:
            one = _filled(each, fit, gaps)
            made.extend(one if isinstance(one, list) else [one])
        return made
    if _is_gap(pattern):
        return pattern if (one := next(gaps)) is None else one
    if not isinstance(pattern, ast.AST):
        return pattern
    values = {}
    for field in _fields(pattern):
        said = getattr(pattern, field)
        if _is_tail(pattern, field):
            values[field] = next(gaps) or []
        elif NAMES.get(type(pattern)) == field:
            values[field] = fit.names.get(said, said)
        else:
            values[field] = _filled(said, fit, gaps)
    return ast.copy_location(type(pattern)(**values), pattern)
