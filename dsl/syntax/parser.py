"""Text → syntax tree, by the LALR(1) table of the grammar (see `partita.grammars`).

`parse_file` reports every syntax error that it can and returns what it could parse: after an error it resumes at the
next declaration keyword that is outside all brackets or starts a line. The parser keeps its own stack, so no input is
too deep for it; the depth of expressions is limited here for everything that walks the tree later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from attrs import evolve

from partita.dsl import limits
from partita.dsl.advice.report import Full, Report
from partita.dsl.syntax import tree
from partita.dsl.syntax.lexer import BROKEN, CLOSING, DECLARATIONS, END, OPENING, Token, language, tokenize
from partita.dsl.syntax.source import Source, Span
from partita.dsl.syntax.unexpected import Unexpected

# What an operand begins with.
OPERANDS = frozenset(("NAME", "NUMBER", "STRING", "LPAR", "LSQB", "MINUS", "TRUE", "FALSE"))
RESERVED = ("param", "state", "grad", "all", "auto")  # cannot be declared; all but `param` are ordinary names elsewhere


def parse_file(source: Source, report: Report) -> tree.File:
    """The tree of a file, as far as it can be parsed; syntax errors are reported."""
    return parse_tokens(source, tokenize(source, report), report)


def parse_tokens(source: Source, tokens: list[Token], report: Report) -> tree.File:
    """Like `parse_file`, of a file's tokens; words that turn out to be names become names there."""
    parser = _Parser(source, tokens, "file", report)
    declarations: list[Any] = []
    while (rest := parser.run()) is None and parser.recover(declarations):
        pass
    assert rest is not None or report.errors
    declarations.extend(rest.declarations if rest is not None else ())
    return tree.File(tuple(declarations), span=Span(source, 0, len(source.text)))


def parse_expression(source: Source, report: Report, start: int = 0, end: int | None = None) -> tree.Expression | None:
    """The tree of the single expression from `start` to `end`; None after reporting an error."""
    tokens = tokenize(source, report, start=start, end=end)
    result: tree.Expression | None = _Parser(source, tokens, "expression", report).run()
    return result


