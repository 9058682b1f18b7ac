"""Checks calls and values outside of models against the tables of `partita.dsl.config.builtins`.

The results are complete (defaults filled in), in base units, and need no further lookup.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from typing import Any

from attrs import frozen

from partita.dsl.advice.corrected_calls import completed
from partita.dsl.advice.corrected_values import SAMPLES, as_call, call_of, truth, with_unit
from partita.dsl.advice.foreign import FOLLOWS, meant
from partita.dsl.advice.quotes import in_quotes, without_quotes
from partita.dsl.advice.report import Report, listed, nearest, suggestion
from partita.dsl.check import constants
from partita.dsl.check.arguments import REQUIRED, bind
from partita.dsl.check.axes import Axes
from partita.dsl.config.builtins import (
    AxisName,
    AxisNames,
    Flag,
    Keyword,
    Kind,
    ListOf,
    MeshAxisName,
    Number,
    OneOf,
    OrWord,
    PythonName,
    Setting,
    SharesOf,
    Signature,
    Text,
    TextFile,
)
from partita.dsl.config.python_names import check_mentioned, check_name
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call, PythonFunction, Share
from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Source, Span
from partita.dsl.syntax.units import EXAMPLES, PLAIN, RATIO, Quantity


@frozen(eq=False)
class Settings:
    """Checks settings, which may name axes, constants and the given mesh axes (None: any).

    `beside` reads a text file that one of the .par files names.
    """

    report: Report
    axes: Axes
    beside: Callable[[str, Span], Source]
    mesh_axes: Collection[str] | None = ()

    def call(
        self, call: tree.Call, signatures: Mapping[str, Signature], what: str, lookup: constants.Lookup | None = None
    ) -> Call | None:
        """Check a call of one of the signatures, which messages call `what`; None after reporting errors.

        `lookup` resolves names in numbers, by default those of constants.
        """
        signature = signatures.get(call.name.text)
        if signature is None:
            help = called(call.name.text, signatures)
            self.report.error("E0309", f"unknown {what} `{call.name.text}`", call.name.span, help=help)
            return None
        for argument in call.arguments:
            if isinstance(argument.value, tree.Arrow):
                shares = signature.settings and isinstance(signature.settings[0].kind, SharesOf)
                help = "its arrows stand in a list: `[… -> 70%, … -> 30%]`" if shares else None
                self.report.error("E0306", f"`{signature.name}` takes no arrow", argument.span, help=help)
                return None

        def complete_call(expressions: object, missing: Collection[str]) -> str | None:
            if signature.example and not call.arguments:
                return f"write `{signature.example}`"
            return (
                completed(call, {each: [SAMPLES[each]] for each in missing}) if SAMPLES.keys() >= {*missing} else None
            )

        expressions = bind(call, signature.names, signature.required, self.report, complete_call)
        if expressions is None:
            return None
        arguments, complete = {}, True
        for setting in signature.settings:
            if setting.name not in expressions:
                arguments[setting.name] = setting.default
                continue
            if _is_none(expressions[setting.name], setting):
                arguments[setting.name] = None
                continue
            value = self.value(expressions[setting.name], setting.kind, f"`{setting.name}`", lookup)
            complete = complete and value is not None
            arguments[setting.name] = value
        if complete and signature.ordered is not None:
            low, high = signature.ordered
            if arguments[low] > arguments[high]:
                message = (
                    f"`{high}` is less than `{low}`, which it includes: {arguments[high]} of {arguments[low]} steps"
                )
                help = f"`{high}` is at least {arguments[low]}, most often `train.steps`"
                self.report.error("E0308", message, expressions[high].span, help=help)
                return None
        return Call(signature.name, arguments, call.span) if complete else None

    def value(self, written: tree.Expression, kind: Kind, what: str, lookup: constants.Lookup | None = None) -> Any:
        """A value of a kind; None after reporting errors. Messages call it `what`."""
        with self.report:
            return self._convert(tree.bare(written), kind, what, lookup or self.axes.number)
        return None

    def _convert(self, written: tree.Expression, kind: Kind, what: str, lookup: constants.Lookup) -> Any:
        match kind:
            case Number():
                if isinstance(written, tree.Boolean | tree.String | tree.List):
                    example = f"such as `{EXAMPLES[kind.dimension]}`" if kind.dimension != PLAIN else None
                    raise refuse("E0306", f"{what} is a number", written.span, help=without_quotes(written) or example)
                return number(constants.evaluate(written, lookup), kind, written, what)
            case OrWord(inner, word):
                single = tree.single(written)
                if single is not None and single.text == word:
                    return word
                if isinstance(written, tree.String):
                    message = f"{what} is a number, or `{word}`"
                    raise refuse("E0306", message, written.span, help=without_quotes(written))
                return self._convert(written, inner, f"{what}, if not `{word}`,", lookup)
            case Flag():
                if isinstance(written, tree.Boolean):
                    return written.value
                raise refuse("E0306", f"{what} is `true` or `false`", written.span, help=truth(written))
            case Text():
                if isinstance(written, tree.String) and written.value and "\0" not in written.value:
                    return written.value
                raise refuse("E0306", f"{what} is a string", written.span, help=in_quotes(written))
            case TextFile():
                return self.beside(self._convert(written, Text(), what, lookup), written.span)
            case PythonName():
                path, _, name = self._convert(written, Text(), what, lookup).rpartition(":")
                if not path:
                    message = f"{what} is a Python file and the name of a function in it"
                    raise refuse("E0306", message, written.span, help='such as `"source.py:row"`')
                check_name(name, written.span)
                source = self.beside(path, written.span)
                check_mentioned(source, path, name, written.span)
                return PythonFunction(source, name, written.span)
            case Keyword(choices):
                return self._word(written, choices, f"{what} is one of {listed(choices, 'or')}")
            case AxisName():
                name = self._word(written, self.axes.entries, f"{what} is the name of an axis", "E0202", "axis")
                self.axes.used.add(name)
                return name
            case AxisNames(count):
                if not isinstance(written, tree.List):
                    return self._convert(written, AxisName(), what, lookup)
                names = [self._convert(tree.bare(each), AxisName(), what, lookup) for each in written.items]
                if len(set(names)) != count:
                    message = f"{what} is the name of an axis, or a list of {count}"
                    raise refuse("E0306", message, written.span, help=f"the axes: {listed(self.axes.entries)}")
                return tuple(names)
            case MeshAxisName():
                message = f"{what} is the name of a mesh axis"
                single = tree.single(written)
                if self.mesh_axes is None and single is not None:
                    return single.text
                return self._word(written, self.mesh_axes or (), message, "E0313", "mesh axis")
            case ListOf(inner, count):
                if not isinstance(written, tree.List) or len(written.items) != count:
                    help = f"such as `{kind.example}`" if kind.example else None
                    raise refuse("E0306", f"{what} is a list of {count} numbers", written.span, help=help)
                return tuple(self._convert(tree.bare(item), inner, what, lookup) for item in written.items)
            case SharesOf(signatures):
                return self._shares(written, signatures, what, lookup)
            case OneOf():
                return self._nested(written, kind, what, lookup)

    def _word(
        self, written: tree.Expression, choices: Collection[str], message: str, code: str = "E0306", kind: str = ""
    ) -> str:
        name = tree.single(written)
        if name is None:
            help = without_quotes(written, choices) or (suggestion(written.span.text, choices) if kind else None)
            raise refuse("E0306", message, written.span, help=help)
        if name.text not in choices:
            headline = f"unknown {kind} `{name.text}`" if kind else f"{message}, not `{name.text}`"
            raise refuse(code, headline, name.span, help=suggestion(name.text, choices))
        return name.text

    def _nested(self, written: tree.Expression, kind: OneOf, what: str, lookup: constants.Lookup) -> Call | None:
        noun = what.strip("`")
        if isinstance(written, tree.Call):
            return self.call(written, kind.signatures, noun, lookup)
        name = tree.single(written)
        if name is not None and (kind.number is None or name.text not in self.axes.constants):
            if name.text not in kind.signatures:
                help = called(name.text, kind.signatures, self.axes.constants if kind.number is not None else ())
                raise refuse("E0309", f"unknown {noun} `{name.text}`", name.span, help=help)
            if kind.bare:
                return self.call(tree.Call(name, (), span=name.span), kind.signatures, noun, lookup)
            help = f"write `{call_of(kind.signatures[name.text])}`"
            raise refuse("E0306", f"`{name.text}` must be called", name.span, help=help)
        if kind.number is not None and not isinstance(written, tree.String | tree.List | tree.Boolean):
            (setting,) = kind.signatures[kind.number].settings
            value = self._convert(written, setting.kind, what, lookup)
            return Call(kind.number, {setting.name: value}, written.span)
        help = as_call(written, kind) or f"such as `{noun} = {call_of(next(iter(kind.signatures.values())))}`"
        number = "a number, or " if kind.number is not None else ""
        choice = "one of" if kind.bare or len(kind.signatures) > 1 else "a call of"
        message = f"{what} is {number}{choice} {listed(kind.signatures, 'or')}"
        raise refuse("E0306", message, written.span, help=help)

    def _shares(
        self, written: tree.Expression, signatures: Mapping[str, Signature], what: str, lookup: constants.Lookup
    ) -> tuple[Share, ...] | None:
        """Calls with their shares: percentages of 100%, or plain numbers of which only the proportions count."""
        items = written.items if isinstance(written, tree.List) else ()
        arrows = [item for item in items if isinstance(item, tree.Arrow)]
        if not arrows or len(arrows) < len(items):
            wrong = next((item for item in items if not isinstance(item, tree.Arrow)), written)
            first = next(iter(signatures.values()))
            help = f"such as `[{first.name}(…) -> 70%, {first.name}(…) -> 30%]`"
            raise refuse("E0306", f"{what} is a list of calls, each with its share", wrong.span, help=help)
        calls = [self.value(arrow.left, OneOf(signatures), "source", lookup) for arrow in arrows]
        shares = [constants.evaluate(tree.bare(arrow.right), lookup) for arrow in arrows]
        for arrow, share in zip(arrows, shares, strict=True):
            number(share, _SHARE if share.dimension == RATIO else _PART, arrow.right, "a share")
            if share.dimension != shares[0].dimension:
                message = "shares are percentages, or plain numbers, but not some of each"
                alike = with_unit(share, _SHARE if shares[0].dimension == RATIO else _PART, arrow.right)
                raise refuse("E0307", message, arrow.right.span, help=alike)
        total = sum(Fraction(share.value) for share in shares)
        if shares[0].dimension == RATIO and not -TOLERANCE <= total - 1 <= TOLERANCE:
            message = f"the shares add up to {float(total * 100):g}%, not 100%"
            help = "plain numbers need not add up to anything: `-> 2`, `-> 1`"
            raise refuse("E0308", message, written.span, help=help)
        if any(call is None for call in calls):
            return None
        return tuple(Share(call, float(share.value / total)) for call, share in zip(calls, shares, strict=True))

    def table(
        self, entries: Collection[tree.Entry], signature: Signature, others: Collection[str] = ()
    ) -> dict[str, Any] | None:
        """The entries of a table by key, with defaults, except keys in `others`. None after reporting errors."""
        report, errors = self.report, self.report.errors
        settings = {setting.name: setting for setting in signature.settings}
        values: dict[str, Any] = {}
        seen: dict[str, tree.Entry] = {}
        for entry in entries:
            key = entry.key.text
            if key in seen:
                notes = [f"the first is at {seen[key].key.span.place}"]
                report.error("E0304", f"`{key}` is given twice", entry.key.span, notes)
                continue
            seen[key] = entry
            if key in settings:
                values[key] = self.entry(entry.value, settings[key])
            elif key not in others:
                choices = [*settings, *others]
                help = FOLLOWS.get(key) if meant(key, choices) is None else None
                help = help or suggestion(key, choices, "there are")
                report.error("E0303", f"`{signature.name}` has no entry `{key}`", entry.key.span, help=help)
        for setting in signature.settings:
            if setting.name not in seen and setting.default is not REQUIRED:
                values[setting.name] = setting.default
        return values if report.errors == errors else None

    def entry(self, written: tree.Expression, setting: Setting) -> Any:
        """The value of an entry of a table; None after reporting errors, or for what is left out."""
        if _is_none(written, setting):
            return None
        zero = isinstance(setting.kind, Number) and setting.kind.minimum == 0  # a value as any other
        nothing = NOTHING[:-2] if zero else NOTHING
        if setting.default is None and written.span.text in nothing and setting.kind != Flag():
            message = f"`{setting.name}` is left out by `none`"
            self.report.error("E0306", message, written.span, help="write `none`, or leave it out")
            return None
        return self.value(written, setting.kind, f"`{setting.name}`")


# What stands for a setting that is left out elsewhere.
NOTHING = ("None", "null", "nil", "false", "False", "off", "0", "0.0")
# Of a list of shares: percentages and plain numbers; and how far percentages such as 33.3% may be from 100%.
_SHARE = Number(RATIO, exclusive_minimum=0, maximum=1)
_PART = Number(exclusive_minimum=0, maximum=1e9)
TOLERANCE = Fraction(1, 10**9)


def called(name: str, signatures: Mapping[str, Signature], more: Collection[str] = ()) -> str | None:
    """Help for an unknown name: one that other frameworks call so, a similar one (also of `more`), or a list."""
    same = next((each.name for each in signatures.values() if name.lower() in each.others), None)
    if same is not None:
        return f"did you mean `{same}`?"
    near = nearest(name, [*more, *signatures]) or meant(name, [*more, *signatures])
    follows = FOLLOWS.get(name.lower()) if near is None else None
    return follows or suggestion(name, [*more, *signatures]) or f"there are {listed(sorted(signatures))}"


def _is_none(written: tree.Expression, setting: Setting) -> bool:
    """Whether `none` is written, for a setting whose default is None."""
    name = tree.single(written)
    return setting.default is None and name is not None and name.text == "none"


def number(quantity: Quantity, kind: Number, written: tree.Expression, what: str) -> float | int:
    """A quantity as a number in the base unit of its kind. Raises Refused (E0306 to E0308)."""
    value = quantity.value
    help: str | None
    if quantity.dimension != kind.dimension:
        help = with_unit(quantity, kind, written) or f"such as `{EXAMPLES[kind.dimension]}`"
        if kind.dimension == PLAIN:
            message = f"{what} is a plain number, without a unit"
        else:
            message = f"{what} is a {kind.dimension}, and needs its unit"
        raise refuse("E0307", message, written.span, help=help)
    if kind.integer and not (isinstance(value, Fraction) and value.denominator == 1):
        raise refuse("E0306", f"{what} is an integer, not {constants.shown(quantity)}", written.span)
    unit = "%" if kind.dimension == "ratio" else ""
    for bound, ok, phrase, allowed in (
        (kind.minimum, operator.ge, "at least", "`{}` or more"),
        (kind.exclusive_minimum, operator.gt, "above", None),
        (kind.maximum, operator.le, "at most", "`{}` or less"),
        (kind.exclusive_maximum, operator.lt, "below", None),
    ):
        # As a float, a number just below 1 may be 1.
        if bound is not None and not (ok(value, bound) and (kind.integer or ok(float(value), bound))):
            limit = f"{bound * 100 if unit else bound:g}{unit}" if bound < 1e6 else f"{bound}"
            help = allowed and allowed.format(limit)
            raise refuse("E0308", f"{what} must be {phrase} {limit}", written.span, help=help)
    return int(value) if kind.integer else float(value)
