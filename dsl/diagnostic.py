"""Diagnostics: what is wrong with a file, where, and how to fix it; as text for terminals, or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from attrs import frozen

from partita.dsl.codes import ADVICE
from partita.dsl.reprs import Pictured
from partita.dsl.syntax.source import Span

# A piece of a line, and what it is: `error`, `warning`, `message`, `margin`, `help` or `text`.
Part: TypeAlias = tuple[str, str]
# Longer lines (such as those of a schedule file) are cropped to this many characters.
LINE = 160


@frozen
class Diagnostic(Pictured):
    """One error or warning.

    `code` is one of docs/errors.md ("E0203"; the letter gives the severity, E or W); `message` says what is wrong in
    the user's words; `notes` show the values involved; `help` proposes the fix.
    """

    code: str
    message: str
    span: Span | None = None
    notes: tuple[str, ...] = ()
    help: str | None = None

    @property
    def severity(self) -> str:
        """`error` or `warning`."""
        return "warning" if self.code.startswith("W") else "error"

    def render(self) -> str:
        """The text shown in a terminal: headline, place, source line with the span underlined, notes, help."""
        return "\n".join("".join(text for _, text in line) for line in self.lines())

    def lines(self) -> list[tuple[Part, ...]]:
        """The lines of that text, in parts that may be coloured."""
        lines: list[tuple[Part, ...]] = [
            ((self.severity, f"{self.severity}[{self.code}]"), ("message", f": {self.message}"))
        ]
        margin = ""
        if self.span is not None:
            line, column = self.span.line, self.span.column
            text = self.span.source.line(line)
            number = str(line)
            margin = " " * len(number)
            text, column = _cropped(text, column)
            length = max(1, min(self.span.end - self.span.start, len(text) - column + 1))
            # Tabs stay tabs, so that the carets line up with the text.
            indent = "".join("\t" if character == "\t" else " " for character in text[: column - 1])
            lines += [
                (("margin", f"{margin} --> "), ("text", self.span.place)),
                (("margin", f"{margin}  |"),),
                (("margin", f"{number}  | "), ("text", text)),
                (("margin", f"{margin}  | "), ("text", indent), (self.severity, "^" * length)),
            ]
        lines += [(("margin", f"{margin}  = "), ("text", note)) for note in self.notes]
        if self.advice is not None:
            lines.append((("help", f"{margin}  help"), ("text", f": {self.advice}")))
        return lines

    @property
    def advice(self) -> str | None:
        """The fix: `help`, or for an error without one what the index says of its code."""
        return self.help if self.help is not None else ADVICE.get(self.code)

    def as_json(self) -> dict[str, Any]:
        """A JSON object for other programs; its keys are stable."""
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "file": self.span.source.name if self.span else None,
            "line": self.span.line if self.span else None,
            "column": self.span.column if self.span else None,
            "help": self.advice,
            "notes": list(self.notes),
        }


def _cropped(text: str, column: int) -> tuple[str, int]:
    """A window of a long line around a column, and the column within it."""
    if len(text) <= LINE:
        return text, column
    start = max(0, min(column - 1 - LINE // 3, len(text) - LINE))
    end = start + LINE
    before, after = "…" * (start > 0), "…" * (end < len(text))
    return f"{before}{text[start:end]}{after}", column - start + len(before)


class Refused(ValueError):
    """Raised when a file, or a claim in it, is wrong; carries the diagnostics."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n".join(diagnostic.render() for diagnostic in self.diagnostics))

    def retell(self, reword: Callable[[Diagnostic], Diagnostic]) -> None:
        """Say each diagnostic in other words."""
        Refused.__init__(self, map(reword, self.diagnostics))


def refuse(
    code: str, message: str, span: Span | None = None, *, notes: Iterable[str] = (), help: str | None = None
) -> Refused:
    """A `Refused` with a single diagnostic, to be raised."""
    return Refused([Diagnostic(code, message, span, tuple(notes), help)])


def shown(text: str) -> str:
    """Untrusted text, made safe to show within a line: nonprintable characters are escaped, as `\\n`.

    So a name can neither forge a line nor control the terminal. Backslashes are left as they are.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
