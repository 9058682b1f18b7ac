"""The TextMate grammar of .par files, for highlighting: `make grammar` writes it from the language's words."""

from __future__ import annotations

import json
from typing import Any

from partita.cli.editor.lexer import CONSTANTS, LOGICAL
from partita.dsl.syntax.lexer import language
from partita.dsl.types import DTYPES
from tests.files import ROOT

FILE = ROOT / "editors" / "vscode" / "syntaxes" / "par.tmLanguage.json"


def grammar() -> dict[str, Any]:
    """The grammar. A word that is not reserved is a keyword at the start of a line, unless it is a call or an entry."""
    table = language()
    words = sorted(word for word in table.words if word.isalpha() and word not in LOGICAL | CONSTANTS)
    soft = [word for word in words if table.words[word] in table.soft]
    reserved = [word for word in words if word not in soft]
    escape = {"name": "constant.character.escape.par", "match": r"\\."}
    number = r"\b[0-9][0-9_]*(\.[0-9][0-9_]*)?([eE][+-]?[0-9]+)?(%|[A-Za-z]+(/s\b)?)?"
    rules = (
        ("comment.line.number-sign", "#.*$"),
        ("constant.numeric", number),
        ("constant.language", _one_of(sorted(CONSTANTS))),
        ("keyword.operator.word", _one_of(sorted(LOGICAL))),
        ("storage.type", _one_of(DTYPES)),
        ("keyword.control", _one_of(reserved)),
        ("keyword.control", rf"^\s*{_one_of(soft)}(?!\s*[(=])"),
        ("entity.name.function", r"\b[A-Za-z_]\w*(?=\()"),
        ("keyword.operator", r"->|\.\.|<=|>=|==|!=|[-=/+~*<>]"),
    )
    patterns: list[dict[str, Any]] = [{"name": f"{name}.par", "match": match} for name, match in rules]
    patterns.insert(1, {"name": "string.quoted.double.par", "begin": '"', "end": '"|$', "patterns": [escape]})
    return {"name": "Partita", "scopeName": "source.par", "fileTypes": ["par"], "patterns": patterns}


def _one_of(words: tuple[str, ...] | list[str]) -> str:
    return rf"\b({'|'.join(words)})\b"


def text() -> str:
    """The file's text."""
    return json.dumps(grammar(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
