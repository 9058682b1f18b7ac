"""Diagnostics for those who call Python functions: advice names their arguments in place of a command's options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import evolve

from partita.dsl.diagnostic import Diagnostic, Refused

# What advice says to users of commands, and what it says to callers of functions. What has no argument is left out, and
# whole commands stay: they can be run.
WORDS = {
    r"--changed-data\b": "changed_data=True",
    r"--allow-python\b": "allow_python=True",
    r"`--run-dir (?:'([^']*)'|([^`']+))`": r'`run_dir="\1\2"`',
    r"`?--run-dir\b`?": "`run_dir`",
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


@contextmanager
def called_from_python() -> Iterator[None]:
    """What is refused meanwhile is said as functions say it. Also a decorator."""
    try:
        yield
    except Refused as refused:
        refused.retell(in_python)
        raise
