"""Help for names and numbers in quotes, and for strings without."""

from __future__ import annotations

import re
from collections.abc import Collection

from partita.dsl.syntax import tree

NUMBER = re.compile(r"-?[0-9][0-9_]*(\.[0-9]+)?([eE][+-]?[0-9]+)?[A-Za-z/%]*")


def without_quotes(written: tree.Expression, choices: Collection[str] | None = None) -> str | None:
    """Help for a string where a name, one of the `choices`, or a number is needed."""
    bare = tree.bare(written)
    if not isinstance(bare, tree.String):
        return None
    name = bare.value
    if NUMBER.fullmatch(name) or (name.isascii() and name.isidentifier() and (choices is None or name in choices)):
        return f"write `{name}`, without quotes"
    return None


def in_quotes(written: tree.Expression) -> str:
    """Help for something else where a string is needed."""
    text = written.span.text
    return 'write it in double quotes: "…"' if '"' in text or "…" in text else f'write `"{text}"`, in double quotes'
