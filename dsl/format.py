"""Text → the same file in canonical form, comments kept.

One statement, entry or rule a line, indented by two spaces for each brace around it; spaces by the table below; one
blank line between declarations, and at most one elsewhere. A line break after a comma within brackets stays where
it is, and lines that are too long are broken at others. A comment stays at the end of its line, at its column where
that is free, or on a line of its own.

Laws: formatting twice is formatting once; the result parses to the same tree and has the same comments (this is
checked each time, and anything else is refused).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import frozen

from partita.dsl import tree
from partita.dsl.declarations import source_of
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.parser import CLOSING, END, Token, parse_file, tokenize
from partita.dsl.report import Full, Report
from partita.dsl.source import Source

WIDTH = 110
DEEPEST = 60  # columns to which what goes on after a line break is indented at most, to stand under its bracket
INDENT, CONTINUATION = 2, 4

_VALUES = frozenset(("NAME", "NUMBER", "STRING", "TRUE", "FALSE", "RPAR", "RSQB"))
_TIGHT_AFTER = frozenset(("LPAR", "LSQB", "DOT", "RANGE"))
_TIGHT_BEFORE = frozenset(("RPAR", "RSQB", "COMMA", "COLON", "DOT", "RANGE"))
_OPERATORS = frozenset(("PLUS", "MINUS", "TIMES", "OVER", "COMPARE", "ARROW"))


def format_text(text: str, name: str = "<text>") -> str:
    """The canonical form of a file's text. Raises Refused where it does not parse."""
    source = source_of(text, name)
    before, comments, tokens = _parsed(source)
    result = "".join(_Formatter(source, tokens, comments, before).lines())
    after, kept, _ = _parsed(Source(name, result))
    if after != before or [comment.text for comment in kept] != [comment.text for comment in comments]:
        raise refuse("E0108", f"`{name}` would not mean the same in canonical form; it is left as it is")
    return result


def _parsed(source: Source) -> tuple[tree.File, list[Token], list[Token]]:
    report, comments = Report(), list[Token]()
    try:
        file = parse_file(source, report)
        tokens = tokenize(source, Report(), comments)
    except Full:
        raise Refused(report.diagnostics()) from None
    if report.errors:
        raise Refused(report.diagnostics())
    return file, comments, tokens[:-1]


@frozen(eq=False)
class Row:
    """Tokens that stand on a line of their own unless it is too long. `first` begins a declaration, in its kind."""

    tokens: tuple[Token, ...]
    depth: int
    first: str | None = None
    whole: bool = False  # the declaration has no other row


