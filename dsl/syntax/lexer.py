"""Text → tokens, by the terminals of the grammar's table.

Invalid input is reported and yields a BROKEN token, about which the parser reports nothing more. Limits on length,
count and nesting are enforced here, before anything is built.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from partita import grammars
from partita.dsl import limits
from partita.dsl.advice.foreign import SIGNS
from partita.dsl.advice.report import Full, Report
from partita.dsl.syntax.source import Source, Span
from partita.dsl.syntax.units import shortened

# A string in single quotes; a number and white space before its unit.
_QUOTED, _SPACED = re.compile(r"'([^'\"\n]*)'"), re.compile(r"(?<!\w)([0-9][0-9_.]*) +\Z")
END, BROKEN = "$END", "$BROKEN"
OPENING = {"(": ")", "[": "]", "{": "}"}
CLOSING = {close: open for open, close in OPENING.items()}

# The other words of the grammar are keywords only where they stand: where none is expected, they are names.
RESERVED_WORDS = frozenset(
    word
    for words in (
        "import axis block return model param sample let repeat as loss metric mesh layout shard recompute train",
        "expect true false",
    )
    for word in words.split()
)

# What declarations begin with.
DECLARATIONS = (
    *("import", "axis", "const", "block", "op", "model", "mesh", "layout", "schedule", "adapters"),
    *("optimizer", "weights", "train", "expect"),
)

# What messages call the terminals without a fixed text.
SPOKEN = {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": "a string",
    "COMPARE": "a comparison",
    END: "the end of input",
}


@frozen(eq=False)
class Language:
    """The grammar's table (see `partita.grammars`) in the form that the lexer and the parser use."""

    words: dict[str, str]
    soft: frozenset[str]  # terminals of the words that are not reserved
    spoken: dict[str, str]
    pattern: re.Pattern[str]
    ignored: frozenset[str]
    rules: list[tuple[str, int, tuple[int, ...], str]]
    states: list[dict[str, int]]
    starts: dict[str, tuple[int, int]]


@cache
def language() -> Language:
    """The language of .par files, loaded once."""
    data: dict[str, Any] = json.loads(Path(grammars.__file__).with_name("par.json").read_bytes())
    words: dict[str, str] = data["words"]
    marks = sorted((word for word in words if not word.isalpha()), key=len, reverse=True)
    parts = [f"(?P<{name}>{pattern})" for name, pattern in data["patterns"]]
    parts.append(f"(?P<MARK>{'|'.join(map(re.escape, marks))})")
    return Language(
        words,
        frozenset(name for word, name in words.items() if word.isalpha() and word not in RESERVED_WORDS),
        {name: f"`{word}`" for word, name in words.items()} | SPOKEN,
        re.compile("|".join(parts)),
        frozenset(data["ignored"]),
        [
            (builder, length, tuple(kept), origin)
            for (builder, length, kept), origin in zip(data["rules"], data["origins"], strict=True)
        ],
        data["states"],
        {start: (first, last) for start, (first, last) in data["starts"].items()},
    )


@frozen(eq=False)
class Token:
    """A terminal with its text; `depth` is the number of enclosing brackets."""

    kind: str
    text: str
    start: int
    end: int
    depth: int


def tokenize(
    source: Source, report: Report, comments: list[Token] | None = None, start: int = 0, end: int | None = None
) -> list[Token]:
    """The tokens of a source from `start` to `end`, the last one END; collects comments. Raises Full at a limit."""
    table = language()
    match, words, ignored = table.pattern.match, table.words, table.ignored
    text, tokens, position, depth = source.text, list[Token](), start, 0
    end = len(text) if end is None else end
    while position < end:
        matched = match(text, position, end)
        if matched is None:
            position = _broken(source, position, report)
            tokens.append(Token(BROKEN, "", position - 1, position, depth))
            continue
        kind, start, position = str(matched.lastgroup), position, matched.end()
        if kind in ignored:
            if kind == "COMMENT" and comments is not None:
                comments.append(Token(kind, matched.group().rstrip(), start, position, depth))
            continue
        word = matched.group()
        if kind == "NAME" and len(word) > limits.NAME_CHARACTERS:
            message = f"name `{shortened(word)}` has {len(word)} characters"
            report.error("E0006", message, Span(source, start, position), help=f"at most {limits.NAME_CHARACTERS}")
            kind = BROKEN
        if word in CLOSING:
            depth = max(0, depth - 1)
        tokens.append(Token(words.get(word, kind), word, start, position, depth))
        if word in OPENING:
            depth += 1
            if depth > limits.BRACKETS:
                report.error("E0005", "brackets are nested too deeply", Span(source, start, position))
                raise Full
        report.tokens += 1
        if report.tokens > limits.TOKENS:
            report.error("E0004", f"more than {limits.TOKENS} tokens", Span(source, start, position))
            raise Full
    tokens.append(Token(END, "", end, end, 0))
    return tokens


def _broken(source: Source, position: int, report: Report) -> int:
    """Report an invalid token; returns the position after it."""
    text, character = source.text, source.text[position]
    if character == '"':
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        message = "this string is not terminated on its line"
        report.error("E0102", message, Span(source, position, end), help='end it with `"`')
        return end
    end = position + 1
    if character.isalpha():
        start = position
        while start > 0 and _in_word(text[start - 1]):
            start -= 1
        while end < len(text) and _in_word(text[end]):
            end += 1
        message = f"`{character}` cannot be part of a name: `{shortened(text[start:end])}`"
        help = (
            SIGNS.get(character)
            or "names consist of the letters a to z and A to Z, digits and `_`; comments may have any character"
        )
        report.error("E0101", message, Span(source, start, end), help=help)
        return end
    if character == "'" and (quoted := _QUOTED.match(text, position)) is not None:
        end = quoted.end()
        help = f'write `"{quoted[1]}"`, in double quotes'
        report.error("E0101", f"unexpected character `{character}`", Span(source, position, end), help=help)
        return end
    if character == "%" and (number := _SPACED.search(text, 0, position)) is not None:
        message, place = "a unit follows its number without a space", Span(source, number.start(), end)
        report.error("E0107", message, place, help=f"write `{number[1]}%`")
        return end
    while end < len(text) and text[end] == character:
        end += 1
    shown = f"`{character}`" if character.isprintable() else f"U+{ord(character):04X}"
    help = SIGNS.get(character, "remove it; text is in double quotes, and comments begin with `#`")
    report.error("E0101", f"unexpected character {shown}", Span(source, position, end), help=help)
    return end


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"
