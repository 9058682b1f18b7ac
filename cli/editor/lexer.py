"""Highlights .par files by Pygments, which finds this lexer by an entry point: for documents, and `pygmentize`.

Its tokens are those of the language's own lexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pygments.lexer import Lexer
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

from partita.dsl.functions.signatures import FUNCTIONS
from partita.dsl.syntax.lexer import language
from partita.dsl.types import DTYPES

OPERATORS = frozenset(("->", "..", "=", "-", "/", "+", "~", "*"))
LOGICAL = frozenset(("and", "or", "not"))
CONSTANTS = frozenset(("true", "false"))
KINDS = {"COMPARE": Operator, "NUMBER": Number, "STRING": String, "COMMENT": Comment.Single, "SPACE": Whitespace}


class ParLexer(Lexer):  # type: ignore[misc]  # pygments has no types
    """Lexer of .par files."""

    name = "Partita"
    url = ""
    aliases: ClassVar[list[str]] = ["par", "partita"]
    filenames: ClassVar[list[str]] = ["*.par"]
    mimetypes: ClassVar[list[str]] = ["text/x-partita"]

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, Any, str]]:
        """Place, kind and text of each token."""
        table, position, first = language(), 0, True  # first on its line
        while position < len(text):
            match = table.pattern.match(text, position)
            if match is None:
                yield position, Error, text[position]
                position, first = position + 1, False
                continue
            word, kind = match.group(), str(match.lastgroup)
            yield position, _kind(word, kind, first, text[match.end() : match.end() + 1]), word
            first = "\n" in word or (first and kind == "SPACE")
            position = match.end()


def _kind(word: str, kind: str, first: bool, after: str) -> Any:
    """The kind of a token; `after` is the character that follows."""
    if kind == "MARK":
        return Operator if word in OPERATORS else Punctuation
    if kind != "NAME":
        return KINDS[kind]
    if word in LOGICAL:
        return Operator.Word
    if word in CONSTANTS:
        return Keyword.Constant
    if word in DTYPES:
        return Keyword.Type
    terminal = language().words.get(word)
    # A word that is not reserved is a keyword where a statement or an entry begins.
    if terminal is not None and (terminal not in language().soft or (first and after != "(")):
        return Keyword
    if after == "(":
        return Name.Builtin if word in FUNCTIONS else Name.Function
    return Name
