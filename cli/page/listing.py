"""The file of a run and those that it imports, highlighted, with their lines numbered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from pygments.token import STANDARD_TYPES

from partita.cli.editor.lexer import ParLexer
from partita.cli.page.markup import Markup, joined, tag
from partita.cli.page.run import Run


def listings(run: Run) -> list[Markup]:
    """A listing of each file, the run's own first."""
    record = run.record
    if record is None:
        return []
    causes = run.compiled.communication.causes if run.compiled is not None else ()
    caused = {(PurePath(each.span.source.name).name, each.span.line) for each in causes if each.span is not None}
    first = run.origin.file if run.origin is not None else ""
    parts = []
    for path in sorted(record.files, key=lambda each: each != first):
        name = PurePath(path).name
        lines = [
            tag(
                "span",
                line,
                class_="sends" if (name, number) in caused else None,
                id=anchor(name, number),
                title="causes collectives" if (name, number) in caused else None,
            )
            for number, line in enumerate(highlighted(record.files[path]), 1)
        ]
        code = tag("pre", tag("code", *(joined(line, "\n") for line in lines)), class_="listing scroll", tabindex="0")
        parts.append(tag("details", tag("summary", name), code, open=""))
    return parts


def anchor(file: str, line: int) -> str:
    """The address of a line on the page."""
    return f"{''.join(each if each.isascii() and each.isalnum() else '-' for each in file)}-{line}"


def highlighted(text: str) -> Sequence[Markup]:
    """The lines of a file; each token is of the class that Pygments' styles give it."""
    lines: list[list[Markup]] = [[]]
    for _, kind, word in ParLexer().get_tokens_unprocessed(text):
        name = STANDARD_TYPES.get(kind) or None
        for number, part in enumerate(word.split("\n")):
            if number:
                lines.append([])
            if part:
                lines[-1].append(tag("i", part, class_=name))
    return [joined(*line) for line in (lines if lines[-1] else lines[:-1])]
