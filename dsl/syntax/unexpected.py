"""What is said of a token that the grammar does not take where it stands.

In this order: a bracket that is never closed, a statement that has no place there, notation of other languages, a
misspelled keyword, a sign that is missing, surplus or another one; otherwise what the grammar would take. A correction
is proposed only if the parser would go on with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from attrs import frozen

from partita.dsl.advice import foreign
from partita.dsl.advice.report import nearest
from partita.dsl.config.builtins import OPTIMIZERS, TABLES
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.functions.signatures import FUNCTIONS
from partita.dsl.syntax.lexer import CLOSING, DECLARATIONS, END, OPENING, Language, Token
from partita.dsl.syntax.source import Source, Span
from partita.dsl.syntax.units import UNITS, shortened

# What statements of a body begin with; and what begins nothing within brackets.
STATEMENTS = frozenset(
    (
        *("param", "buffer", "sample", "share", "frozen", "ema", "let", "repeat", "scan", "keep", "update"),
        *("loss", "metric", "output", "return"),
    )
)
# Signs that may be missing, or stand for one another, the likeliest first.
SIGNS = (",", "=", ":", "~", "->", "as", "on", "(", "{", "[", ")", "]", "}")
# So many tokens after a correction must fit.
AHEAD = 10
# A path that is no quotient of names: it begins with a sign, or has a `*` for several files. And the end of what a path
# may begin with.
_PATH = re.compile(r"(?:~|\.{1,2})?/[\w.*~][\w./*~-]*|[A-Za-z_][\w.-]*/[\w./-]*\*[\w./*-]*\.\w+", re.ASCII)
_BEGUN = re.compile(r"[\w./*~-]*$", re.ASCII)
AROUND = 80  # characters in which it is looked for
TIMES = 4  # that one correction may be needed among these
PHRASES = (
    ("a declaration", frozenset(word.upper() for word in DECLARATIONS)),
    ("an expression", frozenset(("NAME", "NUMBER", "STRING", "LPAR", "LSQB", "MINUS", "NOT", "TRUE", "FALSE"))),
    ("an expression", frozenset(("NAME", "NUMBER", "STRING", "LPAR", "LSQB", "MINUS", "TRUE", "FALSE"))),
    ("a statement", frozenset(word.upper() for word in STATEMENTS - {"keep", "return"})),
    ("a rule", frozenset(("SHARD", "STAGE", "PLACE", "RECOMPUTE", "OFFLOAD", "OVERLAP"))),
    ("a rule", frozenset(("FREEZE", "UPDATE"))),
    ("a line", frozenset(("NAME", "SKIP"))),
    ("an operator", frozenset(("PLUS", "MINUS", "TIMES", "OVER", "COMPARE", "AND", "OR"))),
    ("an operator", frozenset(("PLUS", "MINUS", "TIMES", "OVER", "AND", "OR"))),
    ("an operator", frozenset(("PLUS", "MINUS", "TIMES", "OVER"))),
)


class Parser(Protocol):
    """The parser where it stopped."""

    def accepts(self, symbols: Iterable[str], dropped: int = 0) -> int:
        """How many of some terminals, one after the other, it would take after the last ones are `dropped`."""


@frozen(eq=False)
class Unexpected:
    """The token at `index`, before which the parser stopped: `wanted` are the terminals that it takes there, `opened`
    the brackets that are open.
    """

    source: Source
    tokens: Sequence[Token]
    index: int
    wanted: Sequence[str]
    opened: Sequence[Token]
    table: Language
    parser: Parser

    def diagnostic(self) -> Diagnostic:
        """What is wrong, where, and what to write."""
        return (
            self.unclosed()
            or self.bracket()
            or self.word()
            or self.misplaced()
            or self.called()
            or self.chained()
            or self.quoted()
            or self.path()
            or self.spaced()
            or self.keyword()
            or self.foreign()
            or self.misspelled()
            or self.missing()
            or self.surplus()
            or self.plain()
        )

    # ------------------------------------------------------------ what is around

    @property
    def token(self) -> Token:
        """The unexpected token."""
        return self.tokens[self.index]

    @property
    def before(self) -> Token | None:
        """The token before it, which the parser took."""
        return self.tokens[self.index - 1] if self.index else None

    @property
    def inner(self) -> Token | None:
        """The innermost bracket that is open."""
        return self.opened[-1] if self.opened else None

    def span(self, token: Token) -> Span:
        """The place of a token; the end of input is where the last one ends."""
        if token.kind == END and self.before is not None:
            return Span(self.source, self.before.end, self.before.end)
        return Span(self.source, token.start, token.end)

    def line_before(self, token: Token) -> str:
        """What stands before a token on its line."""
        return self.source.text[self.source.text.rfind("\n", 0, token.start) + 1 : token.start]

    def begins_line(self, token: Token) -> bool:
        """Whether only white space stands before a token on its line."""
        return not self.line_before(token).strip()

    def indentation(self, token: Token) -> int:
        """The white space with which the line of a token begins."""
        line = self.line_before(token)
        return len(line) - len(line.lstrip())

    def word_of(self, opening: Token) -> str:
        """The word that a brace belongs to, such as `block` or `repeat`."""
        owners = (
            each.text
            for each in reversed(self.tokens[: self.tokens.index(opening)])
            if each.depth == opening.depth and each.kind != "NAME" and each.text in (*DECLARATIONS, *STATEMENTS)
        )
        return next(owners, "")

    def statement(self) -> tuple[str, Token | None]:
        """The word that the last statement before, in the same braces, begins with, and the name after it."""
        for position in range(self.index - 1, -1, -1):
            each = self.tokens[position]
            depth = self.token.depth + (self.token.text in CLOSING)
            if each.depth < depth:
                break
            if each.depth == depth and each.kind != "NAME" and each.text in STATEMENTS:
                following = self.tokens[position + 1]
                return each.text, following if following.kind == "NAME" else None
        return "", None

    def parameters(self) -> Collection[str]:
        """The names of what the call around takes, as far as it is known."""
        called = self.tokens[self.tokens.index(self.inner) - 1].text if self.inner else ""
        if called in FUNCTIONS:
            return [slot.name for slot in FUNCTIONS[called].slots]
        return next((table[called].names for table in TABLES if called in table), ())

    def fits(self, *kinds: str, skipped: int = 0, dropped: int = 0) -> int:
        """How often these terminals must stand before, or instead of so many, of the tokens to come, for the parser to
        go on: once, and again where it stops for the same reason; 0 if it does not.
        """
        following = self.tokens[self.index + skipped : self.index + skipped + AHEAD]
        symbols = [*kinds, *(each.kind for each in following)]
        for times in range(1, TIMES + 1):
            accepted = self.parser.accepts(symbols, dropped)
            if accepted <= len(kinds) or accepted == len(symbols) or (skipped and symbols[accepted] != self.token.kind):
                return times if accepted == len(symbols) else 0
            symbols[accepted : accepted + skipped] = kinds
        return 0

    def expected(self) -> str:
        """What the grammar would take, in words; sets such as operators are summarized."""
        symbols = set(self.wanted)
        phrases = []
        for phrase, group in PHRASES:
            if symbols >= group:
                phrases.append(phrase)
                symbols -= group
        phrases += sorted(self.table.spoken[symbol] for symbol in symbols)
        if len(phrases) < 2:
            return f"expected {''.join(phrases) or 'the end of input'}"
        return f"expected {', '.join(phrases[:-1])} or {phrases[-1]}"

    def error(self, message: str, help: str, at: Span | None = None) -> Diagnostic:
        """An unexpected token."""
        return Diagnostic("E0103", message, at or self.span(self.token), help=help)

    # ------------------------------------------------------------ brackets

    def unclosed(self) -> Diagnostic | None:
        """A bracket that is open where something stands that no bracket has in it."""
        token = self.token
        if self.inner is None:
            return None
        round = self.inner.text != "{"
        statement = token.kind != "NAME" and token.text in STATEMENTS and self.begins_line(token)
        declaration = token.text in DECLARATIONS and self.begins_line(token) and not self.indentation(token)
        named = self.index + 1 < len(self.tokens) and self.tokens[self.index + 1].kind == "EQUAL"
        if token.kind == END or (declaration and not (round and named)):
            return self.never_closed(self.suspect() if not round else self.inner)
        if round and ((statement and not named) or token.text == "}"):
            return self.never_closed(self.inner)
        return None

    def never_closed(self, bracket: Token) -> Diagnostic:
        """A bracket that is never closed; with the place where it could be, if that makes the text right."""
        token, close = self.token, OPENING[bracket.text]
        help = f"insert `{close}` at the end"
        if token.kind != END:
            help = f"insert `{close}` before `{shortened(token.text)}` at {self.span(token).place}"
        known = bracket is self.inner and self.fits(self.table.words[close])
        return Diagnostic(
            "E0105", f"`{bracket.text}` is never closed", self.span(bracket), help=help if known else None
        )

    def suspect(self) -> Token:
        """The open brace that was most likely forgotten: one that another, less indented one seems to close."""
        stack: list[Token] = []
        for each in self.tokens[self.tokens.index(self.opened[0]) : self.index]:
            if each.text in OPENING:
                stack.append(each)
            elif each.text in CLOSING and stack:
                opening = stack.pop()
                if self.begins_line(each) and self.indentation(each) < self.indentation(opening):
                    return opening
        return self.opened[-1]

    def bracket(self) -> Diagnostic | None:
        """A bracket that closes nothing, or one of another kind."""
        token, inner = self.token, self.inner
        if token.text not in CLOSING:
            return None
        if inner is None or (inner.text == "{" and token.text != "}"):
            help = "remove it" if self.fits(skipped=1) else None
            return Diagnostic("E0105", f"`{token.text}` closes nothing", self.span(token), help=help)
        close = OPENING[inner.text]
        if close == token.text:
            return None
        kind = self.table.words[close]
        help = self.expected()
        if self.fits(kind):
            help = f"insert `{close}`"
        elif self.fits(kind, skipped=1):
            help = f"write `{close}`"
        notes = (f"`{inner.text}` was opened at {self.span(inner).place}",)
        return Diagnostic("E0105", f"`{token.text}` does not close `{inner.text}`", self.span(token), notes, help)

    # ------------------------------------------------------------ statements

    def word(self) -> Diagnostic | None:
        """A word with which other languages say something."""
        following = self.tokens[self.index + 1].text if self.token.kind != END else ""
        if self.before is not None and self.before.text == "lambda":
            at = self.before
        else:
            at = self.tokens[self.index + (self.token.text == "}" and following in ("else", "elif"))]
        if at.text not in foreign.WORDS or (at.text in self.table.words and at.kind in self.wanted):
            return None
        return self.error(f"there is no `{at.text}`", foreign.WORDS[at.text], self.span(at))

    def misplaced(self) -> Diagnostic | None:
        """A statement after a `return`, a `return` where none may be, or a block without one."""
        token = self.token
        if self.inner is None or self.inner.text != "{":
            return None
        word = self.word_of(self.inner)
        last, name = self.statement()
        if token.text == "return" and last == "return":
            return self.error("a second `return`", "a block returns once: `return a, b` gives several values")
        if token.text == "return" and word in ("repeat", "scan"):
            help = f"a `{word}` hands on the names that it rebinds: `let x = …`"
            return self.error(f"`return` within a `{word}`", help)
        if token.text == "return" and word == "model":
            return self.error("`return` in a model", "a model ends with `loss …`; only a block ends with `return`")
        if token.kind != "NAME" and token.text in STATEMENTS and last == "return":
            help = "a block ends with its `return`: move that behind this"
            return self.error(f"`{token.text}` after `return`", help)
        if token.text == "}" and word == "block" and "RETURN" in self.wanted:
            help = f"insert `return {name.text}`" if last == "let" and name is not None else "end it with `return …`"
            help = "a `loss` is that of a model: a block ends with `return …`" if last == "loss" else help
            return self.error("this block returns nothing", help)
        return None

    # ------------------------------------------------------------ names

    def called(self) -> Diagnostic | None:
        """A function that is called by a path: of a module, or a method."""
        start = self.index - 1
        while start >= 2 and self.tokens[start].kind == "NAME" and self.tokens[start - 1].kind == "DOT":
            start -= 2
        path = self.tokens[start : self.index]
        if self.token.text != "(" or len(path) < 3 or any(each.kind not in ("NAME", "DOT") for each in path):
            return None
        name, owner = path[-1].text, "".join(each.text for each in path[:-2])
        at = Span(self.source, path[0].start, path[-1].end)
        others = (each.name for each in OPTIMIZERS.values() if name.lower() in each.others)
        names = [*FUNCTIONS, *(name for table in TABLES for name in table)]
        ours = foreign.meant(name, names) or next(others, None) or (nearest(name, names) if owner != "self" else None)
        help = foreign.function(name) or foreign.MEMBERS.get(name)
        if help is None and path[0].text in foreign.MODULES:
            help = f"did you mean `{ours}`?" if ours else None
        elif help is None and ours in FUNCTIONS:
            closed = self.tokens[self.index + 1].text == ")"
            help = f"`{ours}({owner}{'' if closed else ', …'})`: a function takes what it works on as an argument"
        help = help or f"functions are called without a path: `{name}(…)`"
        return Diagnostic("E0103", f"there is no function `{owner}.{name}`", at, help=help)

    def chained(self) -> Diagnostic | None:
        """A method of what an expression gives."""
        following = self.tokens[self.index + 1 : self.index + 3]
        name, opening = following if self.token.kind == "DOT" and len(following) == 2 else (None, None)
        if name is None or opening is None or name.kind != "NAME" or opening.text != "(" or self.before is None:
            return None
        if self.before.text not in (")", "]"):
            return None
        at = Span(self.source, self.token.start, name.end)
        help = f"name the value first, `let a = …`, and write `{name.text}(a)`"
        return Diagnostic("E0103", f"there are no methods such as `.{name.text}(…)`", at, help=help)

    def quoted(self) -> Diagnostic | None:
        """A name in quotes."""
        word = self.token.text[1:-1]
        if self.token.kind != "STRING" or "NAME" not in self.wanted or not (word.isascii() and word.isidentifier()):
            return None
        return self.error(f"`{self.token.text}` is a string where a name is needed", f"write `{word}`, without quotes")

    def spaced(self) -> Diagnostic | None:
        """A unit after a space."""
        number, unit = self.before, self.token.text
        if number is None or number.kind != "NUMBER" or self.token.kind != "NAME" or unit not in UNITS:
            return None
        at = Span(self.source, number.start, self.token.end)
        help = f"write `{number.text}{unit}`"
        return Diagnostic("E0107", "a unit follows its number without a space", at, help=help)

    def keyword(self) -> Diagnostic | None:
        """A keyword where a name is needed."""
        token = self.token
        following = self.tokens[self.index + 1] if token.kind != END else token
        if "NAME" not in self.wanted or not token.text.isalpha() or token.text not in self.table.words:
            return None
        if token.text in DECLARATIONS and following.kind != "EQUAL" and self.begins_line(token):
            return None
        argument = self.inner is not None and self.inner.text == "("
        help = "choose another name" if len(self.wanted) < 3 else self.expected()
        if token.text == "axis" and argument and following.kind == "EQUAL":
            help = "the axes that a function works along are its argument `over`: `over = …`"
        elif following.kind == "EQUAL":
            help = "choose another name"
        elif not argument and self.before is not None and self.before.text == ",":
            help = "remove the comma before it"
        message = f"`{token.text}` is a keyword and cannot be a name"
        return Diagnostic("E0104", message, self.span(token), help=help)

    def path(self) -> Diagnostic | None:
        """The path of a file without quotes, in a place for an expression."""
        if "STRING" not in self.wanted:
            return None
        text, start = self.source.text, self.token.start
        begun = _BEGUN.search(text, max(0, start - AROUND), start)
        match = _PATH.match(text, begun.start()) if begun is not None else None
        if match is None or match.end() <= start:
            return None
        at = Span(self.source, match.start(), match.end())
        return self.error(f"unexpected `{self.token.text}`", f'write `"{match[0]}"`, in double quotes', at)

    def foreign(self) -> Diagnostic | None:
        """What is written so elsewhere."""
        help = foreign.written_here(self.source.text, self.token.start, self.wanted)
        return self.error(f"unexpected `{shortened(self.token.text)}`", help) if help is not None else None

    def misspelled(self) -> Diagnostic | None:
        """A misspelled keyword."""
        words = {word: kind for word, kind in self.table.words.items() if kind in self.wanted}
        near = nearest(self.token.text, words) if self.token.kind == "NAME" else None
        following = self.tokens[self.index + 1].kind if near is not None else END
        if near is None or self.parser.accepts([words[near], following]) < 2:
            return None
        return self.error(f"unexpected `{shortened(self.token.text)}`", f"did you mean `{near}`?")

    # ------------------------------------------------------------ signs

    def missing(self) -> Diagnostic | None:
        """A sign that is missing before the token, or that should stand in its place."""
        token, before = self.token, self.before
        if before is None or token.kind == END:
            return None
        shown = shortened(token.text)
        argument = before.text in self.parameters()
        signs = {
            sign: self.fits(kind)
            for sign in (sorted(SIGNS, key=lambda sign: sign != "=") if argument else SIGNS)
            if (kind := self.table.words[sign]) in self.wanted
        }
        sign = min(filter(signs.get, signs), key=signs.__getitem__, default=None)
        if sign is not None:
            if sign in CLOSING and self.inner is not None and OPENING[self.inner.text] == sign:
                return self.never_closed(self.inner)
            gap = Span(self.source, before.end, before.end)
            return self.error(f"`{sign}` expected before `{shown}`", f"insert `{sign}`", gap)
        for sign in (*SIGNS[1:], SIGNS[0]) if token.kind not in ("NAME", "NUMBER", "STRING") else ():
            kind = self.table.words[sign]
            if kind in self.wanted and not token.text.isalpha() and self.fits(kind, skipped=1):
                return self.error(f"`{sign}` expected, not `{shown}`", f"write `{sign}`")
        return None

    def surplus(self) -> Diagnostic | None:
        """A sign too many: this one, or the comma before it."""
        token, before = self.token, self.before
        if before is not None and before.text == "," and self.fits(dropped=1):
            return self.error("unexpected `,`", "remove it", self.span(before))
        if (token.text in (",", ":") or (before and token.text == before.text)) and self.fits(skipped=1):
            return self.error(f"unexpected `{token.text}`", "remove it")
        return None

    def plain(self) -> Diagnostic:
        """Anything else."""
        if self.token.kind == END:
            return self.error("unexpected end of input", self.expected())
        return self.error(f"unexpected `{shortened(self.token.text)}`", self.expected())
