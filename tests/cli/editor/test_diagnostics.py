"""Diagnostics as one types are those of `partita check`; and a burst of keys is one check, not many."""

from __future__ import annotations

from pathlib import Path

import pytest
from lsprotocol import types as lsp

from partita.dsl.diagnostic import Diagnostic
from partita.dsl.load import load
from tests.cli.editor.client import Editor, talk
from tests.files import SPECS

WRONG = Path(__file__).parents[2] / "dsl" / "wrong"


def units(text: str) -> int:
    """The length of a text as the protocol counts."""
    return len(text.encode("utf-16-le")) // 2


def checked(each: Diagnostic) -> tuple[str, int, int, str]:
    """Code, line, column and text of a diagnostic of `check`."""
    parts = [each.message, *each.notes, *([f"help: {each.help}"] if each.help else [])]
    if each.span is None:
        return each.code, 0, 0, "\n".join(parts)
    line = each.span.source.line(each.span.line)
    return each.code, each.span.line - 1, units(line[: each.span.column - 1]), "\n".join(parts)


def said(each: lsp.Diagnostic) -> tuple[object, int, int, str]:
    return each.code, each.range.start.line, each.range.start.character, each.message


FILES = sorted(WRONG.glob("*.par"))


@pytest.mark.soak
def test_wrong_files_are_as_check_says() -> None:
    async def session(editor: Editor) -> None:
        for path in FILES:
            editor.told.clear()
            editor.send(path, path.read_text(), 1)
            await editor.heard_of(path, lambda told: True)
            await editor.answered()
            expected: dict[str, list[tuple[str, int, int, str]]] = {}
            for each in load(path)[1]:
                where = Path(each.span.source.name) if each.span is not None else path
                expected.setdefault(where.as_uri(), []).append(checked(each))
            assert {uri: list(map(said, own)) for uri, own in editor.told.items() if own} == expected, path.name
            editor.close(path)
            await editor.answered()
            assert not any(editor.told.values()), path.name

    talk(session)


@pytest.mark.soak
def test_what_is_typed_fast_is_not_checked_key_by_key(tmp_path: Path) -> None:
    path = SPECS / "gpt.par"
    text = path.read_text()
    typed = [f"{text}\naxis {'z' * i}" for i in range(1, 101)]
    other, first, second = (tmp_path / name for name in ("other.par", "first.par", "second.par"))
    other.write_text("axis a = nothing\n")

    async def session(editor: Editor) -> None:
        await editor.write(path, text, 1)
        for version, each in enumerate(typed, 2):
            editor.send(path, each, version)
        while editor.versions[path.as_uri()][-1] != 101:
            await editor.heard_of(path, lambda told: True)
            await editor.answered()
        versions = [version or 0 for version in editor.versions[path.as_uri()]]
        assert versions == sorted(versions)
        assert len(versions) < 50
        assert [each.code for each in editor.told[path.as_uri()]] == ["E0103"]

        # A file that two documents import is blamed as long as one of them is open.
        await editor.write(first, 'import "other.par"\n', 1)
        await editor.write(second, 'import "other.par"\n', 1)
        assert [each.code for each in await editor.heard_of(other, bool)] == ["E0202"]
        editor.close(first)
        await editor.answered()
        assert [each.code for each in editor.told[other.as_uri()]] == ["E0202"]
        editor.close(second)
        await editor.answered()
        assert editor.told[other.as_uri()] == []

    talk(session)
