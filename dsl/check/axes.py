"""Declarations of axes and constants → sizes and numbers.

Both may be computed from one another, by exact arithmetic: `axis ffn = 8 * embed / 3` must be a positive integer,
`const scale = 1 / sqrt(size(key))` may be any number, and follows the axis in proxies of other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from partita.dsl import limits
from partita.dsl.advice.foreign import VALUES
from partita.dsl.advice.report import Report, nearest, suggestion
from partita.dsl.check import constants
from partita.dsl.check.formulas import Formula, Size
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax import tree
from partita.dsl.syntax.units import PLAIN, Quantity
from partita.dsl.syntax.walk import nodes
from partita.dsl.types import Axis


def sized(call: tree.Call) -> tree.Name | None:
    """The axis in `size(axis)`; None if a call is none."""
    if call.name.text != "size" or len(call.arguments) != 1 or call.arguments[0].name is not None:
        return None
    return tree.single(call.arguments[0].value)


class Axes:
    """The axes and constants of a file by name. Looking one up marks it as used; a wrong one is None."""

    def __init__(
        self, entries: Mapping[str, tree.Entry], report: Report, constants: Mapping[str, tree.Entry] | None = None
    ) -> None:
        self.entries, self.constants = entries, constants or {}
        self.used: set[str] = set()
        self.sizes: dict[str, Axis | None] = {}
        self.formulas: dict[str, Size | Formula] = {}  # of the axes that are computed from others
        self.numbers: dict[str, Quantity | None] = {}
        for name in (*self.entries, *self.constants):
            self._settle(name, report)

    def __contains__(self, name: str) -> bool:
        """Whether an axis or a constant is called so."""
        return name in self.entries or name in self.constants

    def find(self, name: tree.Name) -> Axis | None:
        """The axis of a name, or None if its size is wrong. Raises Refused (E0202) if there is none."""
        self.used.add(name.text)
        if name.text in self.sizes:
            return self.sizes[name.text]
        if name.text in self.constants:
            help = f"declare it as one: `axis {name.text} = {self.constants[name.text].value.span.text}`"
            raise refuse("E0202", f"`{name.text}` is a constant, not an axis", name.span, help=help)
        raise refuse(
            "E0202",
            f"unknown axis `{name.text}`",
            name.span,
            help=suggestion(name.text, self.entries, "axes:") or f"declare it: `axis {name.text} = …`",
        )

    def _size(self, name: tree.Name) -> Quantity | None:
        axis = self.find(name)
        return Quantity(Fraction(axis.size), formula=Size(axis.name, axis.size)) if axis else None

    def number(self, expression: tree.Path | tree.Call) -> Quantity:
        """The value of a constant; a `Lookup` of `dsl.check.constants`. Raises Refused (E0306; empty if wrong)."""
        axis = sized(expression) if isinstance(expression, tree.Call) else None
        size = self._size(axis) if axis is not None and axis.text in self.entries else None
        if size is not None:
            return size
        name = tree.single(expression)
        if name is None or name.text not in self.constants:
            head = expression.parts[0] if isinstance(expression, tree.Path) else expression.name
            near = nearest(head.text, self.constants)
            help = f"did you mean `{near}`?" if near else VALUES.get(head.text)
            raise refuse("E0306", f"expected a number, not `{head.text}`", expression.span, help=help)
        self.used.add(name.text)
        value = self.numbers[name.text]
        if value is None:
            raise Refused(())
        return value

    def _settle(self, name: str, report: Report) -> None:
        """Compute an axis or a constant after those that it depends on. The stack is explicit: chains may be long."""
        stack: list[tuple[str, Iterator[tree.Name]]] = []
        pending: set[str] = set()

        def enter(name: str) -> None:
            pending.add(name)
            value = self._entry(name).value
            stack.append((name, (node.parts[0] for node in nodes(value) if isinstance(node, tree.Path))))

        if not self._settled(name):
            enter(name)
        while stack:
            current, mentioned = stack[-1]
            for other in mentioned:
                if other.text in pending:
                    what = f"constant `{current}`" if current in self.constants else f"the size of axis `{current}`"
                    report.error("E0311", f"{what} depends on itself", other.span)
                    self._set(current, None)
                elif other.text in self and not self._settled(other.text):
                    enter(other.text)
                    break
            else:
                stack.pop()
                pending.discard(current)
                if not self._settled(current):
                    self._set(current, self._computed(self._entry(current), report))

    def _entry(self, name: str) -> tree.Entry:
        return self.constants[name] if name in self.constants else self.entries[name]

    def _settled(self, name: str) -> bool:
        return name in self.sizes or name in self.numbers

    def _set(self, name: str, value: Quantity | None) -> None:
        if name in self.constants:
            self.numbers[name] = value
        else:
            self.sizes[name] = Axis(name, int(value.value)) if value is not None else None
            if value is not None and value.formula is not None:
                self.formulas[name] = value.formula

    def _computed(self, entry: tree.Entry, report: Report) -> Quantity | None:
        """The value of a declaration whose names are settled; None after reporting an error, here or earlier."""
        name, unknown = entry.key.text, False

        def lookup(expression: tree.Path | tree.Call) -> Quantity:
            nonlocal unknown
            mentioned = tree.single(expression)
            if isinstance(expression, tree.Call):
                mentioned = sized(expression)
            if mentioned is None:
                raise refuse("E0306", "expected a number or the name of an axis", expression.span)
            if isinstance(expression, tree.Path) and mentioned.text in self.constants:
                self.used.add(mentioned.text)
                known = self.numbers[mentioned.text]
                unknown = unknown or known is None
                return known or Quantity(Fraction(1))
            if isinstance(expression, tree.Path) and mentioned.text not in self.entries:
                help = suggestion(mentioned.text, [each for each in (*self.entries, *self.constants) if each != name])
                raise refuse("E0202", f"unknown axis or constant `{mentioned.text}`", expression.span, help=help)
            size = self._size(mentioned)
            unknown = unknown or size is None
            return size or Quantity(Fraction(1))

        with report:
            computed = (each for each in nodes(entry.value) if isinstance(each, tree.Call) and sized(each) is None)
            call = next(computed, None) if name in self.entries else None
            if call is not None:  # sizes follow from others, of which proxies have smaller ones
                raise refuse("E0306", "expected a number or the name of an axis", call.span)
            quantity = constants.evaluate(entry.value, lookup)
            if name in self.entries and not unknown:
                positive_integer(quantity, entry.value, f"axis `{name}`")
            return None if unknown else quantity
        return None


def positive_integer(quantity: Quantity, written: tree.Expression, what: str, largest: int = limits.AXIS_SIZE) -> int:
    """The quantity as a count from 1 to `largest`. Raises Refused (E0307 with a unit, E0310, E0007)."""
    value = quantity.value
    if quantity.dimension != PLAIN:
        whole = isinstance(value, Fraction) and value.denominator == 1
        help = f"write `{int(value):_}`" if whole else "write a plain number"
        raise refuse("E0307", f"{what} is a count and takes no unit", written.span, help=help)
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 1:
        message = f"{what} must be a positive integer, not {constants.shown(quantity)}"
        raise refuse(
            "E0310", message, written.span, help=None if "/" in written.span.text else "a whole number of 1 or more"
        )
    if value > largest:
        raise refuse("E0007", f"{what} is too large: {int(value):,}", written.span, help=f"at most {largest:,}")
    return int(value)
