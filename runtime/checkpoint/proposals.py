"""The lines of `weights` that a message proposes, for tensors that an import could not bind, or not for certain.

A line is proposed for a parameter in all its iterations at once, as a declaration has it, and can be pasted as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import permutations
from math import prod

from partita.compiler.graph import without_iterations
from partita.dsl.correspondence import Groups, Parameter
from partita.dsl.diagnostic import shown
from partita.dsl.types import Type
from partita.runtime.checkpoint.repeated import Family, families

MOST_PROPOSED = 4  # lines in a message
MOST_AXES = 6  # of a parameter whose orders are tried
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "{": "\\{", "}": "\\}", "\n": "\\n", "\t": "\\t"})


def own_axes(type: Type) -> Groups:
    """Our axes, in our order."""
    return tuple((name,) for name in type.names)


def line(family: Family[Groups]) -> str | None:
    """The line for a family of our names, theirs, and the axes of theirs; None if no line can say it."""
    ours, theirs = family.patterns
    path, repeats = list[str](), list[str]()
    for part in ours.split("."):
        if part == "*":
            repeats.append(path[-1])
        elif not part.isdecimal():
            path.append(part)
    text = theirs.translate(ESCAPES)
    if text.count("*") != len(repeats) or len(set(repeats)) < len(repeats):
        return None
    for name in repeats:
        text = text.replace("*", f"{{{name}}}", 1)
    return _written(".".join(path), text, family.shared)


def template(parameter: Parameter) -> str:
    """The line for a parameter that theirs calls as ours."""
    parts = list(parameter.path)
    for position, _ in parameter.repeats:
        parts[position] = f"{parts[position]}.{{{parts[position]}}}"
    return _written(parameter.name, ".".join(parts), own_axes(parameter.type))


def _written(ours: str, theirs: str, groups: Groups) -> str:
    axes = ", ".join(" * ".join(group) or "1" for group in groups)
    return f'{ours} = "{shown(theirs)}"' + f" [{axes}]" * bool(axes)


def lines(rows: Iterable[tuple[str, str, Groups]], parameters: Collection[str]) -> list[str]:
    """The lines for some of the `parameters`: our name, theirs, and the axes of theirs.

    Of a parameter that only some iterations are given of, or that has another form in some, there is none.
    """
    given: dict[str, list[tuple[str, str, Groups]]] = {}
    for row in rows:
        given.setdefault(without_iterations(row[0]), []).append(row)
    counts: dict[str, int] = {}
    for name in parameters:
        counts[without_iterations(name)] = counts.get(without_iterations(name), 0) + 1
    found = []
    for name, members in given.items():
        alike = families(((ours, theirs), axes) for ours, theirs, axes in members)
        if len(members) == counts.get(name) and len(alike) == 1:
            found.append(line(alike[0]))
    return [each for each in found if each is not None]


def declared(found: Sequence[str]) -> str:
    """A declaration with some lines, in one line."""
    more = [*found[:MOST_PROPOSED], *["…"] * (len(found) > MOST_PROPOSED)]
    return f"weights theirs {{ {'  '.join(more)} }}"


def axes_of(type: Type, shape: Sequence[int]) -> Groups | None:
    """Axes of theirs that give this shape: ours, if need be in another order, or several merged in one."""
    if prod(shape) != type.elements or len(type.axes) > MOST_AXES:
        return None
    tried = (_merged(type, order, shape) for order in permutations(type.names))
    return next((groups for groups in tried if groups is not None), None)


def _merged(type: Type, order: Sequence[str], shape: Sequence[int]) -> Groups | None:
    """Neighbours among axes in an order, merged so that they have this shape."""
    left, groups = list(order), list[tuple[str, ...]]()
    for size in shape:
        group, merged = list[str](), 1
        while left and merged * type.axis(left[0]).size <= size and (merged < size or not group):
            if size == 1 and type.axis(left[0]).size > 1:
                break
            merged *= type.axis(left[0]).size
            group.append(left.pop(0))
        if merged != size:
            return None
        groups.append(tuple(group))
    return None if left else tuple(groups)


def bound(
    missing: Mapping[str, Type], unread: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, tuple[tuple[str, ...], ...]]]:
    """Yields which of theirs `unread`, by shape, some parameters of ours may be: those of the right size, repeated as
    often, with the nearest name. Each is proposed once.
    """
    ours = families(((name,), type) for name, type in missing.items())
    theirs = families(((name,), shape) for name, shape in unread.items())
    for family in ours:
        choices = [
            (each, axes)
            for each in theirs
            if each.count == family.count and (axes := axes_of(family.shared, each.shared)) is not None
        ]
        if not choices:
            continue
        best, axes = max(choices, key=lambda choice: _likeness(family.names[0], choice[0].names[0]))
        theirs.remove(best)
        for own, other in zip(family.members, best.members, strict=True):
            yield own[0], other[0], axes


def _likeness(ours: str, theirs: str) -> float:
    return SequenceMatcher(None, ours, theirs, autojunk=False).ratio()
