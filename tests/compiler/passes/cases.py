"""Cases as files: reading, running and rewriting them."""

from __future__ import annotations

import ast
import re
from difflib import unified_diff
from pathlib import Path

from attrs import frozen

from partita.dsl.diagnostic import Refused
from tests.compiler.passes.steps import STEPS, Form

FOLDER = Path(__file__).parent
_CASE = re.compile(r"(?P<comment>(?:#.*\n)+)(?P<given>(?s:.*?))^--- (?P<steps>.+)\n(?P<expected>(?s:.*))", re.MULTILINE)


@frozen
class Case:
    """One file. `steps` are the passes, as they stand on the line."""

    file: Path
    comment: str
    given: str
    steps: str
    expected: str

    def __str__(self) -> str:
        return f"{self.file.parent.name}/{self.file.stem}"

    def found(self) -> str:
        """What the passes make of the text, or the error with which one of them refuses it."""
        form = Form(self.given)
        try:
            for name, options in _calls(self.steps):
                form = STEPS[name](form, **options)
        except Refused as refused:
            return "".join(f"error[{each.code}]: {each.message}\n" for each in refused.diagnostics)
        return form.text

    def difference(self) -> str:
        """A unified diff from what is expected to what is found; empty where they are the same."""
        lines = (text.splitlines(keepends=True) for text in (self.expected, self.found()))
        return "".join(unified_diff(*lines, "expected", "found", n=2))

    def updated(self) -> str:
        """The file with what is found."""
        return f"{self.comment}{self.given}--- {self.steps}\n{self.found()}"


def read(file: Path) -> Case:
    """A case. ValueError where the file is none."""
    match = _CASE.fullmatch(file.read_text(encoding="utf-8"))
    if match is None:
        raise ValueError(f"{file} is no case: it has a comment, a text, a line `--- pass(…)`, and what is expected")
    return Case(file, **match.groupdict())


def cases() -> list[Case]:
    """All cases, in the order of their files."""
    return [read(file) for file in sorted(FOLDER.glob("*/*.txt"))]


def _calls(text: str) -> list[tuple[str, dict[str, object]]]:
    """`cut(stages=2), overlap()`: names with their options."""
    match ast.parse(f"({text},)", mode="eval").body:
        case ast.Tuple(elts=calls):
            return [_call(each) for each in calls]
    raise ValueError(text)


def _call(node: ast.expr) -> tuple[str, dict[str, object]]:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
            return name, {str(each.arg): ast.literal_eval(each.value) for each in keywords}
    raise ValueError(ast.unparse(node))
