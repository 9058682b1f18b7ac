"""Names of functions of Python files, whose text is read but never run."""

from __future__ import annotations

import keyword
import re

from partita.dsl.advice.report import listed, nearest
from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Source, Span

_DEFINED = re.compile(r"^(?:async\s+)?(?:def|class)\s+(\w+)|^(\w+)\s*(?::[^=\n]+)?=", re.MULTILINE)


def check_name(name: str, span: Span) -> None:
    """Refuse (E0306) what no Python function is called."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise refuse("E0306", f"`{name}` is not the name of a Python function", span)


def check_mentioned(source: Source, path: str, name: str, span: Span) -> None:
    """Refuse (E0330) a name that a Python file does not even mention, as far as can be said without running it."""
    words = re.findall(r"\w+", source.text)
    if name in words or "import *" in source.text:
        return
    defined = [first or second for first, second in _DEFINED.findall(source.text)]
    near = nearest(name, defined)
    few = f"it has {listed(defined)}" if 0 < len(defined) <= 12 else None
    help = f"did you mean `{near}`?" if near else few
    raise refuse("E0330", f"`{path}` has no `{name}`", span, help=help)
