"""An editor: a client of its own process, which talks to the language server over standard input and output."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcMethodNotFound
from pygls.lsp.client import LanguageClient


class Editor(LanguageClient):
    """A client that keeps the diagnostics that it is told of, by file."""

    def __init__(self) -> None:
        super().__init__("editor", "1")
        self.told: dict[str, list[lsp.Diagnostic]] = {}
        self.versions: dict[str, list[int | None]] = {}  # of which there were diagnostics
        self.news = asyncio.Event()

        @self.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def published(given: lsp.PublishDiagnosticsParams) -> None:
            self.told[given.uri] = list(given.diagnostics)
            self.versions.setdefault(given.uri, []).append(given.version)
            self.news.set()

    async def write(self, path: Path, text: str, version: int) -> list[lsp.Diagnostic]:
        """Open or change a document, and wait for what is said of it."""
        self.told.pop(path.as_uri(), None)
        self.send(path, text, version)
        return await self.heard_of(path, lambda told: True)

    def send(self, path: Path, text: str, version: int) -> None:
        """Open or change a document."""
        uri = path.as_uri()
        if version == 1:
            item = lsp.TextDocumentItem(uri, "par", version, text)
            self.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        else:
            identifier = lsp.VersionedTextDocumentIdentifier(version, uri)
            change = lsp.TextDocumentContentChangeWholeDocument(text)
            self.text_document_did_change(lsp.DidChangeTextDocumentParams(identifier, [change]))

    def close(self, path: Path) -> None:
        """Close a document."""
        document = lsp.TextDocumentIdentifier(path.as_uri())
        self.text_document_did_close(lsp.DidCloseTextDocumentParams(document))

    async def answered(self) -> None:
        """Wait until the server has read, and answered, all that was sent."""
        with suppress(JsonRpcMethodNotFound):
            await self.protocol.send_request_async("test/nothing", None)

    async def heard_of(self, path: Path, enough: Callable[[list[lsp.Diagnostic]], bool]) -> list[lsp.Diagnostic]:
        """What is said of a file, when that is enough."""
        uri = path.as_uri()
        while uri not in self.told or not enough(self.told[uri]):
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)
        return self.told[uri]


def place(text: str, word: str, nth: int = 0) -> lsp.Position:
    """Where a word stands, as the protocol counts."""
    at = -1
    for _ in range(nth + 1):
        at = text.index(word, at + 1)
    line = text.count("\n", 0, at)
    start = text.rindex("\n", 0, at) + 1 if line else 0
    return lsp.Position(line, len(text[start:at].encode("utf-16-le")) // 2)


def edited(text: str, edits: list[lsp.TextEdit]) -> str:
    """A text with edits, as an editor applies them."""
    lines = text.split("\n")

    def offset(position: lsp.Position) -> int:
        if position.line >= len(lines):
            return len(text)
        line = lines[position.line].encode("utf-16-le")[: 2 * position.character].decode("utf-16-le")
        return sum(len(each) + 1 for each in lines[: position.line]) + len(line)

    for edit in sorted(edits, key=lambda each: -offset(each.range.start)):
        text = text[: offset(edit.range.start)] + edit.new_text + text[offset(edit.range.end) :]
    return text


def talk(session: Callable[[Editor], Awaitable[None]], capabilities: lsp.ClientCapabilities | None = None) -> None:
    """Start a server, let an editor have a session with it, and end it."""

    async def whole() -> None:
        editor = Editor()
        await editor.start_io(sys.executable, "-m", "partita", "lsp", "--stdio")
        given = capabilities or lsp.ClientCapabilities()
        await editor.initialize_async(lsp.InitializeParams(given))
        editor.initialized(lsp.InitializedParams())
        await session(editor)
        await editor.shutdown_async(None)
        editor.exit(None)
        await editor.stop()

    asyncio.run(asyncio.wait_for(whole(), 240))
