"""The language server: the documents that an editor has open, and when they are checked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from time import perf_counter

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from partita.cli.editor.document import Document
from partita.cli.editor.positions import range_of
from partita.cli.editor.workspace import Workspace
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.version import __version__

# A document is checked when nothing has been typed for so many seconds; at the latest so long after what is unchecked.
# For one that takes long to check, these are parts of that time: otherwise typing would be faster than reading it.
PAUSE, LATEST = 0.01, 0.05
PAUSE_PART, LATEST_PART = 0.4, 1.0
SEVERITIES = {"error": lsp.DiagnosticSeverity.Error, "warning": lsp.DiagnosticSeverity.Warning}


class Server(LanguageServer):
    """Keeps the documents that the editor has open, each with what is known of its present text."""

    def __init__(self) -> None:
        super().__init__("partita", __version__, lsp.TextDocumentSyncKind.Full)
        self._texts: dict[str, tuple[str, str]] = {}  # open document -> its real path, and its text
        self._documents: dict[str, Document] = {}  # what is known of those
        self._said: dict[str, dict[str, list[lsp.Diagnostic]]] = {}  # document -> file -> what is wrong there
        self._due: dict[str, tuple[float, asyncio.TimerHandle]] = {}  # changed when first, and what checks it
        self._took: dict[str, float] = {}  # seconds of a document's last check
        self._workspace = Workspace()
        self._has_shut_down = False
        self.killed = False  # ended by the editor without having been shut down

        @self.feature(lsp.SHUTDOWN)
        def shut_down(*_: object) -> None:
            self._has_shut_down = True

        @self.feature(lsp.EXIT)
        def end(*_: object) -> None:
            self.killed = not self._has_shut_down

    # ------------------------------------------------------------ documents

    def document(self, uri: str) -> Document:
        """What is known of a document, as of its present text."""
        if uri not in self._documents:
            path = to_fs_path(uri)
            text = self._texts[uri][1] if uri in self._texts else self.workspace.get_text_document(uri).source
            self._documents[uri] = Document(text, path or uri, path, self.files())
        return self._documents[uri]

    def files(self) -> Workspace:
        """The texts of open documents, and the folders that the editor shows."""
        folders = [to_fs_path(each) or "" for each in self.workspace.folders]
        root = self.workspace.root_path
        beside = [os.path.dirname(path) for path, _ in self._texts.values()]
        known = [os.path.realpath(each) for each in (*folders, *([root] if root and not folders else ())) if each]
        return self._workspace.now(dict(self._texts.values()), known or list(dict.fromkeys(beside)))

    def uri(self, path: str) -> str:
        """The document that a file is, open or not."""
        real = os.path.realpath(path)
        open = next((uri for uri, (own, _) in self._texts.items() if own == real), None)
        return open or from_fs_path(os.path.abspath(path)) or path

    def changed(self, uri: str) -> None:
        """Note the present text of a document. It is checked soon, and so are those that import it."""
        document = self.workspace.get_text_document(uri)
        real = os.path.realpath(to_fs_path(uri) or uri)
        self._texts[uri] = real, document.source
        self.touched([real], uri)

    def forget(self, uri: str) -> None:
        """The editor has closed a document: its file is as it is on disk."""
        real, _ = self._texts.pop(uri, ("", ""))
        _, timer = self._due.pop(uri, (0.0, None))
        if timer is not None:
            timer.cancel()
        self._documents.pop(uri, None)
        self._say(uri, {})
        self.touched([real])

    def touched(self, paths: Iterable[str] | None, uri: str | None = None) -> None:
        """Files have changed, or any may have: what is known of documents that read them is no longer."""
        for each in {*self._texts, *self._documents}:
            known = self._documents.get(each)
            if each == uri or paths is None or (known is not None and not known.reader.texts.keys().isdisjoint(paths)):
                self._documents.pop(each, None)
                if each in self._texts:
                    self._soon(each)

    # ------------------------------------------------------------ diagnostics

    def _soon(self, uri: str) -> None:
        """Check a document soon. What is typed until then is checked with it, so that no check waits for another."""
        loop = asyncio.get_running_loop()
        first, timer = self._due.get(uri, (loop.time(), None))
        if timer is not None:
            timer.cancel()
        took = self._took.get(uri, 0.0)
        pause, latest = max(PAUSE, PAUSE_PART * took), max(LATEST, LATEST_PART * took)
        self._due[uri] = first, loop.call_at(min(loop.time() + pause, first + latest), self.check, uri)

    def check(self, uri: str) -> None:
        """Say what is wrong with a document, also where that is in a file which it imports."""
        self._due.pop(uri, None)
        document, start = self.document(uri), perf_counter()
        diagnostics: dict[str, list[lsp.Diagnostic]] = {uri: []}
        for each in document.diagnostics:
            place = each.span.source.name if each.span is not None else document.name
            where = uri if place == document.name else self.uri(place)
            diagnostics.setdefault(where, []).append(_diagnostic(each))
        self._took[uri] = perf_counter() - start
        self._say(uri, diagnostics)

    def _say(self, uri: str, diagnostics: dict[str, list[lsp.Diagnostic]]) -> None:
        """Replace what a document's check has said. A file that several documents import has what is said by any."""
        before = self._said.get(uri, {})
        self._said[uri] = diagnostics
        for where in {**diagnostics, **before}:
            published = [each for own in self._said.values() for each in own.get(where, ())]
            version = self.workspace.get_text_document(uri).version if where == uri else None
            different = [each for i, each in enumerate(published) if each not in published[:i]]
            self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(where, different, version))
        if not diagnostics:
            del self._said[uri]


def _diagnostic(each: Diagnostic) -> lsp.Diagnostic:
    """A diagnostic of ours, with notes and help below its message."""
    parts = [each.message, *each.notes, *([f"help: {each.help}"] if each.help else [])]
    span = each.span
    place = range_of(span) if span is not None else lsp.Range(lsp.Position(0, 0), lsp.Position(0, 0))
    return lsp.Diagnostic(place, "\n".join(parts), severity=SEVERITIES[each.severity], code=each.code, source="partita")
