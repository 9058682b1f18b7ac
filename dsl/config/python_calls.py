"""Diagnostics for those who call Python functions: advice names their arguments in place of a command's options."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import wraps
from inspect import signature
from os import PathLike, fspath
from typing import ParamSpec, TypeVar

from attrs import evolve

from partita.dsl.advice.foreign import FOLLOWS, OPTIONS
from partita.dsl.advice.report import listed, nearest
from partita.dsl.config.misplaced_settings import overrides_of
from partita.dsl.diagnostic import Diagnostic, Refused

P = ParamSpec("P")
T = TypeVar("T")

# What advice says to users of commands, and what it says to callers of functions. What has no argument is left out, and
# whole commands stay: they can be run.
WORDS = {
    r"--changed-data\b": "changed_data=True",
    r"--allow-python\b": "allow_python=True",
    r"`--run-dir (?:'([^']*)'|([^`']+))`": r'`run_dir="\1\2"`',
    r"`?--run-dir\b`?": "`run_dir`",
    r"`--loss \"([^\"]*)\"`": r'`loss="\1"`',
    r"`(train\.steps=\d+)`": r'`"\1"`',
    r"--devices (\d+)": r"devices=\1",
    r"--within (\d+)": r"within=\1",
    r"`--outputs`": "`names`",
    r"`--from`|--from\b": "`run`",
    r"; or leave out `--keep-mesh`, and other sizes are searched": "",
    r", or pass a directory that contains both as --root": "",
    r"`partita run --transport virtual`|`partita run( FILE)?`": "`partita.train`",
}


def in_python(diagnostic: Diagnostic) -> Diagnostic:
    """The diagnostic as functions give it."""
    if diagnostic.advice is None:
        return diagnostic
    help = diagnostic.advice
    for option, argument in WORDS.items():
        help = re.sub(option, argument, help)
    return diagnostic if help == diagnostic.advice else evolve(diagnostic, help=help)


def called_from_python(function: Callable[P, T]) -> Callable[P, T]:
    """A public function: what it refuses is said as functions say it, and an argument that it has not is refused with
    what may be meant (TypeError).
    """
    names = signature(function).parameters.keys()

    @wraps(function)
    def called(*args: P.args, **keywords: P.kwargs) -> T:
        for name, value in keywords.items():
            if name not in names:
                raise TypeError(
                    _unknown(function.__name__, names, name, value, keywords.get("path", next(iter(args), None)))
                )
        try:
            return function(*args, **keywords)
        except Refused as refused:
            refused.retell(in_python)
            raise

    return called


def _unknown(function: str, names: Collection[str], name: str, value: object, path: object) -> str:
    """What is said of an argument that a function has not; `path` is the first that it was given."""
    if "inputs" in names and "path" not in names:
        return f'inputs are given as one mapping, by name: `{{"{name}": …}}`'
    message = f"`{function}` has no argument `{name}`"
    near = nearest(name, names) or next((each for each in OPTIONS.get(name, ()) if each in names), None)
    if near is not None:
        return f"{message}; did you mean `{near}`?"
    if "parameters" not in names and "weights" not in names:  # of what is trained, settings say nothing
        file = fspath(path) if isinstance(path, str | PathLike) else ""
        text = str(value).lower() if isinstance(value, bool) else str(value)
        written, wrong = overrides_of(str(file), name, text if isinstance(value, str | int | float) else None)
        if written:
            strings = " or ".join(f'"{each}"' for each in written)
            return f"{message}; {f'{wrong}; ' if wrong else ''}settings follow the file as strings: {strings}"
    others = [each for each in names if each not in ("path", "overrides")]
    return f"{message}; {FOLLOWS.get(name) or f'there are {listed(others)}'}"