class _Parser:
    """An LALR parser with an explicit stack: states, each with its value, source range and expression depth."""

    def __init__(self, source: Source, tokens: list[Token], start: str, report: Report) -> None:
        self.source, self.tokens, self.report = source, tokens, report
        self.table = language()
        self.first, self.last = self.table.starts[start]
        # The words that are not reserved with which the text names something.
        named = (
            b if a.text == "block" else a for a, b in pairwise(tokens) if a.text == "block" or b.text in ("=", ":", ",")
        )
        self.named = {token.text for token in named if token.kind in self.table.soft}
        self.next = 0
        self.reset()

    def reset(self) -> None:
        """Empty the stack."""
        self.states = [self.first]
        self.values: list[Any] = [()]
        self.places: list[tuple[int, int]] = [(0, 0)]
        self.depths = [0]

    def run(self) -> Any:
        """Parse to the end; returns the value of the start symbol, or None after reporting an error."""
        rows, rules, soft = self.table.states, self.table.rules, self.table.soft
        states, values, places, depths = self.states, self.values, self.places, self.depths
        while True:
            token = self.tokens[self.next]
            if token.kind in soft:
                token = self.tokens[self.next] = self.read(token, rows[states[-1]])
            action = rows[states[-1]].get(token.kind)
            if action is None:
                if token.kind != BROKEN:
                    self.complain()
                return None
            if action >= 0:
                states.append(action)
                values.append(token)
                places.append((token.start, token.end))
                depths.append(0)
                self.next += 1
                continue
            builder, length, kept, origin = rules[-1 - action]
            if length:
                parts = values[-length:]
                start, end = places[-length][0], places[-1][1]
                depth = max(depths[-length:])
                del states[-length:], values[-length:], places[-length:], depths[-length:]
                parts = [parts[i] for i in kept]
            else:
                parts, depth = [], 0
                start = end = places[-1][1]
            if builder == "?":
                value = parts[0]
            elif not builder:
                value = _flat(parts)
            else:
                value = BUILDERS[builder](Span(self.source, start, end), *_flat(parts))
                depth = depth + 1 if builder in DEEPENING else 0
                if depth > limits.EXPRESSION_DEPTH:
                    self.report.error("E0005", "this expression is nested too deeply", Span(self.source, start, end))
                    raise Full
            states.append(rows[states[-1]][origin])
            values.append(value)
            places.append((start, end))
            depths.append(depth)
            if token.kind == END and states[-1] == self.last:
                return value

    def read(self, token: Token, row: dict[str, int]) -> Token:
        """A word that is not reserved, as what the state takes: a keyword, or a name where it takes no keyword.

        Where it takes both, `and = 1` is an entry, and `not`, which stands where names do, is an operator if an operand
        follows and the text names nothing so. No name stands before a string.
        """
        keyword, name = row.get(token.kind), row.get("NAME")
        if name is None or keyword == name:
            return token
        after = self.tokens[self.next + 1]
        if keyword is None or after.text == "=":
            return evolve(token, kind="NAME")
        # After a name comes something else, as after `width: number` in `width: number[batch]`.
        if name < 0 or after.kind == "STRING" or after.kind not in self.table.states[name]:
            return token
        if token.text not in self.named and after.kind in OPERANDS | self.table.soft:
            return token
        return evolve(token, kind="NAME")

    def recover(self, declarations: list[Any]) -> bool:
        """Keep the declarations read so far, and skip to where the next may begin; False if there is no such place."""
        if len(self.values) > 1 and isinstance(self.values[1], list):
            declarations.extend(self.values[1])
        for position in range(self.next, len(self.tokens) - 1):
            token = self.tokens[position]
            begins_line = token.start == 0 or self.source.text[token.start - 1] in "\n\r"
            if self._begins(position) and (token.depth == 0 or begins_line):
                self.next = position
                self.reset()
                return True
        return False

    def _begins(self, position: int) -> bool:
        """Whether a declaration may begin at a token; `model = gpt` is an entry of a table."""
        return self.tokens[position].text in DECLARATIONS and self.tokens[position + 1].kind != "EQUAL"

    def accepts(self, symbols: Iterable[str], dropped: int = 0, names: bool = True) -> int:
        """How many of some terminals, one after the other, would be taken after the last ones are `dropped`; with
        `names`, also words that are not reserved where only a name may stand.
        """
        rows, rules, states = self.table.states, self.table.rules, self.states[: len(self.states) - dropped]
        accepted = 0
        for symbol in symbols:
            while True:
                row = rows[states[-1]]
                action = row.get(symbol, row.get("NAME") if names and symbol in self.table.soft else None)
                if action is None:
                    return accepted
                if action >= 0:
                    states.append(action)
                    break
                _, length, _, origin = rules[-1 - action]
                if length:
                    del states[-length:]
                states.append(rows[states[-1]][origin])
                if symbol == END and states[-1] == self.last:
                    return accepted + 1
            accepted += 1
        return accepted

    def _acceptable(self) -> list[str]:
        """The terminals that may come next: those that are shifted, possibly after some reductions."""
        row = self.table.states[self.states[-1]]
        symbols = [symbol for symbol in row if symbol in self.table.spoken and self.accepts([symbol], names=False)]
        # Once an operand is complete, only the loosest operators are left of all that might have followed it.
        return symbols if "PLUS" in symbols else [symbol for symbol in symbols if symbol not in ("AND", "OR")]

    def complain(self) -> None:
        """Report an unexpected token."""
        expected, opened = self._acceptable(), self._open_brackets()
        unexpected = Unexpected(self.source, self.tokens, self.next, expected, opened, self.table, self)
        self.report.add(unexpected.diagnostic())

    def _open_brackets(self) -> list[Token]:
        """The brackets that are open before the next token, within the current declaration."""
        opened: list[Token] = []
        for value in self.values:
            if isinstance(value, Token) and value.text in OPENING:
                opened.append(value)
            elif isinstance(value, Token) and value.text in CLOSING and opened:
                opened.pop()
        return opened


def _flat(parts: Sequence[Any]) -> list[Any]:
    """The parts, with lists spliced in; a list in first position is extended in place, so that n items take O(n)."""
    if parts and isinstance(parts[0], list):
        flat, parts = parts[0], parts[1:]
    else:
        flat = []
    for part in parts:
        if isinstance(part, list):
            flat.extend(part)
        else:
            flat.append(part)
    return flat


# ---------------------------------------------------------------- building the tree


Builder: TypeAlias = Callable[..., Any]


def _name(span: Span, token: Token) -> tree.Name:
    return tree.Name(token.text, span=Span(span.source, token.start, token.end))


def _parts(span: Span, *parts: Any) -> tuple[Any, ...]:
    return tuple([_name(span, part) if type(part) is Token else part for part in parts])


def _node(kind: Builder) -> Builder:
    """Builds a node whose fields are the parts."""
    return lambda span, *parts: kind(*_parts(span, *parts), span=span)


def _first_optional(kind: Builder) -> Builder:
    """Builds a node of two fields, of which the first may be missing."""
    return lambda span, *parts: kind(*_parts(span, *(None,) * (2 - len(parts)), *parts), span=span)


def _listing(kind: Builder, first: int) -> Builder:
    """Builds a node whose last field is a tuple of all parts after the `first` ones."""

    def build(span: Span, *parts: Any) -> Any:
        named = _parts(span, *parts)
        return kind(*named[:first], named[first:], span=span)

    return build


def _shard(span: Span, targets: Any, mesh_axes: Any, *parts: Any) -> tree.Shard:
    uneven = next((_name(span, part) for part in parts if isinstance(part, Token)), None)
    return tree.Shard(targets, mesh_axes, uneven, *(part for part in parts if not isinstance(part, Token)), span=span)


