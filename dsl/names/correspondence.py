"""What another program calls the parameters of a model: the checked lines of a `weights` declaration.

A line relates some parameters of ours, in every iteration of the repeats around them, to tensors of theirs. Names of
ours are without the numbers of iterations: `gpt.layer.attention.wq`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import TypeAlias

from attrs import field, frozen

from partita.dsl.check.formulas import Size, Term, sizes_in, value_of
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type


def product_text(group: Sequence[str]) -> str:
    """The product of axes of ours, as a line has it."""
    return " * ".join(group) or "1"


# For each axis of theirs, those of ours that are merged in it, the first slowest.
Groups: TypeAlias = tuple[tuple[str, ...], ...]


@frozen
class Join:
    """Where parameters follow each other in a tensor of theirs: along an axis of it, within each position of the first
    `outer` axes of ours that are merged there.
    """

    axis: int
    outer: int = 0


@frozen
class Parameter:
    """A parameter or buffer in all iterations: its path without their numbers.

    `repeats` are the positions in the path of the repeats that it is in, each with its number of iterations.
    """

    path: tuple[str, ...]
    type: Type
    repeats: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """Its name without the numbers of iterations."""
        return ".".join(self.path)

    def numbered(self, numbers: Sequence[int]) -> str:
        """Its full name in the iterations of these numbers, one for each repeat."""
        parts = list(self.path)
        for (position, _), number in zip(self.repeats, numbers, strict=True):
            parts[position] = f"{parts[position]}.{number}"
        return ".".join(parts)


@frozen
class Pattern:
    """A name of theirs: text, and formulas of the numbers of iterations and of indices."""

    parts: tuple[str | Term, ...]
    span: Span = field(eq=False, repr=False)

    @property
    def variables(self) -> frozenset[str]:
        """The repeats and axes whose numbers the name depends on."""
        return frozenset(name for part in self.parts if not isinstance(part, str) for name in sizes_in(part))

    def at(self, numbers: Mapping[str, int]) -> Pattern:
        """The pattern for some numbers, in which formulas of others are left. Raises Refused (E0321)."""
        return Pattern(
            tuple(
                part if isinstance(part, str) or not numbers.keys() >= {*sizes_in(part)} else self._text(part, numbers)
                for part in self.parts
            ),
            self.span,
        )

    def name(self, numbers: Mapping[str, int]) -> str:
        """The name for all its numbers. Raises Refused (E0321) if a formula does not give a natural number."""
        return "".join([part if isinstance(part, str) else self._text(part, numbers) for part in self.parts])

    def _text(self, formula: Term, numbers: Mapping[str, int]) -> str:
        if isinstance(formula, Size):
            return str(numbers[formula.axis])
        try:
            value = value_of(formula, numbers)
        except (ArithmeticError, ValueError):
            value = -1
        if value < 0 or value != int(value):
            values = ", ".join(f"`{name}` {numbers[name]}" for name in sizes_in(formula))
            message = f"a formula of this name is no number from 0 up{f' for {values}' if values else ''}"
            raise refuse("E0321", message, self.span)
        return str(int(value))


@frozen
class Line:
    """One line: parameters of ours, and names of theirs, of which the first is the one that is written.

    `groups` are for each of ours the axes of theirs; `joined` says along which of these ours follow each other. Theirs
    has a tensor for each index of the axes `indexed`.
    """

    ours: tuple[Parameter, ...]
    theirs: tuple[Pattern, ...]
    groups: tuple[Groups, ...]
    joined: Join | None
    indexed: tuple[str, ...]
    span: Span = field(eq=False, repr=False)

    @property
    def count(self) -> int:
        """The number of their tensors."""
        first = self.ours[0]
        return prod(count for _, count in first.repeats) * prod(first.type.axis(name).size for name in self.indexed)

    def tensors(self) -> Iterator[Theirs]:
        """Their tensors. Raises Refused (E0321)."""
        first = self.ours[0]
        repeats = [first.path[position] for position, _ in first.repeats]
        for numbers in product(*(range(count) for _, count in first.repeats)):
            iterations = dict(zip(repeats, numbers, strict=True))
            ours = [parameter.numbered(numbers) for parameter in self.ours]
            patterns = [pattern.at(iterations) for pattern in self.theirs]
            for indices in product(*(range(first.type.axis(name).size) for name in self.indexed)):
                index = dict(zip(self.indexed, indices, strict=True))
                names = tuple(pattern.name(index) for pattern in patterns)
                yield Theirs(names, tuple(self._parts(ours, index)), self.joined)

    def _parts(self, ours: Sequence[str], index: Mapping[str, int]) -> Iterator[Part]:
        start = 0
        for name, parameter, groups in zip(ours, self.ours, self.groups, strict=True):
            part = Part(name, parameter.type, groups, index, start)
            yield part
            start += part.rows(self.joined)[1] if self.joined is not None else 0


@frozen
class Part:
    """What a tensor of theirs has of one of ours: at the `index` of some of its axes, in an order of the others.

    `start` is where it begins in theirs, within each position of the outer axes where it is joined.
    """

    name: str
    type: Type
    groups: Groups
    index: Mapping[str, int] = field(factory=dict)
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in theirs."""
        return tuple(prod(self.type.axis(name).size for name in group) for group in self.groups)

    def rows(self, joined: Join) -> tuple[int, int]:
        """How many positions the outer axes have where it is joined, and how many elements it has in each."""
        outer = prod(self.type.axis(name).size for name in self.groups[joined.axis][: joined.outer])
        return outer, self.shape[joined.axis] // outer

    @property
    def order(self) -> tuple[str, ...]:
        """The axes of ours in the order of theirs."""
        return tuple(name for group in self.groups for name in group)


@frozen
class Theirs:
    """A tensor of theirs: the names that it may have, the first of which is written, and what is in it."""

    names: tuple[str, ...]
    parts: tuple[Part, ...]
    joined: Join | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape = list(self.parts[0].shape)
        if self.joined is not None:
            shape[self.joined.axis] = sum(part.shape[self.joined.axis] for part in self.parts)
        return tuple(shape)

    @property
    def axes(self) -> str:
        """Its axes in terms of ours, as a line has them: `[embed, heads * + key]`."""
        texts = [product_text(group) for group in self.parts[0].groups]
        if self.joined is not None:
            groups, outer = [part.groups[self.joined.axis] for part in self.parts], self.joined.outer
            terms = [product_text(group[outer:]) for group in groups]
            joined = f"+ {terms[0]}" if len(set(terms)) == 1 else " + ".join(terms)
            if outer:
                within = joined if joined.startswith("+") else f"({joined})"
                joined = f"{product_text(groups[0][:outer])} * {within}"
            texts[self.joined.axis] = joined
        return f"[{', '.join(texts)}]"


@frozen(eq=False)
class Weights:
    """A checked `weights` declaration for a model; `skipped` are patterns of names of theirs that ours has not."""

    name: str
    model: str
    lines: tuple[Line, ...]
    skipped: tuple[str, ...]
    span: Span = field(eq=False)

    def tensors(self) -> Iterator[Theirs]:
        """Their tensors that have parameters of ours. Raises Refused (E0321)."""
        for line in self.lines:
            yield from line.tensors()
