"""What the language server answers: each request of the protocol, by the module that knows the answer."""

from __future__ import annotations

import asyncio

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams

from partita.cli.editor.hover import described
from partita.cli.editor.outline import KINDS, folds, symbols
from partita.cli.editor.positions import place, position, range_of
from partita.cli.editor.renaming import IN_FULL_NAMES, Everywhere, everywhere, rename, renameable
from partita.cli.editor.server import Server
from partita.cli.editor.signatures import signature
from partita.cli.editor.workspace import Workspace
from partita.dsl.diagnostic import Refused
from partita.dsl.syntax.format import format_text
from partita.dsl.syntax.source import Source

# Clients that can tell the server of files that others change.
WATCHED = lsp.DidChangeWatchedFilesRegistrationOptions([lsp.FileSystemWatcher("**/*.par")])


def server() -> Server:
    """A server with all that it can do."""
    ls = Server()
    _documents(ls)
    _names(ls)
    _shapes(ls)
    _texts(ls)
    return ls


def _documents(ls: Server) -> None:
    """What the editor tells."""

    @ls.feature(lsp.INITIALIZED)
    def initialized(params: lsp.InitializedParams) -> None:
        capabilities = ls.client_capabilities.workspace
        watched = capabilities.did_change_watched_files if capabilities is not None else None
        if watched is not None and watched.dynamic_registration:
            watching = lsp.Registration("files", lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES, WATCHED)
            ls.client_register_capability(lsp.RegistrationParams([watching]))

    @ls.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    @ls.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: lsp.DidOpenTextDocumentParams | lsp.DidChangeTextDocumentParams) -> None:
        ls.changed(params.text_document.uri)

    @ls.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: lsp.DidCloseTextDocumentParams) -> None:
        ls.forget(params.text_document.uri)

    @ls.feature(lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def written(params: lsp.DidChangeWatchedFilesParams) -> None:
        ls.touched(None)


def _names(ls: Server) -> None:
    """What names are, and where they stand."""

    @ls.feature(lsp.TEXT_DOCUMENT_HOVER)
    async def hover(params: lsp.HoverParams) -> lsp.Hover | None:
        document = ls.document(params.text_document.uri)
        # A layout is known when the file is compiled, which may take seconds: typing does not wait for it.
        text = await asyncio.to_thread(described, document, *place(document, params.position))
        return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, text)) if text is not None else None

    @ls.feature(lsp.TEXT_DOCUMENT_COMPLETION)
    def completion(params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        suggestions = ls.document(params.text_document.uri).suggestions(params.position.line + 1)
        return [
            lsp.CompletionItem(word, kind=lsp.CompletionItemKind[KINDS.get(kind, "Module")], detail=kind)
            for word, kind in suggestions
        ]

    @ls.feature(lsp.TEXT_DOCUMENT_DEFINITION)
    def definition(params: lsp.DefinitionParams) -> list[lsp.Location]:
        document = ls.document(params.text_document.uri)
        names = document.world.at(*place(document, params.position))
        spans = [each.declared.span for each in names] or document.imported(*place(document, params.position))
        return [lsp.Location(ls.uri(span.source.name), range_of(span)) for span in spans]

    @ls.feature(lsp.TEXT_DOCUMENT_REFERENCES)
    def references(params: lsp.ReferenceParams) -> list[lsp.Location]:
        document = ls.document(params.text_document.uri)
        name = document.at(*place(document, params.position))
        if name is None:
            return []
        files = ls.files()
        return [
            lsp.Location(uri, range)
            for uri, own in _ranges(ls, files, everywhere(files, document.place, name)).items()
            for range, declares in own
            if params.context.include_declaration or not declares
        ]

    @ls.feature(lsp.TEXT_DOCUMENT_PREPARE_RENAME)
    def prepare(params: lsp.PrepareRenameParams) -> lsp.Range:
        document = ls.document(params.text_document.uri)
        try:
            name = renameable(ls.files(), document.place, *place(document, params.position))
        except ValueError as error:
            raise JsonRpcInvalidParams(str(error)) from error
        return range_of(name.name.span)

    @ls.feature(lsp.TEXT_DOCUMENT_RENAME, lsp.RenameOptions(prepare_provider=True))
    def renamed(params: lsp.RenameParams) -> lsp.WorkspaceEdit:
        document, files = ls.document(params.text_document.uri), ls.files()
        try:
            name = rename(files, document.place, *place(document, params.position), params.new_name)
        except ValueError as error:
            raise JsonRpcInvalidParams(str(error)) from error
        if name.kind in IN_FULL_NAMES:
            message = f"`{name.name}` is part of full names: checkpoints, overrides and initial values went by them"
            ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, message))
        return lsp.WorkspaceEdit(
            changes={
                uri: [lsp.TextEdit(range, params.new_name) for range, _ in own]
                for uri, own in _ranges(ls, files, name).items()
            }
        )


def _ranges(ls: Server, files: Workspace, name: Everywhere) -> dict[str, list[tuple[lsp.Range, bool]]]:
    """The places of a name by document, each with whether it declares the name."""
    ranges: dict[str, list[tuple[lsp.Range, bool]]] = {}
    for path, starts in name.by_file().items():
        source = Source(path, files.text(path))
        ranges[ls.uri(path)] = [
            (
                lsp.Range(position(source, start), position(source, start + len(name.name))),
                (path, start) in name.declared,
            )
            for start in starts
        ]
    return ranges


def _shapes(ls: Server) -> None:
    """How a document is made up."""

    @ls.feature(lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    def outline(params: lsp.DocumentSymbolParams) -> list[lsp.DocumentSymbol]:
        return list(symbols(ls.document(params.text_document.uri).declarations))

    @ls.feature(lsp.TEXT_DOCUMENT_FOLDING_RANGE)
    def folding(params: lsp.FoldingRangeParams) -> list[lsp.FoldingRange]:
        lines = folds(ls.document(params.text_document.uri).declarations)
        return [lsp.FoldingRange(first - 1, last - 1) for first, last in lines]

    @ls.feature(lsp.TEXT_DOCUMENT_SIGNATURE_HELP, lsp.SignatureHelpOptions(["(", ","]))
    def called(params: lsp.SignatureHelpParams) -> lsp.SignatureHelp | None:
        document = ls.document(params.text_document.uri)
        if not document.world.files:
            return None
        source = document.world.files[0].file.span.source
        line, column = place(document, params.position)
        offset = sum(len(each) + 1 for each in source.text.split("\n")[: line - 1]) + column - 1
        declarations = [each for file in document.world.files for each in file.file.declarations]
        return signature(declarations, source, offset)


def _texts(ls: Server) -> None:
    """What the text of a document should be."""

    @ls.feature(lsp.TEXT_DOCUMENT_FORMATTING)
    def formatting(params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit]:
        document = ls.document(params.text_document.uri)
        try:
            text = format_text(document.text, document.name)
        except Refused as refused:
            raise JsonRpcInvalidParams(next(iter(refused.diagnostics)).message) from refused
        lines = document.text.count("\n") + document.text.count("\r") + 1
        return [lsp.TextEdit(lsp.Range(lsp.Position(0, 0), lsp.Position(lines, 0)), text)]
