"""Which tensors of another program may be which parameters of ours: by name, or else by shape, which is a guess.

Numbers are left out of names, and so are the names of repeats or lists that they count. Two names are then alike if
they end alike, and one has all other parts of the other in order: `m.layer.3.attn.wq` and `layers.3.attn.wq.weight`.
Names speak for a pair if each of both is the nearest of the other. Whatever is called otherwise is a guess, and so is a
tensor whose axes fit its shape in several orders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import islice, permutations, product
from math import prod

from attrs import frozen

from partita.dsl.grouping import grouped
from partita.dsl.names.correspondence import Groups
from partita.dsl.types import Type
from partita.runtime.checkpoint.repeated import Family, families

MAX_AXES = 6  # of a parameter whose orders are tried
MAX_COMPARED = 20_000  # pairs of names
GENERIC = ("weight", "kernel")  # what a name ends with that says nothing

Shape = tuple[int, ...]


@frozen
class Match:
    """Tensors of theirs that a parameter may be in all its iterations, and their axes in terms of ours. It is a guess
    if names do not say so, or if the axes fit in another order as well.
    """

    theirs: Family[Shape]
    axes: Groups
    guess: bool


@frozen
class Name:
    """The parts of a name: all but numbers, and without those that numbers follow; and how many tensors have it."""

    parts: tuple[str, ...]
    core: tuple[str, ...]
    count: int

    @classmethod
    def of(cls, text: str, count: int, begin: int = 0) -> Name:
        """The parts of a name from the one at `begin` on."""
        pieces = re.split(r"[./]", text.lower())[begin:]
        if len(pieces) > 1 and pieces[-1] in GENERIC:
            pieces = pieces[:-1]
        counted = [part for part, after in zip(pieces, [*pieces[1:], ""], strict=True) if not after.isdecimal()]
        parts, core = (tuple(part for part in each if not part.isdecimal()) for each in (pieces, counted))
        return cls(parts, core or parts, count)

    def distance(self, other: Name) -> tuple[int, int] | None:
        """How many parts only one of two names has, without and with those that numbers follow; None if the names are
        not alike.
        """
        if self.core[-1:] != other.core[-1:] or self.count != other.count or not _within(self.core, other.core):
            return None
        far = len(self.parts) + len(other.parts)
        among_all = abs(len(self.parts) - len(other.parts)) if _within(self.parts, other.parts) else far
        return abs(len(self.core) - len(other.core)), among_all

    def likeness(self, other: Name) -> tuple[int, float]:
        """How many words both have, and how similar they are as text."""
        one, two = ".".join(self.parts), ".".join(other.parts)
        words = {*re.findall(r"[a-z]+|\d+", one)} & {*re.findall(r"[a-z]+|\d+", two)}
        return len(words), SequenceMatcher(None, one, two, autojunk=False).ratio()


def _within(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the longer of two sequences has the other in order."""
    short, long = sorted((one, other), key=len)
    rest = iter(long)
    return all(part in rest for part in short)


def matches(parameters: Mapping[str, Type], tensors: Mapping[str, Shape]) -> list[tuple[Family[Type], Match | None]]:
    """What some parameters may be of theirs, in our order, each of theirs once."""
    ours = families(((name,), type) for name, type in parameters.items())
    theirs = families(((name,), shape) for name, shape in tensors.items())
    own = [Name.of(each.members[0][0], each.count, 1) for each in ours]
    others = [Name.of(each.members[0][0], each.count) for each in theirs]
    named = _by_name(own, others)
    fitting = (
        (i, j)
        for i, j in product(
            [i for i in range(len(ours)) if i not in named],
            [j for j in range(len(theirs)) if j not in named.values()],
        )
        if own[i].count == others[j].count and axes_of(ours[i].shared, theirs[j].shared) is not None
    )
    pairing = {**_most_similar(own, others, islice(fitting, MAX_COMPARED)), **named}

    def match(i: int) -> Match | None:
        orders = orders_of(ours[i].shared, theirs[pairing[i]].shared) if i in pairing else []
        return Match(theirs[pairing[i]], orders[0], i not in named or len(orders) > 1) if orders else None

    return [(family, match(i)) for i, family in enumerate(ours)]


def _by_name(ours: Sequence[Name], theirs: Sequence[Name]) -> dict[int, int]:
    """The pairs of which each is the nearest of the other."""
    forward, back = _nearest(ours, theirs), _nearest(theirs, ours)
    return {i: j for i, j in forward.items() if back.get(j) == i}


def _nearest(names: Sequence[Name], others: Sequence[Name]) -> dict[int, int]:
    """For each name the nearest of the others, where there is one that is nearer than all."""
    by_end = grouped(range(len(others)), lambda j: others[j].core[-1:])
    nearest = {}
    for i, name in enumerate(names):
        near = [(distance, j) for j in by_end.get(name.core[-1:], ()) if (distance := name.distance(others[j]))]
        closest = min(near, default=None)
        if closest is not None and [distance for distance, _ in near].count(closest[0]) == 1:
            nearest[i] = closest[1]
    return nearest


def _most_similar(ours: Sequence[Name], theirs: Sequence[Name], pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Of some pairs those of the most similar names, each name once; in order, where they are as similar."""
    pairing: dict[int, int] = {}
    used = set[int]()
    for i, j in sorted(pairs, key=lambda pair: ours[pair[0]].likeness(theirs[pair[1]]), reverse=True):
        if i not in pairing and j not in used:
            pairing[i] = j
            used.add(j)
    return pairing


# ---------------------------------------------------------------- axes


def own_axes(type: Type) -> Groups:
    """Our axes, in our order."""
    return tuple((name,) for name in type.names)


def axes_of(type: Type, shape: Sequence[int]) -> Groups | None:
    """Axes of theirs that give this shape: ours, if need be in another order, or several merged in one."""
    return next(iter(orders_of(type, shape)), None)


def orders_of(type: Type, shape: Sequence[int]) -> list[Groups]:
    """All axes of theirs that give this shape and differ in where elements are, our order first. Those that are merged
    in one stay in our order.
    """
    if prod(shape) != type.elements or len(type.axes) > MAX_AXES:
        return []
    orders: dict[tuple[str, ...], Groups] = {}
    for order in permutations(type.names):
        groups = _merged(type, order, shape)
        if groups is not None and all(_ascending(type, group) for group in groups):
            orders.setdefault(tuple(name for name in order if type.axis(name).size > 1), groups)
    return list(orders.values())


def _ascending(type: Type, group: Iterable[str]) -> bool:
    positions = [type.position(name) for name in group if type.axis(name).size > 1]
    return positions == sorted(positions)


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
