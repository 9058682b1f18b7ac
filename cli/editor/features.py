"""What the language server answers: each request of the protocol, by the module that knows the answer."""

from __future__ import annotations

import asyncio

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams

from partita.cli.editor.hover import described
from partita.cli.editor.outline import Symbol, folds, symbols
from partita.cli.editor.positions import place, position, range_of
from partita.cli.editor.renaming import IN_FULL_NAMES, Everywhere, everywhere, rename, renameable
from partita.cli.editor.server import Server
from partita.cli.editor.signatures import signature
from partita.cli.editor.workspace import Workspace
from partita.dsl.diagnostic import Refused
from partita.dsl.syntax.format import format_text
from partita.dsl.syntax.source import Source

# What the protocol calls kinds of names, in completions and in outlines.
KINDS = {
    "keyword": "Keyword",
    "function": "Function",
    "block": "Class",
    "op": "Function",
    "model": "Class",
    "axis": "EnumMember",
    "mesh axis": "EnumMember",
    "const": "Constant",
    "tensor": "Variable",
    "parameter": "Field",
    "buffer": "Field",
    "metric": "Variable",
    "output": "Variable",
}
# Clients that can tell the server of files that others change.
WATCHED = lsp.DidChangeWatchedFilesRegistrationOptions([lsp.FileSystemWatcher("**/*.par")])


def server() -> Server:
    """A server with all that it can do."""
    found = Server()
    _documents(found)
    _names(found)
    _shapes(found)
    _texts(found)
    return found


def _documents(found: Server) -> None:
    """What the editor tells."""

    @found.feature(lsp.INITIALIZED)
    def initialized(given: lsp.InitializedParams) -> None:
        capabilities = found.client_capabilities.workspace
        watched = capabilities.did_change_watched_files if capabilities is not None else None
        if watched is not None and watched.dynamic_registration:
            watching = lsp.Registration("files", lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES, WATCHED)
            found.client_register_capability(lsp.RegistrationParams([watching]))

    @found.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    @found.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def changed(given: lsp.DidOpenTextDocumentParams | lsp.DidChangeTextDocumentParams) -> None:
        found.changed(given.text_document.uri)

    @found.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def closed(given: lsp.DidCloseTextDocumentParams) -> None:
        found.forget(given.text_document.uri)

    @found.feature(lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def written(given: lsp.DidChangeWatchedFilesParams) -> None:
        found.touched(None)


def _names(found: Server) -> None:
    """What names are, and where they stand."""

    @found.feature(lsp.TEXT_DOCUMENT_HOVER)
    async def hover(given: lsp.HoverParams) -> lsp.Hover | None:
        document = found.document(given.text_document.uri)
        # A layout is known when the file is compiled, which may take seconds: typing does not wait for it.
        text = await asyncio.to_thread(described, document, *place(document, given.position))
        return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, text)) if text is not None else None

    @found.feature(lsp.TEXT_DOCUMENT_COMPLETION)
    def completion(given: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        suggestions = found.document(given.text_document.uri).suggestions(given.position.line + 1)
        return [
            lsp.CompletionItem(each.word, kind=lsp.CompletionItemKind[KINDS.get(each.kind, "Module")], detail=each.kind)
            for each in suggestions
        ]

    @found.feature(lsp.TEXT_DOCUMENT_DEFINITION)
    def definition(given: lsp.DefinitionParams) -> list[lsp.Location]:
        document = found.document(given.text_document.uri)
        names = document.world.at(*place(document, given.position))
        spans = [each.declared.span for each in names] or document.imported(*place(document, given.position))
        return [lsp.Location(found.uri(span.source.name), range_of(span)) for span in spans]

    @found.feature(lsp.TEXT_DOCUMENT_REFERENCES)
    def references(given: lsp.ReferenceParams) -> list[lsp.Location]:
        document = found.document(given.text_document.uri)
        name = document.at(*place(document, given.position))
        if name is None:
            return []
        files = found.files()
        return [
            lsp.Location(uri, range)
            for uri, own in _ranges(found, files, everywhere(files, document.place, name)).items()
            for range, declares in own
            if given.context.include_declaration or not declares
        ]

    @found.feature(lsp.TEXT_DOCUMENT_PREPARE_RENAME)
    def prepare(given: lsp.PrepareRenameParams) -> lsp.Range:
        document = found.document(given.text_document.uri)
        try:
            name = renameable(found.files(), document.place, *place(document, given.position))
        except ValueError as error:
            raise JsonRpcInvalidParams(str(error)) from error
        return range_of(name.name.span)

    @found.feature(lsp.TEXT_DOCUMENT_RENAME, lsp.RenameOptions(prepare_provider=True))
    def renamed(given: lsp.RenameParams) -> lsp.WorkspaceEdit:
        document, files = found.document(given.text_document.uri), found.files()
        try:
            name = rename(files, document.place, *place(document, given.position), given.new_name)
        except ValueError as error:
            raise JsonRpcInvalidParams(str(error)) from error
        if name.kind in IN_FULL_NAMES:
            message = f"`{name.name}` is part of full names: checkpoints, overrides and initial values went by them"
            found.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, message))
        return lsp.WorkspaceEdit(
            changes={
                uri: [lsp.TextEdit(range, given.new_name) for range, _ in own]
                for uri, own in _ranges(found, files, name).items()
            }
        )