def _mesh(span: Span, name: Token, *parts: Any) -> tree.Mesh:
    table = parts[-1] if isinstance(parts[-1], tree.Table) else None
    return tree.Mesh(_name(span, name), tuple(p for p in parts if isinstance(p, tree.Entry)), table, span=span)


def _path(span: Span, *parts: Any) -> tree.Path:
    names = tuple(_name(span, part) for part in parts if isinstance(part, Token))
    if len(names) == len(parts):
        return tree.Path(names, span=span)
    following = (*parts[1:], None)
    iterations = tuple(
        after if isinstance(after, tree.Iterations) else None
        for part, after in zip(parts, following, strict=True)
        if isinstance(part, Token)
    )
    return tree.Path(names, iterations, span=span)


# Nodes that are called like their rules of the grammar, and have their parts as fields.
NODES = (
    *(tree.Block, tree.Operation, tree.Model, tree.Entry, tree.Param, tree.Buffer, tree.Sample),
    *(tree.Share, tree.Copy, tree.Repeat, tree.Keep, tree.Metric, tree.Output, tree.Group, tree.Arrow),
    *(tree.Stage, tree.Place, tree.Recompute, tree.Offload, tree.Overlap, tree.Schedule, tree.Lora, tree.Train),
    *(tree.Correspondence, tree.Skip),
)
# Those whose last field has any number of parts, after so many other fields.
LISTINGS: dict[type[tree.Node], int] = {
    **dict.fromkeys((tree.File, tree.Axes, tree.Constants, tree.Table, tree.Expect, tree.List), 0),
    **dict.fromkeys((tree.Call, tree.Adapters, tree.Optimizer, tree.Weights, tree.Let), 1),
    tree.Layout: 2,
}
# Rule or alias of the grammar -> builder of its node, from the span and the parts without punctuation.
BUILDERS: dict[str, Builder] = {
    **{kind.__name__.lower(): _node(kind) for kind in NODES},
    **{kind.__name__.lower(): _listing(kind, first) for kind, first in LISTINGS.items()},
    **dict.fromkeys(("inputs", "types", "statements", "names", "axis_names", "targets", "paths"), _parts),
    **dict.fromkeys(("parts", "stored", "strings", "weight_axes"), _parts),
    "import": lambda s, path: tree.Import(tree.String(path.text, span=Span(s.source, path.start, path.end)), span=s),
    "input": lambda s, name, type: tree.Input(
        _name(s, name), type if isinstance(type, tree.TensorType) else None, span=s
    ),
    "loss": _first_optional(tree.Loss),
    "indexed": lambda s, name, number: tree.Path(
        (_name(s, name),), (tree.Iterations(number, None, span=number.span),), span=s
    ),
    "setting": _node(tree.Entry),
    "type": _first_optional(tree.TensorType),
    "results": _listing(tree.Return, 0),
    "following": lambda s, name, source: (
        tree.Copy(_name(s, name), source.name, source.arguments, span=s)
        if isinstance(source, tree.Call)
        else tree.Copy(_name(s, name), _name(s, source), (), span=s)
    ),
    "scan": lambda s, axis, *rest: tree.Scan(_name(s, axis), len(rest) > 1, rest[-1], span=s),
    "mesh": _mesh,
    "update": lambda s, *parts: tree.Update(_name(s, parts[-2]), parts[-1], len(parts) > 2, span=s),
    "shard": _shard,
    **dict.fromkeys(("path", "part"), _path),
    "iterations": lambda s, first, last=None: tree.Iterations(first, last, span=s),
    "target": _first_optional(tree.Target),
    "kept": lambda s, part: part if isinstance(part, tree.Path) else tree.Path((_name(s, part),), span=s),
    "freeze": _node(tree.FreezeRule),
    "update_rule": _node(tree.UpdateRule),
    "weight_axis": lambda s, *parts: tree.WeightAxis(
        parts[0] if len(parts) > 2 else None, len(parts) > 1, parts[-1], span=s
    ),
    "claim": lambda s, measure, compare, limit: tree.Claim(measure, compare.text, limit, span=s),
    "binary": lambda s, left, sign, right: tree.Binary(left, sign.text, right, span=s),
    "negative": lambda s, _, operand: tree.Negative(operand, span=s),
    "inverted": lambda s, _, operand: tree.Not(operand, span=s),
    "named": _node(tree.Argument),
    "positional": _first_optional(tree.Argument),
    "number": lambda s, token: tree.Number(token.text, span=s),
    "string": lambda s, token: tree.String(token.text, span=s),
    "boolean": lambda s, token: tree.Boolean(token.text == "true", span=s),
}
DEEPENING = frozenset(("binary", "negative", "inverted", "group", "call", "named", "positional", "arrow", "list"))
