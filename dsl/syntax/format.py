"""Text → the same file in canonical form, comments kept.

One statement, entry or rule per line, indented by two spaces for each brace around it; spaces by the table below; one
blank line between declarations, and at most one elsewhere. A line break after a comma within brackets is kept, and
lines that are too long are broken in other places. A trailing comment stays at the end of its line, at its column if
possible; other comments keep a line of their own.

Invariants: formatting is idempotent; the result parses to the same tree and has the same comments (this is checked each
time, and anything else is refused).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from partita.dsl.advice.report import Full, Report
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.syntax import tree
from partita.dsl.syntax.lexer import Token, tokenize
from partita.dsl.syntax.parser import parse_tokens
from partita.dsl.syntax.reader import source_of
from partita.dsl.syntax.source import Source
from partita.dsl.syntax.walk import nodes

WIDTH = 110
DEEPEST = 60  # columns; a continuation line is aligned with its bracket up to here
INDENT, CONTINUATION = 2, 4
# A break within a bracket is kept, after which one before the bracket may no longer be needed: formatting is repeated
# until nothing changes.
PASSES = 8

# Nodes with lines of their own, besides the entries of tables.
_LINES = (
    *(tree.Declaration, tree.Statement, tree.Return, tree.Rule, tree.AdapterRule, tree.OptimizerRule),
    *(tree.WeightsLine, tree.Claim),
)
_VALUES = frozenset(("NAME", "NUMBER", "STRING", "TRUE", "FALSE", "RPAR", "RSQB"))
_TIGHT_AFTER = frozenset(("LPAR", "LSQB", "DOT", "RANGE"))
_TIGHT_BEFORE = frozenset(("RPAR", "RSQB", "COMMA", "COLON", "DOT", "RANGE"))
_OPERATORS = frozenset(("PLUS", "MINUS", "TIMES", "OVER", "COMPARE", "AND", "OR", "ARROW", "TILDE"))


def format_text(text: str, name: str = "<text>") -> str:
    """The canonical form of a file's text. Raises Refused if it does not parse, or has none (E0108)."""
    source = source_of(text, name)
    before, comments, tokens = _parsed(source)
    file, own = before, list(comments)
    for _ in range(PASSES):
        result = "".join(_Formatter(source, tokens, comments, file).lines())
        if result == source.text:
            return result
        source = Source(name, result)
        file, comments, tokens = _parsed(source)
        if file != before or [comment.text for comment in comments] != [comment.text for comment in own]:
            raise refuse("E0108", f"`{name}` would change its meaning in canonical form; it is left unchanged")
    raise refuse("E0108", f"`{name}` has no stable canonical form; it is left unchanged")


def _parsed(source: Source) -> tuple[tree.File, list[Token], list[Token]]:
    report, comments = Report(), list[Token]()
    try:
        tokens = tokenize(source, report, comments)
        file = parse_tokens(source, tokens, report)
    except Full:
        raise Refused(report.diagnostics()) from None
    if report.errors:
        raise Refused(report.diagnostics())
    return file, comments, tokens[:-1]


@frozen(eq=False)
class Row:
    """Tokens that form a line, unless it is too long. `first` is the kind of declaration that it begins, if any."""

    tokens: tuple[Token, ...]
    depth: int
    first: str | None
    whole: bool  # no other row of the declaration follows
    until: int  # where the next row begins in the source


