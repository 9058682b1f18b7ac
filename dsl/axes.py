"""Axis declarations → sizes, by exact arithmetic: `axis ffn = 8 * embed / 3` must be a positive integer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from partita.dsl import constants, limits, tree
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.formulas import Formula, Size
from partita.dsl.report import Report, suggestion
from partita.dsl.types import Axis
from partita.dsl.units import PLAIN, Quantity


class Axes:
    """The axes of a file by name. Looking one up marks it as used; one whose size is wrong is None."""

    def __init__(self, entries: Mapping[str, tree.Entry], report: Report) -> None:
        self.entries = entries
        self.used: set[str] = set()
        self.sizes: dict[str, Axis | None] = {}
        self.formulas: dict[str, Size | Formula] = {}  # of those that are computed from others
        for name in entries:
            self._settle(name, report)

    def find(self, name: tree.Name) -> Axis | None:
        """The axis of a name, or None if its size is wrong. Raises Refused (E0202) if there is none."""
        self.used.add(name.text)
        if name.text in self.sizes:
            return self.sizes[name.text]
        raise refuse(
            "E0202",
            f"unknown axis `{name.text}`",
            name.span,
            help=suggestion(name.text, self.entries, "axes:") or f"declare it: `axis {name.text} = …`",
        )

    def _settle(self, name: str, report: Report) -> None:
        """Compute an axis after those that it depends on. The stack is explicit because chains may be long."""
        stack: list[tuple[str, Iterator[tree.Name]]] = []
        pending: set[str] = set()

        def enter(name: str) -> None:
            pending.add(name)
            stack.append((name, _mentioned(self.entries[name].value)))

        if name not in self.sizes:
            enter(name)
        while stack:
            current, mentioned = stack[-1]
            for other in mentioned:
                if other.text in pending:
                    report.error("E0311", f"the size of axis `{current}` depends on itself", other.span)
                    self.sizes[current] = None
                elif other.text in self.entries and other.text not in self.sizes:
                    enter(other.text)
                    break
            else:
                stack.pop()
                pending.discard(current)
                if current not in self.sizes:
                    self.sizes[current] = self._size(self.entries[current], report)

    def _size(self, entry: tree.Entry, report: Report) -> Axis | None:
        unknown = False

        def lookup(expression: tree.Path | tree.Call) -> Quantity:
            nonlocal unknown
            name = tree.single(expression)
            if isinstance(expression, tree.Call) and expression.name.text == "size":
                arguments = expression.arguments
                name = tree.single(arguments[0].value) if len(arguments) == 1 else None
            if name is None:
                raise refuse("E0306", "expected a number or the name of an axis", expression.span)
            found = self.find(name)
            unknown = unknown or found is None
            if found is None:
                return Quantity(Fraction(1))
            return Quantity(Fraction(found.size), formula=Size(found.name, found.size))

        try:
            quantity = constants.evaluate(entry.value, lookup)
            if unknown:
                return None
            if quantity.formula is not None:
                self.formulas[entry.key.text] = quantity.formula
            return Axis(entry.key.text, positive_integer(quantity, entry.value, f"axis `{entry.key.text}`"))
        except Refused as refused:
            report.refused(refused)
            return None


def positive_integer(quantity: Quantity, written: tree.Expression, what: str, largest: int = limits.AXIS_SIZE) -> int:
    """The quantity as a count from 1 to `largest`. Raises Refused (E0307 with a unit, E0310, E0007)."""
    value = quantity.value
    if quantity.dimension != PLAIN:
        raise refuse("E0307", f"{what} is a count and takes no unit", written.span, help="write a plain number")
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 1:
        raise refuse("E0310", f"{what} must be a positive integer, not {constants.shown(quantity)}", written.span)
    if value > largest:
        raise refuse(
            "E0007",
            f"{what} is too large: {int(value):,}",
            written.span,
            help=f"at most {largest:,}",
        )
    return int(value)


def _mentioned(expression: tree.Expression) -> Iterator[tree.Name]:
    """The names in the size expression of an axis."""
    stack: list[tree.Expression] = [expression]
    while stack:
        top = stack.pop()
        if isinstance(top, tree.Path):
            yield from top.parts[:1]
        elif isinstance(top, tree.Binary):
            stack += [top.right, top.left]
        elif isinstance(top, tree.Negative):
            stack.append(top.operand)
        elif isinstance(top, tree.Group):
            stack.append(top.inner)
        elif isinstance(top, tree.Call):
            stack += [argument.value for argument in top.arguments]
