"""docs/errors.md, made from `partita.dsl.codes.CODES`: a section for each code, in order, under the kinds of codes."""

from __future__ import annotations

from partita.dsl.codes import CODES
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "errors.md"

KINDS = {
    "E00": "Files and limits",
    "E01": "Syntax",
    "E02": "Models",
    "E03": "Declarations and settings",
    "E04": "Layouts, placement and microbatches",
    "E05": "Schedules",
    "E06": "Data and runs",
    "E07": "Verification",
    "E08": "Checkpoints",
    "E09": "Planning",
    "E10": "Use of trained models",
    "E11": "Machines",
    "E12": "Import of modules",
    "W": "Warnings",
}

OPENING = """\
# Errors

Every error has a code, a place, the values involved, and `help` where there is a fix. [check](commands/check.md)
explains how to read one, and `check --json` gives them to programs. Warnings (W) do not change the exit status.

<!-- Made from dsl/codes.py by `make docs`. -->
"""


def page_text() -> str:
    """The whole page."""
    parts = [OPENING]
    for prefix, heading in KINDS.items():
        parts.append(f"\n## {heading}\n")
        for code in sorted(code for code in CODES if code.startswith(prefix)):
            entry = CODES[code]
            parts.append(f"\n### {code}\n\n**{_capital(entry.title)}.** {entry.explanation}\n\nFix: {entry.fix}\n")
    return "".join(parts)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
