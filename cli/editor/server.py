"""The language server: `partita.cli.editor.document` over the Language Server Protocol."""

from __future__ import annotations

import asyncio
import os

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from partita import __version__
from partita.cli.editor.document import Document
from partita.dsl.diagnostic import Diagnostic, Refused
from partita.dsl.format import format_text
from partita.dsl.source import Source, Span

KINDS = {
    "keyword": lsp.CompletionItemKind.Keyword,
    "function": lsp.CompletionItemKind.Function,
    "block": lsp.CompletionItemKind.Class,
    "op": lsp.CompletionItemKind.Function,
    "model": lsp.CompletionItemKind.Class,
    "axis": lsp.CompletionItemKind.EnumMember,
    "mesh axis": lsp.CompletionItemKind.EnumMember,
    "const": lsp.CompletionItemKind.Constant,
    "tensor": lsp.CompletionItemKind.Variable,
}
# A document is checked when nothing has been typed for so many seconds; at the latest so long after what is unchecked.
PAUSE, LATEST = 0.01, 0.05
SEVERITIES = {"error": lsp.DiagnosticSeverity.Error, "warning": lsp.DiagnosticSeverity.Warning}


class Server(LanguageServer):
    """Keeps the documents that the editor has open, each with what is known of its present text."""

    def __init__(self) -> None:
        super().__init__("partita", __version__, lsp.TextDocumentSyncKind.Full)
        self._documents: dict[str, tuple[int | None, Document]] = {}
        self._said: dict[str, dict[str, list[lsp.Diagnostic]]] = {}  # document -> file -> what is wrong there
        self._due: dict[str, tuple[float, asyncio.TimerHandle]] = {}  # changed when first, and what checks it

    def document(self, uri: str) -> Document:
        """What is known of a document, as of its present version."""
        found = self.workspace.get_text_document(uri)
        known = self._documents.get(uri)
        if known is None or known[0] != found.version or known[1].text != found.source:
            path = to_fs_path(uri)
            known = self._documents[uri] = found.version, Document(found.source, path or uri, path)
        return known[1]

    def changed(self, uri: str) -> None:
        """Check a document soon. What is typed until then is checked with it, so that no check waits for another."""
        loop = asyncio.get_running_loop()
        first, timer = self._due.get(uri, (loop.time(), None))
        if timer is not None:
            timer.cancel()
        self._due[uri] = first, loop.call_at(min(loop.time() + PAUSE, first + LATEST), self.check, uri)

    def forget(self, uri: str) -> None:
        """The editor has closed a document."""
        _, timer = self._due.pop(uri, (0.0, None))
        if timer is not None:
            timer.cancel()
        self._documents.pop(uri, None)
        self._say(uri, {})

    def check(self, uri: str) -> None:
        """Say what is wrong with a document, also where that is in a file which it imports."""
        self._due.pop(uri, None)
        document = self.document(uri)
        found: dict[str, list[lsp.Diagnostic]] = {uri: []}
        for each in document.diagnostics:
            place = each.span.source.name if each.span is not None else document.name
            where = uri if place == document.name else from_fs_path(os.path.abspath(place)) or uri
            found.setdefault(where, []).append(_diagnostic(each))
        self._say(uri, found)

    def _say(self, uri: str, found: dict[str, list[lsp.Diagnostic]]) -> None:
        """Replace what a document's check has said. A file that several documents import has what is said by any."""
        before = self._said.get(uri, {})
        self._said[uri] = found
        for where in {**found, **before}:
            said = [each for own in self._said.values() for each in own.get(where, ())]
            version = self.workspace.get_text_document(uri).version if where == uri else None
            different = [each for i, each in enumerate(said) if each not in said[:i]]
            self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(where, different, version))
        if not found:
            del self._said[uri]


