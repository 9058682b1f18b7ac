"""The language server as an editor talks to it: a client of its own process, over standard input and output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from partita.cli.editor.document import Document
from partita.cli.editor.hover import described
from partita.cli.editor.renaming import rename
from tests.cli.editor.client import Editor, edited, place, talk
from tests.commands import here

FILE = """axis batch = 4, embed = 8  # 𝒳

block half(x: [batch, embed]) {
  return x * 0.5
}

model m(x: [batch, embed]) {
  param w: [embed] ~ normal(1.0)
  let y = half(x)  /* none */
  loss mean(y * w)
}

mesh two(data = 2)

layout split on two {
  shard batch -> data
}

train {
  layout = split
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 2
}
""".replace("  /* none */", "")


@pytest.mark.soak
def test_an_editor(tmp_path: Path) -> None:
    async def both(editor: Editor) -> None:
        await session(editor, tmp_path)
        await of_several_files(editor, tmp_path)

    talk(both)


async def session(editor: Editor, folder: Path) -> None:
    path = folder / "m.par"
    document = lsp.TextDocumentIdentifier(path.as_uri())

    # Diagnostics are those of `check`, as one types.
    path.write_text("")
    assert await editor.write(path, FILE, 1) == []
    wrong = FILE.replace("axis batch = 4,", "axis 𝒳 = 4,").replace("half(x)\n", "half(z)\n")
    said = await editor.write(path, wrong, 2)
    path.write_text(wrong)
    checked: list[dict[str, Any]] = json.loads(here("check", "--json", str(path), cwd=folder).stdout)
    assert [each.code for each in said] == [each["code"] for each in checked]
    assert [each.range.start.line + 1 for each in said] == [each["line"] for each in checked]
    assert [(each.message.partition("\n")[0], each.source) for each in said] == [
        (each["message"], "partita") for each in checked
    ]
    assert await editor.write(path, FILE, 3) == []

    async def hover(position: lsp.Position) -> str:
        found = await editor.text_document_hover_async(lsp.HoverParams(document, position))
        assert found is not None
        assert isinstance(found.contents, lsp.MarkupContent)
        return found.contents.value

    # What a name is: a parameter, with its layout; an axis.
    text = await hover(place(FILE, "y * w"))
    assert text.startswith("tensor `y`")
    assert "type `f32[batch=4, embed=8]`" in text
    text = await hover(lsp.Position(7, 8))
    assert "param w: [embed] ~ normal(1.0)" in text
    assert "type `f32[embed=8]`" in text
    assert "`m.w`: `f32[embed=8]`, a parameter" in text
    assert "over data (2): replicated" in text
    assert "axis `embed`" in await hover(place(FILE, "embed", 2))
    assert await editor.text_document_hover_async(lsp.HoverParams(document, place(FILE, "train"))) is None

    # Where it is declared, and used.
    found = await editor.text_document_definition_async(lsp.DefinitionParams(document, place(FILE, "half(x)\n")))
    assert isinstance(found, list)
    assert found[0].range == lsp.Range(lsp.Position(2, 6), lsp.Position(2, 10))
    context = lsp.ReferenceContext(include_declaration=True)
    places = await editor.text_document_references_async(lsp.ReferenceParams(context, document, place(FILE, "batch")))
    assert [each.range.start.line for each in places or ()] == [0, 2, 6, 15]

    # What may be written.
    items = await editor.text_document_completion_async(lsp.CompletionParams(document, place(FILE, "loss")))
    assert isinstance(items, list)
    words = {each.label: each.detail for each in items}
    assert (words["embed"], words["half"], words["y"], words["repeat"]) == ("axis", "block", "tensor", "keyword")
    assert words["softmax"] == "function"
    items = await editor.text_document_completion_async(lsp.CompletionParams(document, lsp.Position(3, 2)))
    assert isinstance(items, list)
    assert "y" not in {each.label for each in items}

    # Other names.
    edit = await editor.text_document_rename_async(lsp.RenameParams(document, place(FILE, "embed"), "wide"))
    assert edit is not None
    assert edit.changes is not None
    assert edited(FILE, list(edit.changes[path.as_uri()])) == FILE.replace("embed", "wide")
    for position, name, why in (
        (place(FILE, "embed"), "batch", "`batch` is the axis of the batch"),
        (place(FILE, "embed"), "two words", "`two words` is not a name"),
        (place(FILE, "train"), "other", "there is no name here that a file declares"),
    ):
        with pytest.raises(JsonRpcException, match=why):
            await editor.text_document_rename_async(lsp.RenameParams(document, position, name))

    # What a rule sends, what is in the file, what a call takes.
    assert "over data, " in await hover(place(FILE, "shard batch"))
    outline = await editor.text_document_document_symbol_async(lsp.DocumentSymbolParams(document))
    (model,) = [each for each in outline or () if each.name == "m"]
    assert isinstance(model, lsp.DocumentSymbol)
    assert [each.name for each in model.children or ()] == ["w"]
    assert model.selection_range.start == place(FILE, "m(x")
    folded = await editor.text_document_folding_range_async(lsp.FoldingRangeParams(document))
    assert [(each.start_line, each.end_line) for each in folded or ()] == [(2, 4), (6, 10), (14, 16), (18, 23)]
    for word, label, active in (("x)\n", "half(x: [batch, embed])", 0), ("y * w)", "mean(x, over =)", 0)):
        asked = lsp.SignatureHelpParams(document, place(FILE, word))
        signature = await editor.text_document_signature_help_async(asked)
        assert signature is not None
        assert (signature.signatures[0].label, signature.active_parameter) == (label, active)
    nowhere = lsp.SignatureHelpParams(document, place(FILE, "train"))
    assert await editor.text_document_signature_help_async(nowhere) is None

    # Canonical form.
    options = lsp.FormattingOptions(tab_size=2, insert_spaces=True)
    loose = FILE.replace("  loss mean(y * w)", " loss   mean( y*w )")
    await editor.write(path, loose, 4)
    edits = await editor.text_document_formatting_async(lsp.DocumentFormattingParams(document, options))
    assert edited(loose, list(edits or ())) == FILE
    await editor.write(path, "axis", 5)
    with pytest.raises(JsonRpcException):
        await editor.text_document_formatting_async(lsp.DocumentFormattingParams(document, options))

    # Errors of an imported file are said of that file, and taken back.
    other = folder / "other.par"
    other.write_text("axis a = nothing\n")
    await editor.write(path, 'import "other.par"\n', 6)
    assert [each.code for each in await editor.heard_of(other, lambda told: bool(told))] == ["E0202"]
    other.write_text("axis a = 1\n")
    await editor.write(path, 'import "other.par"\n\n', 7)
    assert await editor.heard_of(other, lambda told: not told) == []
    editor.close(path)
    await editor.answered()


async def of_several_files(editor: Editor, folder: Path) -> None:
    """A block in a file of its own, which is open, and not saved as it is."""
    main, parts = folder / "main.par", folder / "parts" / "half.par"
    at = FILE.index("block half")
    block = FILE[at : FILE.index("model m")]
    text = 'import "parts/half.par"\n' + FILE.replace(block, "")
    parts.parent.mkdir()
    parts.write_text("axis a = 1\n")
    main.write_text(text)
    assert [each.code for each in await editor.write(main, text, 1)] == ["E0206"]
    # What is typed there is what counts here.
    await editor.write(parts, "\n" + block, 1)
    assert await editor.heard_of(main, lambda told: not told) == []
    document = lsp.TextDocumentIdentifier(main.as_uri())
    for word in ("half(x)", '"parts/half.par"'):
        found = await editor.text_document_definition_async(lsp.DefinitionParams(document, place(text, word)))
        assert isinstance(found, list)
        assert found[0].uri == parts.as_uri()
        assert found[0].range.start.line == (1 if word == "half(x)" else 0)
    context = lsp.ReferenceContext(include_declaration=False)
    references = await editor.text_document_references_async(
        lsp.ReferenceParams(context, lsp.TextDocumentIdentifier(parts.as_uri()), lsp.Position(1, 7))
    )
    assert [each.uri for each in references or ()] == [main.as_uri()]
    there = lsp.PrepareRenameParams(document, place(text, "half(x)"))
    assert await editor.text_document_prepare_rename_async(there)
    with pytest.raises(JsonRpcException, match="there is no name here"):
        await editor.text_document_prepare_rename_async(lsp.PrepareRenameParams(document, place(text, "train")))
    edit = await editor.text_document_rename_async(lsp.RenameParams(document, place(text, "half(x)"), "part"))
    assert edit is not None
    assert edit.changes is not None
    assert edited(text, list(edit.changes[main.as_uri()])) == text.replace("half(", "part(")
    assert edited("\n" + block, list(edit.changes[parts.as_uri()])) == "\n" + block.replace("half(", "part(")
    assert await editor.text_document_hover_async(lsp.HoverParams(document, place(text, "half(x)")))
    # Closed, it is what is saved; and what others save is read.
    editor.close(parts)
    assert [each.code for each in await editor.heard_of(main, bool)] == ["E0206"]
    parts.write_text(block)
    change = lsp.FileEvent(parts.as_uri(), lsp.FileChangeType.Changed)
    editor.workspace_did_change_watched_files(lsp.DidChangeWatchedFilesParams([change]))
    assert await editor.heard_of(main, lambda told: not told) == []


@pytest.mark.parametrize(
    "text", ["", "\0", "axis a = 1\nmodel m(x: [a]) {", "(" * 5000, "axis ä = 1", "\ufeffaxis a = 1"]
)
def test_any_text_is_known_as_far_as_it_goes(text: str) -> None:
    document = Document(text, "m.par")
    assert described(document, 1, 1) is None or "axis" in described(document, 1, 1)  # type: ignore[operator]
    assert {"loss", "softmax"} <= {word for word, _ in document.suggestions(1)}
    assert document.at(9, 9) is None
    with pytest.raises(ValueError):
        rename(document.workspace, document.place, 9, 9, "x")


INITIALIZE = {"id": 1, "method": "initialize", "params": {"processId": None, "rootUri": None, "capabilities": {}}}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([], 0),
        ([INITIALIZE, {"method": "exit"}], 1),
        ([INITIALIZE, {"id": 2, "method": "shutdown"}, {"method": "exit"}], 0),
        ([INITIALIZE], 0),
        ([{"method": "exit"}], 1),
        ([INITIALIZE, {"id": 2, "method": "shutdown"}], 0),
    ],
)
def test_it_ends_without_a_word(messages: list[dict], status: int) -> None:
    """At `exit`, with the status that the protocol asks for, and at the end of its input."""
    texts = [json.dumps({"jsonrpc": "2.0", **each}) for each in messages]
    given = "".join(f"Content-Length: {len(text)}\r\n\r\n{text}" for text in texts)
    done = subprocess.run(
        [sys.executable, "-m", "partita", "lsp"], input=given, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.count('"result"') == sum("id" in each for each in messages)


def test_without_pygls_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.cli.extras._there", lambda name: name != "pygls")
    done = here("lsp", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "partita: `partita lsp` needs pygls: pip install 'partita[editor]'\n")
