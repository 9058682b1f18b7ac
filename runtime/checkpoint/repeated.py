"""Repeated names, written once: `layers.{0..31}.attention.wq` for those of 32 layers.

Rows of names, such as our name and theirs for one tensor, are grouped if they differ only in numbers between dots, and
if the numbers of the other names follow from those of the first: a range never hides a binding that is out of order.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Generic, TypeVar

from attrs import field, frozen

from partita.dsl.grouping import grouped

NUMBER = re.compile(r"(?<![^./])(0|[1-9]\d{0,8})(?![^./])")
MAX_PIECES = 8  # in the text of one set of numbers
T = TypeVar("T", bound=Hashable)

Numbers = tuple[tuple[int, ...], ...]  # of each name of a row


@frozen
class Family(Generic[T]):
    """Rows written as one: their number, their names, and what they share.

    `patterns` are the names with `*` for the numbers that vary, if the same ones vary in every name, and otherwise the
    names of the first row. `members` are the names of each row, in the order of their numbers.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    members: tuple[tuple[str, ...], ...] = field(repr=False)
    shared: T

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.members)


def families(rows: Iterable[tuple[Sequence[str], T]]) -> list[Family[T]]:
    """Group rows, each of some names and a value that must be equal, in the order of each family's first row."""
    groups: dict[tuple[tuple[str, ...], T], list[Numbers]] = {}
    for names, shared in rows:
        numbers = tuple(tuple(map(int, NUMBER.findall(name))) for name in names)
        groups.setdefault((tuple(NUMBER.sub("\0", name) for name in names), shared), []).append(numbers)
    return [
        _family(texts, members, shared)
        for (texts, shared), all_members in groups.items()
        for members in _alike(all_members)
    ]


def _alike(members: list[Numbers]) -> Iterator[list[Numbers]]:
    """Split members into groups in which the first name's numbers form a full grid and determine the others."""
    if len(members) > 1:
        apart = _unordered(members) or _ungridded(members)
        if apart is not None:
            name, place = apart
            parts = grouped(members, lambda member: member[name][place])
            yield from chain.from_iterable(map(_alike, parts.values()))
            return
    yield members


def _unordered(members: list[Numbers]) -> tuple[int, int] | None:
    """Name and place of the first number without a fixed offset from one of the first name's, in their order."""
    first = members[0]
    for name in range(1, len(first)):
        after = 0
        for place in range(len(first[name])):
            if len({member[name][place] for member in members}) == 1:
                continue
            for own in range(after, len(first[0])):
                if len({member[name][place] - member[0][own] for member in members}) == 1:
                    after = own + 1
                    break
            else:
                return name, place
    return None


def _ungridded(members: list[Numbers]) -> tuple[int, int] | None:
    """If the first name's numbers do not form a full grid: name and place of the first one that varies."""
    sizes = [len(set(column)) for column in zip(*(member[0] for member in members), strict=True)]
    if prod(sizes) == len(members):
        return None
    return next(((0, place) for place, size in enumerate(sizes) if size > 1), None)


def _family(texts: tuple[str, ...], members: list[Numbers], shared: T) -> Family[T]:
    columns = [
        [sorted(set(column)) for column in zip(*(member[i] for member in members), strict=True)]
        for i in range(len(texts))
    ]
    names = [_filled(text, map(set_text, each)) for text, each in zip(texts, columns, strict=True)]
    varying = [[column for column in each if len(column) > 1] for each in columns]
    if all(each == varying[0] for each in varying):
        patterns = [
            _filled(text, ("*" if len(column) > 1 else str(column[0]) for column in each))
            for text, each in zip(texts, columns, strict=True)
        ]
    else:
        patterns = [_filled(text, map(str, numbers)) for text, numbers in zip(texts, members[0], strict=True)]
    rows = (zip(texts, member, strict=True) for member in sorted(members))
    return Family(
        tuple(names),
        tuple(patterns),
        tuple(tuple(_filled(text, map(str, numbers)) for text, numbers in row) for row in rows),
        shared,
    )


def _filled(text: str, numbers: Iterable[str]) -> str:
    head, *rest = text.split("\0")
    return head + "".join(number + part for number, part in zip(numbers, rest, strict=True))


def set_text(numbers: Sequence[int]) -> str:
    """Formats ascending numbers compactly: `7`, `{0..31}`, `{0..62..2}`, `{0..3,7}`."""
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1 and steps != {1}:
        return f"{{{numbers[0]}..{numbers[-1]}..{steps.pop()}}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    pieces = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    more = [f"… {len(pieces) - MAX_PIECES} more"] if len(pieces) > MAX_PIECES else []
    return f"{{{','.join([*pieces[:MAX_PIECES], *more])}}}"
