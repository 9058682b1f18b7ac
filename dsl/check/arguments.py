"""Binds the arguments of calls to parameters, by position and then by name; the same for all calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Final

from partita.dsl.advice.report import Report, listed, suggestion
from partita.dsl.syntax import tree

MOST_SHOWN = 8  # parameters of a call
REQUIRED: Final = object()  # the `default` of a parameter without one


def parameters_of_call(call: tree.Call, names: Iterable[str]) -> list[str | None]:
    """The parameter of each argument: those without a name take the parameters in order; None where there is none, and
    for arrows.
    """
    rest = iter(names)
    return [
        each.name.text if each.name is not None else None if isinstance(each.value, tree.Arrow) else next(rest, None)
        for each in call.arguments
    ]


def bind(
    call: tree.Call,
    parameters: Sequence[str],
    required: Collection[str],
    report: Report,
    complete: Callable[[Mapping[str, tree.Expression], Sequence[str]], str | None] = lambda given, missing: None,
) -> dict[str, tree.Expression] | None:
    """The expression for each parameter that is given, without arrows; None after reporting errors.

    E0209: too many, or an unknown one; E0210: a required one is missing, for which `complete` may have a help; E0211:
    one is given twice.
    """
    name, errors = call.name.text, report.errors
    given: dict[str, tree.Expression] = {}
    positional = [a for a in call.arguments if a.name is None and not isinstance(a.value, tree.Arrow)]
    for parameter, argument in zip(parameters, positional, strict=False):
        given[parameter] = argument.value
    for argument in positional[len(parameters) :]:
        message = f"`{name}` takes {_counted(len(parameters))}, not {len(positional)}"
        report.error("E0209", message, argument.span, help=form(name, parameters, required))
        break
    for place, argument in enumerate(call.arguments):
        if argument.name is None:
            continue
        key = argument.name.text
        if key not in parameters:
            help = suggestion(key, parameters, "it takes") or form(name, parameters, required)
            report.error("E0209", f"`{name}` takes no argument `{key}`", argument.name.span, help=help)
        elif key in given:
            after = list(takewhile(lambda each: each.name is None, call.arguments[place + 1 :]))
            if any(each.value is given[key] for each in after):
                at = argument.value.span.to(after[-1].span)
                report.error(
                    "E0211",
                    f"`{key}` is given several values",
                    at,
                    help=f"a list is `{key} = [{at.text}]`; any other argument after it is named",
                )
            else:
                report.error("E0211", f"argument `{key}` is given more than once", argument.span)
        else:
            given[key] = argument.value
    missing = [parameter for parameter in parameters if parameter in required and parameter not in given]
    if missing and report.errors == errors:
        message = f"`{name}` needs {'argument' if len(missing) == 1 else 'arguments'} {listed(missing)}"
        report.error("E0210", message, call.span, help=complete(given, missing) or form(name, parameters, required))
    return given if report.errors == errors else None


def _counted(count: int) -> str:
    return "no arguments" if not count else "1 argument" if count == 1 else f"{count} arguments"


def form(name: str, parameters: Sequence[str], required: Collection[str]) -> str:
    """How a call looks: with all that it takes, or of much only what it needs."""
    shown = list(parameters)
    if len(shown) > MOST_SHOWN:
        shown = [*(each for each in parameters if each in required), "…"]
    return f"`{name}({', '.join(shown)})`"
