"""The grammar has no conflicts, and the table beside it is its table."""

import json

import pytest
from lark import Lark

from partita.dsl.advice.report import Report
from partita.dsl.syntax.lexer import RESERVED_WORDS, language, tokenize
from partita.dsl.syntax.parser import BUILDERS
from partita.dsl.syntax.source import Source
from tests.dsl import parse_table
from tests.files import SPECS

FILES = sorted(SPECS.glob("*.par"))
GRAMMAR = parse_table.GRAMMAR.read_text()


def test_the_grammar_is_lalr_without_conflicts():
    Lark(GRAMMAR, parser="lalr", lexer="basic", strict=True, start=list(parse_table.STARTS))


def test_the_table_is_the_grammars():
    assert parse_table.TABLE.read_text() == parse_table.text(parse_table.build(GRAMMAR)), "run `make grammar`"


def test_every_rule_has_a_builder():
    built = {builder for builder, *_ in json.loads(parse_table.TABLE.read_text())["rules"]} - {"", "?"}
    assert built == set(BUILDERS)


@pytest.mark.few(4)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_tokens_are_larks(path):
    text = path.read_text()
    lark = Lark(GRAMMAR, parser="lalr", lexer="basic", strict=True, start=list(parse_table.STARTS))
    ours = [(t.kind, t.text) for t in tokenize(Source("x", text), Report())][:-1]
    assert ours == [(t.type, str(t)) for t in lark.lex(text)]


def test_keywords_are_those_of_the_language():
    reserved = "import axis block return model param sample let repeat as loss metric mesh layout shard recompute"
    reserved += " train expect true false"
    assert set(reserved.split()) == RESERVED_WORDS
    soft = {word for word in language().words if word.isalpha()} - RESERVED_WORDS
    first = {
        "const",
        "buffer",
        "update",
        "output",
        "and",
        "or",
        "not",
        "op",
        "scan",
        "backward",
        "weights",
        "skip",
        "offload",
        "overlap",
        "in",
        *("after", "by", "padded", "repeated"),
        *("adapters", "lora", "share", "frozen", "ema", "copy", "keep", "number", "on", "stage", "place", "schedule"),
    }
    assert soft == {*first, "optimizer", "freeze"}