def _ranges(found: Server, files: Workspace, name: Everywhere) -> dict[str, list[tuple[lsp.Range, bool]]]:
    """The places of a name by document, each with whether it declares the name."""
    ranges: dict[str, list[tuple[lsp.Range, bool]]] = {}
    for path, starts in name.by_file().items():
        source = Source(path, files.text(path))
        ranges[found.uri(path)] = [
            (
                lsp.Range(position(source, start), position(source, start + len(name.name))),
                (path, start) in name.declared,
            )
            for start in starts
        ]
    return ranges


def _shapes(found: Server) -> None:
    """How a document is made up."""

    @found.feature(lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    def outline(given: lsp.DocumentSymbolParams) -> list[lsp.DocumentSymbol]:
        return [_symbol(each) for each in symbols(found.document(given.text_document.uri).declarations)]

    @found.feature(lsp.TEXT_DOCUMENT_FOLDING_RANGE)
    def folding(given: lsp.FoldingRangeParams) -> list[lsp.FoldingRange]:
        lines = folds(found.document(given.text_document.uri).declarations)
        return [lsp.FoldingRange(first - 1, last - 1) for first, last in lines]

    @found.feature(lsp.TEXT_DOCUMENT_SIGNATURE_HELP, lsp.SignatureHelpOptions(["(", ","]))
    def called(given: lsp.SignatureHelpParams) -> lsp.SignatureHelp | None:
        document = found.document(given.text_document.uri)
        if not document.world.files:
            return None
        source = document.world.files[0].file.span.source
        line, column = place(document, given.position)
        offset = sum(len(each) + 1 for each in source.text.split("\n")[: line - 1]) + column - 1
        declarations = [each for file in document.world.files for each in file.file.declarations]
        call = signature(declarations, source, offset)
        if call is None:
            return None
        parameters = [lsp.ParameterInformation(each) for each in call.parameters]
        information = lsp.SignatureInformation(call.label, parameters=parameters, active_parameter=call.active)
        return lsp.SignatureHelp([information], active_signature=0, active_parameter=call.active)


def _symbol(each: Symbol) -> lsp.DocumentSymbol:
    kind = lsp.SymbolKind[KINDS.get(each.kind, "Namespace")]
    inside = [_symbol(inner) for inner in each.inside]
    return lsp.DocumentSymbol(
        each.name.text, kind, range_of(each.span), range_of(each.name.span), each.kind, children=inside
    )


def _texts(found: Server) -> None:
    """What the text of a document should be."""

    @found.feature(lsp.TEXT_DOCUMENT_FORMATTING)
    def formatting(given: lsp.DocumentFormattingParams) -> list[lsp.TextEdit]:
        document = found.document(given.text_document.uri)
        try:
            text = format_text(document.text, document.name)
        except Refused as refused:
            raise JsonRpcInvalidParams(next(iter(refused.diagnostics)).message) from refused
        lines = document.text.count("\n") + document.text.count("\r") + 1
        return [lsp.TextEdit(lsp.Range(lsp.Position(0, 0), lsp.Position(lines, 0)), text)]