def server() -> Server:
    """A server with all that it can do."""
    found = Server()

    @found.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    def opened(given: lsp.DidOpenTextDocumentParams) -> None:
        found.check(given.text_document.uri)

    @found.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def changed(given: lsp.DidChangeTextDocumentParams) -> None:
        found.changed(given.text_document.uri)

    @found.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def closed(given: lsp.DidCloseTextDocumentParams) -> None:
        found.forget(given.text_document.uri)

    @found.feature(lsp.TEXT_DOCUMENT_HOVER)
    def hover(given: lsp.HoverParams) -> lsp.Hover | None:
        document = found.document(given.text_document.uri)
        text = document.described(*_place(document, given.position))
        return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, text)) if text is not None else None

    @found.feature(lsp.TEXT_DOCUMENT_COMPLETION)
    def completion(given: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        suggestions = found.document(given.text_document.uri).suggestions(given.position.line + 1)
        return [
            lsp.CompletionItem(each.word, kind=KINDS.get(each.kind, lsp.CompletionItemKind.Module), detail=each.kind)
            for each in suggestions
        ]

    @found.feature(lsp.TEXT_DOCUMENT_DEFINITION)
    def definition(given: lsp.DefinitionParams) -> lsp.Location | None:
        document = found.document(given.text_document.uri)
        name = document.at(*_place(document, given.position))
        return lsp.Location(given.text_document.uri, _range(name.declared.span)) if name is not None else None

    @found.feature(lsp.TEXT_DOCUMENT_REFERENCES)
    def references(given: lsp.ReferenceParams) -> list[lsp.Location]:
        document = found.document(given.text_document.uri)
        spans = document.references(*_place(document, given.position))
        return [lsp.Location(given.text_document.uri, _range(span)) for span in spans]

    @found.feature(lsp.TEXT_DOCUMENT_RENAME)
    def rename(given: lsp.RenameParams) -> lsp.WorkspaceEdit:
        document = found.document(given.text_document.uri)
        try:
            spans = document.renamed(*_place(document, given.position), given.new_name)
        except ValueError as error:
            raise JsonRpcInvalidParams(str(error)) from error
        edits = [lsp.TextEdit(_range(span), given.new_name) for span in spans]
        return lsp.WorkspaceEdit(changes={given.text_document.uri: edits})

    @found.feature(lsp.TEXT_DOCUMENT_FORMATTING)
    def formatting(given: lsp.DocumentFormattingParams) -> list[lsp.TextEdit]:
        document = found.document(given.text_document.uri)
        try:
            text = format_text(document.text, document.name)
        except Refused as refused:
            raise JsonRpcInvalidParams(next(iter(refused.diagnostics)).message) from refused
        lines = document.text.count("\n") + document.text.count("\r") + 1
        return [lsp.TextEdit(lsp.Range(lsp.Position(0, 0), lsp.Position(lines, 0)), text)]

    return found


def _diagnostic(each: Diagnostic) -> lsp.Diagnostic:
    """A diagnostic of ours, with notes and help below its message."""
    parts = [each.message, *each.notes, *([f"help: {each.help}"] if each.help else [])]
    span = each.span
    place = _range(span) if span is not None else lsp.Range(lsp.Position(0, 0), lsp.Position(0, 0))
    return lsp.Diagnostic(place, "\n".join(parts), severity=SEVERITIES[each.severity], code=each.code, source="partita")


def _range(span: Span) -> lsp.Range:
    return lsp.Range(*(_position(span.source, offset) for offset in (span.start, max(span.start, span.end))))


def _position(source: Source, offset: int) -> lsp.Position:
    """A place as the protocol counts: lines and UTF-16 code units from 0."""
    line, column = source.position(offset)
    return lsp.Position(line - 1, _units(source.line(line)[: column - 1]))


def _place(document: Document, position: lsp.Position) -> tuple[int, int]:
    """Line and column from 1 of a place of the protocol."""
    lines = document.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    line = lines[position.line] if position.line < len(lines) else ""
    column = 0
    while column < len(line) and _units(line[: column + 1]) <= position.character:
        column += 1
    return position.line + 1, column + 1


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
