"""Files are highlighted by the words of the language."""

from __future__ import annotations

import json
import re

import pytest
from pygments import lex
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.token import Comment, Error, Keyword, Name, Number, Operator

from partita.cli.editor.lexer import ParLexer
from partita.dsl.syntax.lexer import language
from tests.cli.editor import textmate
from tests.files import ROOT, SPECS

LINES = """const drop = 10%  # a constant
update bias = update + 1e-3
let op = scan(x, softmax(y)) and not true
param w: f32[embed] ~ normal(0.02)
"""


def test_pygments_finds_the_lexer() -> None:
    assert isinstance(get_lexer_by_name("par"), ParLexer)
    assert isinstance(get_lexer_for_filename("small.par"), ParLexer)


@pytest.mark.parametrize("path", sorted(SPECS.rglob("*.par")), ids=lambda path: path.name)
def test_every_file_is_lexed_whole(path) -> None:  # type: ignore[no-untyped-def]
    text = path.read_text()
    tokens = list(ParLexer().get_tokens_unprocessed(text))
    assert "".join(word for _, _, word in tokens) == text
    assert Error not in {kind for _, kind, _ in tokens}


def test_words_are_keywords_where_they_stand() -> None:
    kinds = [(word, kind) for kind, word in lex(LINES, ParLexer()) if word.strip()]
    assert (kinds[0], kinds[3], kinds[4]) == (
        ("const", Keyword),
        ("10%", Number),
        ("# a constant", Comment.Single),
    )
    assert [kind for word, kind in kinds if word == "update"] == [Keyword, Name]
    found = dict(kinds)
    assert (found["op"], found["scan"], found["softmax"]) == (Name, Name.Function, Name.Builtin)
    assert (found["and"], found["true"], found["f32"]) == (Operator.Word, Keyword.Constant, Keyword.Type)
    assert Error in {kind for kind, _ in lex("let x = ?", ParLexer())}


def test_the_textmate_grammar_is_the_one_of_the_language() -> None:
    """Otherwise: `make grammar`."""
    assert textmate.FILE.read_text() == textmate.text()
    matches = [each["match"] for each in textmate.grammar()["patterns"] if "match" in each]
    for word in language().words:
        assert any(re.search(each, f"{word} x") for each in matches) or not word.isalpha(), word
    package = json.loads((ROOT / "editors" / "vscode" / "package.json").read_text())
    (grammar,) = package["contributes"]["grammars"]
    assert (ROOT / "editors" / "vscode" / grammar["path"]) == textmate.FILE
