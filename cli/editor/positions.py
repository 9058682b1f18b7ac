"""Places as the Language Server Protocol counts them: lines and UTF-16 code units from 0."""

from __future__ import annotations

from lsprotocol import types as lsp

from partita.cli.editor.document import Document
from partita.dsl.syntax.source import Source, Span


def range_of(span: Span) -> lsp.Range:
    """A span."""
    return lsp.Range(*(position(span.source, offset) for offset in (span.start, max(span.start, span.end))))


def position(source: Source, offset: int) -> lsp.Position:
    """A character of a source."""
    line, column = source.position(offset)
    return lsp.Position(line - 1, _units(source.line(line)[: column - 1]))


def place(document: Document, position: lsp.Position) -> tuple[int, int]:
    """Line and column from 1 of a place of the protocol."""
    lines = document.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    line = lines[position.line] if position.line < len(lines) else ""
    column = 0
    while column < len(line) and _units(line[: column + 1]) <= position.character:
        column += 1
    return position.line + 1, column + 1


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
