"""What is known of a file before it is written, of having written it once: which expressions are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import Factory, define

from partita.importing.graph import Value
from partita.importing.writing.blocks import Form

LINE = 90  # characters of an expression that is read in one line
SHORT = 20  # characters of an expression that stands where it is used


@define
class Expressions:
    """Expressions as they are written: how long each is, and which others stand in it."""

    lengths: dict[Value, int] = Factory(dict)  # inner ones first
    inside: dict[Value, list[Value]] = Factory(dict)
    open: list[Value] = Factory(list)

    @contextmanager
    def of(self, value: Value) -> Iterator[Callable[[str], None]]:
        """Within it the expression of a value is written; what this yields takes its text."""
        self.read(value)
        self.inside[value] = []
        self.open.append(value)
        try:
            yield lambda text: self.lengths.update({value: len(text)})
        finally:
            self.open.pop()

    def read(self, value: Value) -> None:
        """What is being written has the expression of a value in it."""
        if self.open:
            self.inside[self.open[-1]].append(value)

    def cuts(self, can_be: Callable[[Value], bool]) -> set[Value]:
        """The values that have names, so that no expression is long: the longest in each, and those about as long."""
        cut: set[Value] = set()
        whole: dict[Value, int] = {}
        for value, length in self.lengths.items():
            inner = [each for each in self.inside[value] if each in self.lengths]
            size = length - sum(self.lengths[each] - (1 if each in cut else whole[each]) for each in inner)
            while size > LINE:
                parts = [each for each in self._parts(value, can_be) if each not in cut and whole[each] > SHORT]
                if not parts:
                    break
                most = max(whole[each] for each in parts)
                for each in parts:
                    if 3 * whole[each] >= 2 * most:
                        cut.add(each)
                        size -= whole[each] - 1
            whole[value] = size
        return cut

    def _parts(self, value: Value, can_be: Callable[[Value], bool]) -> Iterator[Value]:
        """The outermost expressions in another one that can have names."""
        for each in self.inside[value]:
            if each not in self.lengths:
                continue
            if can_be(each):
                yield each
            else:
                yield from self._parts(each, can_be)


@define
class Known:
    """What passes over a module have found: modules whose calls differ, which are written in place, values that have
    names, and blocks that are called with numbers.
    """

    inlined: set[str] = Factory(set)
    cut: set[Value] = Factory(set)
    forms: dict[str, list[Form]] = Factory(dict)  # texts of blocks
