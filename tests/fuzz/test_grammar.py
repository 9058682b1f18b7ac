"""Texts drawn from the grammar itself: whatever it derives parses, and is checked and formatted without a surprise.

Such texts know no meaning: names are used wrongly in every way. Those of `tests.dsl.strategies` are drawn as trees.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.lark import from_lark
from lark import Lark

from partita.dsl.syntax.lexer import RESERVED_WORDS, language
from tests.dsl import parse_table
from tests.fuzz import targets

GRAMMAR = Lark(
    parse_table.GRAMMAR.read_text(), parser="lalr", lexer="basic", strict=True, start=list(parse_table.STARTS)
)
# Names where they may not stand. `not` stands where names do.
SOFT = sorted({word for word in language().words if word.isalpha()} - RESERVED_WORDS - {"not"})
WORDS = ["a", "batch", "embed", "x", "w", "net", "line", "pipe", "cut", "s", "dot", "mean", "relu", "normal", "zeros"]
WORDS += [
    "f32",
    "i64",
    "over",
    "size",
    "gpipe",
    "from_file",
    "microbatches",
    "adamw",
    "random",
    "lr",
    "steps",
    "data",
    *SOFT,
]
NAMES = st.sampled_from(WORDS) | st.from_regex(r"[a-z_][a-z0-9_]{0,3}", fullmatch=True)
TERMINALS = {
    "NAME": NAMES.filter(lambda word: word not in RESERVED_WORDS),
    "NUMBER": st.sampled_from(
        ["0", "1", "2", "0.5", "8%", "80GiB", "1e-3", "1e300", "1e999", "1__0", "9" * 50, "3GB/s"]
    ),
    "STRING": st.sampled_from(['"a"', '""', '"tiny.par"', '"../tiny.par"', '"a\\"b"', '"*"', '"/etc/passwd"']),
    "COMMENT": st.sampled_from(["# a comment\n", "#\n"]),
    "SPACE": st.sampled_from([" ", "\n", "\n\n\n", "\t"]),
    **{
        word.upper(): st.just(word)
        for word in ("param", "model", "layout", "schedule", "true", "false", "and", "or", "not")
    },
}


def derived(start: str, terminals: Iterable[str] = TERMINALS) -> st.SearchStrategy[str]:
    """Texts of a symbol in which these terminals occur, with blanks around words that would run together."""
    return from_lark(GRAMMAR, start=start, explicit={name: TERMINALS[name].map(_apart) for name in terminals})


def _apart(text: str) -> str:
    return text if text.startswith("#") else f" {text} "


IN_EXPRESSIONS = TERMINALS.keys() - {"PARAM", "MODEL", "LAYOUT", "SCHEDULE"}
slow = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.soak
@slow
@given(derived("file"))
def test_what_the_grammar_derives_parses(text: str):
    assert targets.parsed(text) is not None


@slow
@given(derived("file"))
def test_it_is_checked(text: str):
    targets.checker(text.encode())


@pytest.mark.soak
@slow
@given(derived("file"))
def test_it_is_formatted(text: str):
    targets.formatter(text.encode())


@pytest.mark.soak
@slow
@given(
    st.sampled_from(["batch", "train.steps", "train.optimizer", "schedule", "laptop.pipe"]),
    derived("expression", IN_EXPRESSIONS),
)
def test_any_expression_overrides(key: str, value: str):
    targets.overrides(f"{key}={value}".replace("\n", " ").encode())
