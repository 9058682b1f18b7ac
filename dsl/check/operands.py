"""The arguments of a function, each read as the kind that its slot takes.

Methods return None if they, or an earlier check, reported an error; some raise Refused instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Protocol

from partita.dsl.advice import corrected_calls
from partita.dsl.advice.corrected_values import truth
from partita.dsl.advice.foreign import meant
from partita.dsl.advice.quotes import without_quotes
from partita.dsl.advice.report import Report, listed, nearest
from partita.dsl.check import constants
from partita.dsl.check.arguments import REQUIRED, bind
from partita.dsl.config.builtins import OneOf
from partita.dsl.diagnostic import refuse
from partita.dsl.functions import convolution, reshaping, routing
from partita.dsl.functions.signatures import Arrow, Constant, Function, Slot, Tensor
from partita.dsl.spec import Call
from partita.dsl.syntax import tree
from partita.dsl.syntax.units import PLAIN, RATIO, Quantity
from partita.dsl.types import DTYPES, Axis

EXAMPLES = reshaping.EXAMPLES | convolution.EXAMPLES | routing.EXAMPLES


class Reader(Protocol):
    """Evaluates expressions; returns None after reporting errors."""

    def tensor(self, written: tree.Expression) -> Tensor | None:
        """A tensor."""

    def one(self, written: tree.Expression) -> Tensor | Constant | None:
        """A tensor or a number."""

    def axis(self, name: tree.Name) -> Axis | None:
        """An axis."""

    def kinds(self, written: tree.Expression) -> frozenset[str]:
        """The kinds of slots that might take it."""

    def setting(self, written: tree.Expression, kind: OneOf, name: str) -> Call | None:
        """A call of one of the signatures, of the argument `name`."""

    def number_of(self, written: tree.Path | tree.Call) -> Quantity:
        """The value of a name or call that must be a number. Raises Refused."""


class Operands:
    """Reads the arguments of calls in one scope."""

    def __init__(self, expressions: Reader, report: Report) -> None:
        self.expressions, self.report = expressions, report

    def bound(self, written: tree.Call, slots: Sequence[Slot]) -> dict[str, Any] | None:
        """The arguments by slot, in the order of the slots."""
        required = {slot.name for slot in slots if slot.default is REQUIRED}

        def complete(expressions: Mapping[str, tree.Expression], missing: Sequence[str]) -> str | None:
            """Help that adds what is missing, if all of it is known."""
            operands = [
                self.expressions.one(expressions[slot.name])
                for slot in slots
                if slot.name in expressions and slot.is_value
            ]
            tensors = [each for each in operands if isinstance(each, Tensor)]
            axes = {name: corrected_calls.likely(written.name.text, name, tensors) for name in missing}
            return corrected_calls.completed(written, axes) if all(axes.values()) else None

        expressions = bind(written, [slot.name for slot in slots], required, self.report, complete)
        if expressions is None:
            return None
        self.in_order(written, slots)
        values: dict[str, Any] = {}
        sound = True
        for slot in slots:
            if slot.name not in expressions:
                values[slot.name] = slot.default
                continue
            values[slot.name] = None
            with self.report:
                values[slot.name] = self.argument(expressions[slot.name], slot, values)
            sound = sound and values[slot.name] is not None
        return values if sound else None

    def in_order(self, written: tree.Call, slots: Sequence[Slot]) -> None:
        """Raises Refused (E0212) if two arguments each are what the other should be, such as a number and a tensor."""
        positional = [a for a in written.arguments if a.name is None and not isinstance(a.value, tree.Arrow)]
        known = [
            (each, slot, self.expressions.kinds(each.value)) for each, slot in zip(positional, slots, strict=False)
        ]
        for (one, first, a), (other, second, b) in combinations(known, 2):
            if first.kind in b - a and second.kind in a - b:
                message = f"`{written.name.text}` does not take its arguments in this order"
                raise refuse("E0212", message, written.span, help=corrected_calls.exchanged(written, one, other))

    def argument(self, written: tree.Expression, slot: Slot, before: Mapping[str, Any]) -> Any:
        """One argument, as its slot takes it, after those `before` it."""
        match slot.kind:
            case OneOf():
                return self.expressions.setting(written, slot.kind, slot.name)
            case "tensor":
                return self.expressions.tensor(written)
            case "operand":
                return self.expressions.one(written)
            case "axis":
                return self.expressions.axis(self.axis_name(written, slot.name, before))
            case "axes":
                return self.axes(written, slot.name, before)
            case "dtype":
                name = tree.single(written)
                if name is None or name.text not in DTYPES:
                    near = (meant(name.text, DTYPES) or nearest(name.text, DTYPES)) if name else None
                    help = f"did you mean `{near}`?" if near else without_quotes(written, DTYPES)
                    raise refuse("E0207", f"`{slot.name}` is one of {listed(DTYPES, 'or')}", written.span, help=help)
                return name.text
            case "flag":
                if not isinstance(bare := tree.bare(written), tree.Boolean):
                    help = truth(written)
                    raise refuse("E0212", f"`{slot.name}` is `true` or `false`", written.span, help=help)
                return bare.value
            case "numbers":
                return self.numbers(written, slot.name)
            case _:
                return self.number(written, slot.name)

    def number(self, written: tree.Expression, what: str) -> Any:
        """A number without a unit. Raises Refused."""
        quantity = constants.evaluate(written, self.expressions.number_of)
        if quantity.dimension not in (PLAIN, RATIO):
            raise refuse("E0307", f"`{what}` must be a number without a unit", written.span)
        return quantity.value

    def numbers(self, written: tree.Expression, what: str) -> Any:
        """A number, or a tuple for a list. Recursion is as deep as lists are nested, which the parser bounds."""
        bare = tree.bare(written)
        if isinstance(bare, tree.List):
            return tuple(self.numbers(item, what) for item in bare.items)
        return self.number(written, what)

    def axis_name(self, written: tree.Expression, what: str, before: Mapping[str, Any] | None = None) -> tree.Name:
        """The single name of an axis; `before` are the arguments that are known. Raises Refused (E0212)."""
        name = tree.single(written)
        if name is None:
            help = without_quotes(written)
            if isinstance(written, tree.Number | tree.Negative):
                help = convolution.SIZES.get(what) or self.by_position(written, before or {})
            raise refuse("E0212", f"`{what}` must be the name of an axis", written.span, help=help)
        return name

    def by_position(self, written: tree.Expression, before: Mapping[str, Any]) -> str:
        """Help for an axis that is given by its position, in the order of the first tensor."""
        by_name = "axes are given by name, not by position"
        first = next((value for value in before.values() if isinstance(value, Tensor)), None)
        position = constants.evaluate(written, self.expressions.number_of).value
        if first is None or position != int(position) or not -len(first.type.axes) <= position < len(first.type.axes):
            return by_name
        return f"write `{first.type.names[int(position)]}`: {by_name}"

    def axes(
        self, written: tree.Expression, what: str, before: Mapping[str, Any] | None = None
    ) -> tuple[Axis, ...] | None:
        """One axis, or a list of them; `before` are the arguments that are known."""
        bare = tree.bare(written)
        items = bare.items if isinstance(bare, tree.List) else (bare,)
        resolved = [self.expressions.axis(self.axis_name(item, what, before)) for item in items]
        axes = tuple(axis for axis in resolved if axis is not None)
        seen: set[str] = set()
        for axis, item in zip(axes, items, strict=False):
            if axis.name in seen:
                raise refuse("E0216", f"axis `{axis.name}` appears twice in `{what}`", item.span)
            seen.add(axis.name)
        return axes if len(axes) == len(resolved) else None

    def all_tensors(self, written: tree.Call) -> dict[str, Any] | None:
        """The positional arguments of a function that takes any number of tensors."""
        tensors = []
        for argument in written.arguments:
            if argument.name is not None:
                message = f"`{written.name.text}` takes no argument `{argument.name.text}`"
                raise refuse("E0209", message, argument.name.span)
            if not isinstance(argument.value, tree.Arrow):
                tensors.append(self.expressions.tensor(argument.value))
        if not tensors:
            raise refuse("E0210", f"`{written.name.text}` needs tensors", written.span)
        return None if any(tensor is None for tensor in tensors) else {"tensors": tuple(tensors)}

    def arrows(self, written: tree.Call, function: Function) -> tuple[Arrow, ...] | None:
        """The arrows among the arguments."""
        arrows = [a.value for a in written.arguments if isinstance(a.value, tree.Arrow) and a.name is None]
        minimum, maximum = function.arrows
        if maximum == 0 and arrows:
            raise refuse("E0223", f"`{function.name}` takes no arrow", arrows[0].span)
        if len(arrows) < minimum:
            raise refuse(
                "E0223", f"`{function.name}` needs an arrow", written.span, help=f"`{EXAMPLES[function.name]}`"
            )
        if maximum is not None and len(arrows) > maximum:
            raise refuse("E0223", f"`{function.name}` takes one arrow", arrows[maximum].span)
        resolved = []
        for arrow in arrows:
            sides: list[tuple[Axis, ...]] = []
            for side in (arrow.left, arrow.right):
                bare = tree.bare(side)
                items = bare.items if isinstance(bare, tree.List) else (bare,)
                axes = [self.expressions.axis(self.axis_name(item, "->")) for item in items]
                if any(axis is None for axis in axes):
                    return None
                sides.append(tuple(axis for axis in axes if axis is not None))
            resolved.append(Arrow(sides[0], sides[1], arrow.span))
        return tuple(resolved)
