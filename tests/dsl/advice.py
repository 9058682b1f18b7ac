"""Follows what a help proposes, to the letter.

A help that begins with text to write says where it goes: `did you mean X?` and `write X` replace what is underlined,
`insert X` comes before it, or before what else it names, and `remove it` leaves it out. Other helps explain, and name
no text for this place.
"""

from __future__ import annotations

import re

from partita.dsl.diagnostic import Diagnostic
from partita.dsl.load import load_text

_ADVICE = re.compile(
    r"(?:arguments swapped\? )?(did you mean|write|insert|remove it)(?: `([^`…]+)`)?"
    r"(?: (?:before `[^`]+` at \S+?:(\d+):(\d+)|(at the end)))?"
)
MOST = 4  # mistakes that lead from one to the next


def followed(diagnostic: Diagnostic) -> str | None:
    """The text of the file after its help has been followed; None if the help proposes no text, or none for a file."""
    span, found = diagnostic.span, _ADVICE.match(diagnostic.advice or "")
    if span is None or found is None or span.source.name == "command line":
        return None
    kind, new = found[1], found[2]
    if (new is None) != (kind == "remove it"):
        return None
    text = span.source.text
    start, end = span.start, span.end
    if found[3] is not None:
        start = end = sum(map(len, text.splitlines(keepends=True)[: int(found[3]) - 1])) + int(found[4]) - 1
    elif found[5] is not None:
        start = end = len(text)
    before, old, after = text[:start], text[start:end], text[end:]
    if kind == "insert":
        # A word stands apart from its neighbours.
        left = " " if new[0].isalnum() and before[-1:].isalnum() else ""
        return f"{before}{left}{new} {old}{after}"
    return f"{before}{new or ''}{after}"


def corrected(text: str, name: str = "m.par") -> tuple[str, list[Diagnostic]]:
    """A text after following the first help again and again; and the errors that are left."""
    for _ in range(MOST):
        errors = [each for each in load_text(text, name)[1] if each.severity == "error"]
        new = followed(errors[0]) if errors else None
        if new is None:
            break
        text = new
    return text, [each for each in load_text(text, name)[1] if each.severity == "error"]