class _Formatter:
    def __init__(
        self, source: Source, tokens: Sequence[Token], comments: Sequence[Token], file: tree.File
    ) -> None:
        self.text, self.source = source.text, source
        self.tokens = tokens
        self.comments = list(comments)
        self.starts = frozenset(_starts(file))
        self.declarations = {d.span.start: type(d).__name__ for d in file.declarations}
        self.apart = frozenset(_spaced_lists(file))

    def lines(self) -> Iterator[str]:
        """The lines of the result, each with its end."""
        previous: tuple[str | None, bool, int] | None = None  # kind of declaration, whole, end in the source
        kind: str | None = None
        whole = opened = False
        for row in self.rows():
            start = row.tokens[0].start
            closing = row.tokens[0].text == "}"
            depth = row.depth + 1 if closing else row.depth
            if row.first is not None:
                apart = previous is not None and not (whole and row.whole and kind == row.first)
                kind, whole = row.first, row.whole
            else:
                apart = False
            for comment in self.own_comments(start):
                if previous is not None:
                    gap = self.blank(previous[2], comment.start)
                    yield from "\n" * ((gap and not opened) or apart)
                apart = opened = False
                yield " " * (INDENT * depth) + comment.text + "\n"
                previous = (kind, whole, comment.end)
            if previous is not None:
                gap = self.blank(previous[2], start)
                yield from "\n" * ((gap and not opened and not closing) or apart)
            text = self.row(row)
            yield text
            opened = row.tokens[-1].text == "{"
            end = row.tokens[-1].end
            previous = (kind, whole, max(end, self.consumed))
        for comment in self.own_comments(len(self.text) + 1):
            if previous is not None and self.blank(previous[2], comment.start):
                yield "\n"
            yield comment.text + "\n"
            previous = (kind, whole, comment.end)

    def rows(self) -> Iterator[Row]:
        """The tokens, cut where lines begin."""
        row: list[Token] = []
        depth = 0
        cut: list[tuple[list[Token], int]] = []
        for position, token in enumerate(self.tokens):
            closes = token.text == "}" and not self._empty(position)
            if row and (token.start in self.starts or closes):
                cut.append((row, depth))
                depth += row[-1].text == "{"
                row = []
            if closes:
                depth -= 1
            row.append(token)
            if token.text == "{" and not (
                position + 1 < len(self.tokens)
                and self.tokens[position + 1].text == "}"
                and self._empty(position + 1)
            ):
                cut.append((row, depth))
                depth, row = depth + 1, []
        if row:
            cut.append((row, depth))
        for position, (tokens, level) in enumerate(cut):
            first = self.declarations.get(tokens[0].start)
            last = position + 1 == len(cut) or cut[position + 1][0][0].start in self.declarations
            yield Row(tuple(tokens), level, first, last)

    def _empty(self, position: int) -> bool:
        """Whether a closing brace follows its opening one with nothing between, no comment either."""
        before, token = self.tokens[position - 1], self.tokens[position]
        return before.text == "{" and "#" not in self.text[before.end : token.start]

    # ------------------------------------------------------------ comments and blank lines

    consumed = 0  # the end of the last comment that was written with a row

    def own_comments(self, before: int) -> Iterator[Token]:
        """Take the comments that stand before a place in the source."""
        while self.comments and self.comments[0].start < before:
            yield self.comments.pop(0)

    def blank(self, end: int, start: int) -> bool:
        """Whether the source has an empty line between two places."""
        return self.text.count("\n", end, start) > 1

    def trails(self, comment: Token, token: Token) -> bool:
        """Whether a comment stands on the line on which a token ends."""
        return "\n" not in self.text[token.end : comment.start]

    # ------------------------------------------------------------ one row

    def row(self, row: Row) -> str:
        """A row as one or more lines: broken where it was after commas, around comments, and where it is too long."""
        margin = INDENT * row.depth
        lines: list[str] = []
        current = " " * margin
        brackets: list[int] = []
        pieces: list[tuple[str, int, int]] = []
        tokens = row.tokens
        del pieces
        line: list[tuple[Token, str]] = []

        def flush(comment: Token | None) -> None:
            nonlocal current, line
            for text in self.filled(line, current, margin, brackets):
                lines.append(text)
            line = []
            if comment is not None:
                column = comment.start - (self.text.rfind("\n", 0, comment.start) + 1)
                lines[-1] += " " * max(2, column - len(lines[-1])) + comment.text
            current = " " * self.column(brackets, margin)

        for position, token in enumerate(tokens):
            before = tokens[position - 1] if position else None
            line.append((token, self.space(tokens, position) if line else ""))
            del before
            after = tokens[position + 1] if position + 1 < len(tokens) else None
            broken = False
            while self.comments and (
                (after is not None and self.comments[0].start < after.start)
                or (after is None and self.trails(self.comments[0], token))
            ):
                comment = self.comments[0]
                if not broken and self.trails(comment, token):
                    flush(self.comments.pop(0))
                elif after is None:
                    break
                else:
                    if not broken:
                        flush(None)
                    lines.append(current + self.comments.pop(0).text)
                broken = True
                self.consumed = comment.end
            if (
                not broken
                and after is not None
                and token.kind == "COMMA"
                and token.depth > row.tokens[0].depth
                and "\n" in self.text[token.end : after.start]
            ):
                flush(None)
        if line:
            flush(None)
        return "".join(text + "\n" for text in lines)

    def column(self, brackets: Sequence[int], margin: int) -> int:
        """Where a line goes on after a break: under what follows the innermost open bracket."""
        if brackets and brackets[-1] <= DEEPEST:
            return brackets[-1]
        return margin + CONTINUATION

    def filled(
        self, line: Sequence[tuple[Token, str]], start: str, margin: int, brackets: list[int]
    ) -> Iterator[str]:
        """Lines of at most WIDTH columns, broken after the outermost commas, or before operators. Updates brackets."""
        rest = list(line)
        while rest:
            count = self.fitting(rest, len(start))
            text = start
            for position, (token, space) in enumerate(rest[:count]):
                text += (space if position else "") + token.text
                if token.text in "([":
                    brackets.append(len(text))
                elif token.text in ")]":
                    brackets.pop()
            yield text
            rest = rest[count:]
            start = " " * self.column(brackets, margin)

    def fitting(self, line: Sequence[tuple[Token, str]], column: int) -> int:
        """How many tokens go on one line that begins at a column."""
        widths, depths = [], []
        for position, (token, space) in enumerate(line):
            column += len(token.text) + (len(space) if position else 0)
            widths.append(column)
            depths.append(token.depth)
        if widths[-1] <= WIDTH:
            return len(line)
        commas = [i for i, (token, _) in enumerate(line[:-1]) if token.kind == "COMMA"]
        operators = [
            i - 1 for i, (token, _) in enumerate(line) if token.kind in _OPERATORS and i and _ends(line[i - 1][0])
        ]
        for candidates in (commas, operators):
            fit = [i for i in candidates if widths[i] <= WIDTH]
            if fit:
                outermost = min(depths[i] for i in fit)
                return max(i for i in fit if depths[i] == outermost) + 1
        later = sorted(commas + operators)
        return later[0] + 1 if later else len(line)

    def space(self, tokens: Sequence[Token], position: int) -> str:
        """What stands between a token and the one before it on its line."""
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
    """Whether a token can end an operand, so that a minus after it subtracts."""
    return token.kind in _VALUES


def _starts(file: tree.File) -> Iterator[int]:
    """Where declarations, statements, entries, rules and claims begin."""
    for declaration in file.declarations:
        yield declaration.span.start
        match declaration:
            case tree.Block():
                yield from _statement_starts(declaration.body)
                yield declaration.results.span.start
            case tree.Model():
                yield from _statement_starts(declaration.body)
            case tree.Mesh(table=table) if table is not None:
                yield from (entry.span.start for entry in table.entries)
            case tree.Train(table=table):
                yield from (entry.span.start for entry in table.entries)
            case tree.Layout(rules=rules):
                yield from (rule.span.start for rule in rules)
            case tree.Expect(claims=claims):
                yield from (claim.span.start for claim in claims)


def _statement_starts(statements: Sequence[tree.Statement]) -> Iterator[int]:
    for statement in statements:
        yield statement.span.start
        if isinstance(statement, tree.Repeat):
            yield from _statement_starts(statement.body)


def _spaced_lists(file: tree.File) -> Iterator[int]:
    """Where the lists of turns per stage begin: the only brackets that stand apart from the name before them."""
    for declaration in file.declarations:
        if isinstance(declaration, tree.Layout):
            for rule in declaration.rules:
                if isinstance(rule, tree.Stage) and rule.counts is not None:
                    yield rule.counts.span.start


assert CLOSING[")"] == "(" and END
