"""Binds the arguments of calls to parameters, by position and then by name; the same for all calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from partita.dsl import tree
from partita.dsl.report import Report, listed, suggestion

REQUIRED: Final = object()  # the `default` of a parameter without one


def bind(
    call: tree.Call, parameters: Sequence[str], required: Collection[str], report: Report
) -> dict[str, tree.Expression] | None:
    """The expression for each parameter that is given, without arrows; None after reporting errors.

    E0209: too many, or an unknown one; E0210: a required one is missing; E0211: one is given twice.
    """
    name, errors = call.name.text, report.errors
    given: dict[str, tree.Expression] = {}
    positional = [a for a in call.arguments if a.name is None and not isinstance(a.value, tree.Arrow)]
    for parameter, argument in zip(parameters, positional, strict=False):
        given[parameter] = argument.value
    for argument in positional[len(parameters) :]:
        message = f"`{name}` takes {_counted(len(parameters))}, not {len(positional)}"
        report.error("E0209", message, argument.span, help=_form(name, parameters))
        break
    for argument in call.arguments:
        if argument.name is None:
            continue
        key = argument.name.text
        if key not in parameters:
            help = suggestion(key, parameters, "it takes") or _form(name, parameters)
            report.error("E0209", f"`{name}` takes no argument `{key}`", argument.name.span, help=help)
        elif key in given:
            report.error("E0211", f"argument `{key}` is given more than once", argument.span)
        else:
            given[key] = argument.value
    missing = [parameter for parameter in parameters if parameter in required and parameter not in given]
    if missing and report.errors == errors:
        message = f"`{name}` needs {'argument' if len(missing) == 1 else 'arguments'} {listed(missing)}"
        report.error("E0210", message, call.span, help=_form(name, parameters))
    return given if report.errors == errors else None


def _counted(count: int) -> str:
    return "no arguments" if not count else "1 argument" if count == 1 else f"{count} arguments"


def _form(name: str, parameters: Sequence[str]) -> str:
    return f"`{name}({', '.join(parameters)})`"