class _Formatter:
    def __init__(self, source: Source, tokens: Sequence[Token], comments: Sequence[Token], file: tree.File) -> None:
        self.text, self.source = source.text, source
        self.tokens = tokens
        self.comments = list(comments)
        self.starts = frozenset(_starts(file))
        self.declarations = {d.span.start: type(d).__name__ for d in file.declarations}
        # Lists of layers per stage are the only brackets with a space after the name before them.
        stages = (node for node in nodes(file) if isinstance(node, tree.Stage))
        self.apart = frozenset(stage.counts.span.start for stage in stages if stage.counts is not None)

    def lines(self) -> Iterator[str]:
        """The lines of the result, with line ends."""
        end = 0  # of what was last written, as a source position
        kind: str | None = None
        alone = opened = False
        for row in self.rows():
            start, closing = row.tokens[0].start, row.tokens[0].text == "}"
            # Blank lines separate declarations, except one-line ones of the same kind (`axis` after `axis`).
            apart = row.first is not None and end > 0 and not (alone and row.whole and kind == row.first)
            if row.first is not None:
                kind, alone = row.first, row.whole
            for comment in self.own_comments(start):
                if apart or (end and not opened and self.blank(end, comment.start)):
                    yield "\n"
                yield " " * (INDENT * (row.depth + closing)) + comment.text + "\n"
                apart, opened, end = False, False, comment.end
            if apart or (end and not opened and not closing and self.blank(end, start)):
                yield "\n"
            yield self.row(row)
            opened = row.tokens[-1].text == "{"
            end = max(row.tokens[-1].end, self.consumed)
        for comment in self.own_comments(len(self.text) + 1):
            if end and self.blank(end, comment.start):
                yield "\n"
            yield comment.text + "\n"
            end = comment.end

    def rows(self) -> Iterator[Row]:
        """The tokens, split into rows."""
        cut: list[tuple[list[Token], int]] = []
        row: list[Token] = []
        depth = 0
        for position, token in enumerate(self.tokens):
            closes = token.text == "}" and not self._empty(position)
            if row and (token.start in self.starts or closes):
                cut.append((row, depth))
                row = []
            depth -= closes
            row.append(token)
            if token.text == "{" and not self._empty(position + 1):
                cut.append((row, depth))
                row = []
                depth += 1
        if row:
            cut.append((row, depth))
        begins = [tokens[0].start for tokens, _ in cut] + [len(self.text)]
        for (tokens, level), start, until in zip(cut, begins, begins[1:], strict=False):
            whole = until in self.declarations or until == len(self.text)
            yield Row(tuple(tokens), level, self.declarations.get(start), whole, until)

    def _empty(self, position: int) -> bool:
        """Whether a closing brace directly follows its opening one, without even a comment in between."""
        if not 0 < position < len(self.tokens):
            return False
        before, token = self.tokens[position - 1], self.tokens[position]
        empty = before.text == "{" and token.text == "}"
        return empty and "#" not in self.text[before.end : token.start]

    # ------------------------------------------------------------ comments and blank lines

    consumed = 0  # the end of the last comment written with a row

    def own_comments(self, before: int) -> Iterator[Token]:
        """Take the comments before a position in the source."""
        while self.comments and self.comments[0].start < before:
            yield self.comments.pop(0)

    def blank(self, end: int, start: int) -> bool:
        """Whether the source has an empty line between two positions."""
        return self.text.count("\n", end, start) > 1

    def trails(self, comment: Token, token: Token) -> bool:
        """Whether a comment is on the line on which a token ends."""
        return "\n" not in self.text[token.end : comment.start]

    # ------------------------------------------------------------ one row

    def row(self, row: Row) -> str:
        """The lines of a row: broken where it was after commas, around comments, and where it is too long."""
        margin = INDENT * row.depth
        lines: list[str] = []
        brackets: list[int] = []  # the columns after the open brackets
        line: list[tuple[Token, str]] = []
        start = " " * margin

        def flush() -> None:
            nonlocal start
            lines.extend(self.filled(line, start, margin, brackets))
            line.clear()
            start = " " * self.column(brackets, margin)

        for position, token in enumerate(row.tokens):
            line.append((token, self.space(row.tokens, position) if line else ""))
            last = position + 1 == len(row.tokens)
            after = row.until if last else row.tokens[position + 1].start
            inner = token.depth > row.tokens[0].depth
            if token.kind == "COMMA" and inner and "\n" in self.text[token.end : after]:
                flush()
            while self.comments and self.comments[0].start < after:
                trails = self.trails(self.comments[0], token)
                if last and not trails:
                    break
                if line:
                    flush()
                comment = self.comments.pop(0)
                self.consumed = comment.end
                if trails:
                    lines[-1] += " " * max(2, self.source.position(comment.start)[1] - 1 - len(lines[-1]))
                    lines[-1] += comment.text
                else:
                    lines.append(start + comment.text)
        if line:
            flush()
        return "".join(text + "\n" for text in lines)

    def column(self, brackets: Sequence[int], margin: int) -> int:
        """Where a line continues after a break: below the first token in the innermost open bracket."""
        if brackets and brackets[-1] <= DEEPEST:
            return brackets[-1]
        return margin + CONTINUATION

    def filled(self, line: Sequence[tuple[Token, str]], start: str, margin: int, brackets: list[int]) -> Iterator[str]:
        """Lines of at most WIDTH columns, broken after the outermost commas or before operators. Updates `brackets`."""
        first = 0
        while first < len(line):
            end = self.fitting(line, first, len(start))
            text = start
            for position in range(first, end):
                token, space = line[position]
                text += (space if position > first else "") + token.text
                if token.text in "([":
                    brackets.append(len(text))
                elif token.text in ")]":
                    brackets.pop()
            yield text
            first, start = end, " " * self.column(brackets, margin)

    def fitting(self, line: Sequence[tuple[Token, str]], first: int, column: int) -> int:
        """The end of the tokens from `first` that fit on a line that begins at a column.

        The names of the outside, which are long, begin a line of their own before their axes are broken. A comma is
        better than an operator, unless this is further out and not near the beginning of the line; but not one in a
        parameter's type, and names of several results stay together if arguments can be broken.
        """
        best: dict[bool, tuple[int, int, int]] = {}  # comma or operator -> depth, end and column of the best break
        begins = 0  # where a parameter's initializer does
        naming = line[first][0].text == "let"
        for position in range(first, len(line)):
            token, space = line[position]
            column += len(token.text) + (len(space) if position > first else 0)
            if column > WIDTH and best:
                outer = len(best) > 1 and best[False][0] < best[True][0] and best[False][2] > WIDTH // 2
                if begins and best.get(True, (0, 0, 0))[1] <= begins:
                    return begins
                return best[True in best and not outer][1]
            following = line[position + 1][0] if position + 1 < len(line) else None
            equals = token.kind == "EQUAL" and following is not None and following.kind == "STRING"
            comma = token.kind == "COMMA" or equals
            if following is None or not (comma or (following.kind in _OPERATORS and _ends(token))):
                continue
            if column > WIDTH:
                return position + 1
            naming = naming and token.kind != "EQUAL"
            depth = token.depth - equals + naming
            begins = position + 1 if following.kind == "TILDE" else begins
            if comma not in best or depth <= best[comma][0]:
                best[comma] = (depth, position + 1, column)
        return len(line)

    def space(self, tokens: Sequence[Token], position: int) -> str:
        """The space between a token and the one before it on its line."""
        before, token = tokens[position - 1], tokens[position]
        if before.kind in _TIGHT_AFTER or token.kind in _TIGHT_BEFORE:
            return ""
        if before.text == "{":
            return ""
        if token.kind == "LPAR":
            return "" if before.kind == "NAME" else " "
        if token.kind == "LSQB":
            return "" if before.kind == "NAME" and token.start not in self.apart else " "
        if before.kind == "MINUS" and (position < 2 or not _ends(tokens[position - 2])):
            return ""
        return " "


def _ends(token: Token) -> bool:
    """Whether a token can end an operand, so that a minus after it is binary."""
    return token.kind in _VALUES


def _starts(file: tree.File) -> Iterator[int]:
    """Where declarations, statements, entries, rules and claims begin."""
    for node in nodes(file):
        if isinstance(node, _LINES):
            yield node.span.start
        elif isinstance(node, tree.Table):
            yield from (entry.span.start for entry in node.entries)
