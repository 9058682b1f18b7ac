"""What is in a file, as a tree of names; and what of it can be folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attrs import frozen

from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.walk import nodes


@frozen
class Symbol:
    """A name that is declared, its kind, what declares it, and what is declared in it."""

    name: tree.Name
    kind: str
    span: Span
    inside: tuple[Symbol, ...] = ()


def symbols(declarations: Iterable[tree.Declaration]) -> Iterator[Symbol]:
    """The declarations of a file; in blocks and models parameters, buffers and repeats."""
    for each in declarations:
        match each:
            case tree.Axes(entries=entries) | tree.Constants(entries=entries):
                kind = "axis" if isinstance(each, tree.Axes) else "const"
                yield from (Symbol(entry.key, kind, entry.span) for entry in entries)
            case tree.Block(name=name, body=body) | tree.Model(name=name, body=body):
                yield Symbol(name, type(each).__name__.lower(), each.span, tuple(_in_body(body)))
            case tree.Mesh(name=name, axes=axes):
                inside = tuple(Symbol(entry.key, "mesh axis", entry.span) for entry in axes)
                yield Symbol(name, "mesh", each.span, inside)
            case tree.Operation(name=name):
                yield Symbol(name, "op", each.span)
            case tree.Train() | tree.Expect():
                word = type(each).__name__.lower()
                start = Span(each.span.source, each.span.start, each.span.start + len(word))
                yield Symbol(tree.Name(word, span=start), word, each.span)
            case tree.Import():
                pass
            case _:
                yield Symbol(each.name, type(each).__name__.lower(), each.span)


def _in_body(statements: Sequence[tree.Statement]) -> Iterator[Symbol]:
    for each in statements:
        match each:
            case tree.Param(names=names) | tree.Buffer(names=names):
                kind = "parameter" if isinstance(each, tree.Param) else "buffer"
                yield from (Symbol(name, kind, name.span) for name in names)
            case tree.Share(name=name) | tree.Copy(name=name):
                yield Symbol(name, "instance", each.span)
            case tree.Repeat(name=name, body=body):
                yield Symbol(name, "repeat", each.span, tuple(_in_body(body)))
            case tree.Scan(body=body):
                yield from _in_body(body)
            case tree.Metric(name=name) | tree.Output(name=name):
                yield Symbol(name, type(each).__name__.lower(), each.span)
            case _:
                pass


def folds(declarations: Iterable[tree.Declaration]) -> Iterator[tuple[int, int]]:
    """The first and last line of what is longer than a line: declarations, repeats and scans."""
    for each in nodes(*declarations):
        first, last = each.span.line, each.span.source.position(each.span.end)[0]
        if last > first and isinstance(each, tree.Declaration | tree.Repeat | tree.Scan):
            yield first, last
