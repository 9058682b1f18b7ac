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
    """Expressions as they are written: how long each is, and which others stand in it. A call of a block is another
    expression of the value that the block returns.
    """

    lengths: dict[object, int] = Factory(dict)  # inner ones first
    inside: dict[object, list[object]] = Factory(dict)
    values: dict[object, Value] = Factory(dict)
    calls: dict[Value, object] = Factory(dict)
    open: list[object] = Factory(list)

    @contextmanager
    def of(self, value: Value, call: object = None) -> Iterator[Callable[[str], None]]:
        """Within it the expression of a value is written; what this yields takes its text."""
        key = call or value
        if call is not None:
            self.calls[value] = call
        else:
            self.read(value)
        self.inside[key], self.values[key] = [], value
        self.open.append(key)
        try:
            yield lambda text: self.lengths.update({key: len(text)})
        finally:
            self.open.pop()

    def read(self, value: Value) -> None:
        """What is being written has the expression of a value in it."""
        if self.open:
            self.inside[self.open[-1]].append(self.calls.get(value, value))

    def cuts(self, can_be: Callable[[Value], bool]) -> set[Value]:
        """The values that have names, so that no expression is long: the longest in each, and those about as long."""
        cut: set[object] = set()
        whole: dict[object, int] = {}
        for key, length in self.lengths.items():
            inner = [each for each in self.inside[key] if each in whole]
            size = length - sum(self.lengths[each] - (1 if each in cut else whole[each]) for each in inner)
            while size > LINE:
                parts = [each for each in self._parts(key, can_be) if each not in cut and whole.get(each, 0) > SHORT]
                if not parts:
                    break
                most = max(whole[each] for each in parts)
                for each in parts:
                    if 3 * whole[each] >= 2 * most:
                        cut.add(each)
                        size -= whole[each] - 1
            whole[key] = size
        return {self.values[each] for each in cut}

    def _parts(self, key: object, can_be: Callable[[Value], bool]) -> Iterator[object]:
        """The outermost expressions in another one that can have names."""
        for each in self.inside[key]:
            if each not in self.values:
                continue
            if can_be(self.values[each]):
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
