"""The limits that the reference names are those that hold."""

from __future__ import annotations

from partita.compiler.pipeline import MAX_NODES
from partita.compiler.schedules.schedule import LIMIT
from partita.dsl import limits
from tests.docs.pages import ROOT

STATED = {
    "a file including its imports": (limits.FILE_BYTES, limits.TOKENS),
    "the schedules, profiles and Python files that they name": (limits.FILE_BYTES,),
    "files imported": (limits.IMPORTS,),
    "nested brackets": (limits.BRACKETS,),
    "nested operators, calls and brackets": (limits.EXPRESSION_DEPTH,),
    "nested blocks and repeats": (limits.SCOPES,),
    "a name": (limits.NAME_CHARACTERS,),
    "a number": (limits.DIGITS, limits.EXPONENT),
    "an axis": (limits.AXIS_SIZE,),
    "a tensor": (limits.ELEMENTS,),
    "a mesh": (limits.RANKS,),
    "steps of a model": (limits.STEPS, MAX_NODES),
    "expressions checked": (limits.CHECKED,),
    "ranks × chunks × microbatches": (LIMIT,),
    "ranks that a standalone `run` starts": (limits.LOCAL_RANKS,),
    "errors shown": (limits.ERRORS,),
}


def test_the_page_states_the_limits_that_hold():
    section = (ROOT / "docs" / "reference" / "grammar.md").read_text().split("\n## Limits\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(STATED)
    for row, (what, numbers) in zip(rows, STATED.items(), strict=True):
        assert row.startswith(f"| {what}"), row
        for number in numbers:
            power = f"2^{number.bit_length() - 1}" if number > 1 << 19 and "2^" in row else f"{number:,}"
            assert power in row, row
