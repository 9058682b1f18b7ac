"""What is in a file, as a tree of names; and what of it can be folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lsprotocol import types as lsp

from partita.cli.editor.positions import range_of
from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.walk import nodes

# What the protocol calls kinds of names, in completions and in outlines.
KINDS = {
    "keyword": "Keyword",
    "function": "Function",
    "block": "Class",
    "op": "Function",
    "model": "Class",
    "axis": "EnumMember",
    "mesh axis": "EnumMember",
    "const": "Constant",
    "tensor": "Variable",
    "parameter": "Field",
    "buffer": "Field",
    "metric": "Variable",
    "output": "Variable",
}


def symbols(declarations: Iterable[tree.Declaration]) -> Iterator[lsp.DocumentSymbol]:
    """The declarations of a file; in blocks and models parameters, buffers and repeats."""
    for each in declarations:
        match each:
            case tree.Axes(entries=entries) | tree.Constants(entries=entries):
                kind = "axis" if isinstance(each, tree.Axes) else "const"
                yield from (_symbol(entry.key, kind, entry.span) for entry in entries)
            case tree.Block(name=name, body=body) | tree.Model(name=name, body=body):
                yield _symbol(name, type(each).__name__.lower(), each.span, _in_body(body))
            case tree.Mesh(name=name, axes=axes):
                inside = (_symbol(entry.key, "mesh axis", entry.span) for entry in axes)
                yield _symbol(name, "mesh", each.span, inside)
            case tree.Operation(name=name):
                yield _symbol(name, "op", each.span)
            case tree.Train() | tree.Expect():
                word = type(each).__name__.lower()
                start = Span(each.span.source, each.span.start, each.span.start + len(word))
                yield _symbol(tree.Name(word, span=start), word, each.span)
            case tree.Import():
                pass
            case _:
                yield _symbol(each.name, type(each).__name__.lower(), each.span)


def _symbol(name: tree.Name, kind: str, span: Span, inside: Iterable[lsp.DocumentSymbol] = ()) -> lsp.DocumentSymbol:
    """A name that is declared, its kind, what declares it, and what is declared in it."""
    called = lsp.SymbolKind[KINDS.get(kind, "Namespace")]
    return lsp.DocumentSymbol(name.text, called, range_of(span), range_of(name.span), kind, children=list(inside))


def _in_body(statements: Sequence[tree.Statement]) -> Iterator[lsp.DocumentSymbol]:
    for each in statements:
        match each:
            case tree.Param(names=names) | tree.Buffer(names=names):
                kind = "parameter" if isinstance(each, tree.Param) else "buffer"
                yield from (_symbol(name, kind, name.span) for name in names)
            case tree.Share(name=name) | tree.Copy(name=name):
                yield _symbol(name, "instance", each.span)
            case tree.Repeat(name=name, body=body):
                yield _symbol(name, "repeat", each.span, _in_body(body))
            case tree.Scan(body=body):
                yield from _in_body(body)
            case tree.Metric(name=name) | tree.Output(name=name):
                yield _symbol(name, type(each).__name__.lower(), each.span)
            case _:
                pass


def folds(declarations: Iterable[tree.Declaration]) -> Iterator[tuple[int, int]]:
    """The first and last line of what is longer than a line: declarations, repeats and scans."""
    for each in nodes(*declarations):
        first, last = each.span.line, each.span.source.position(each.span.end)[0]
        if last > first and isinstance(each, tree.Declaration | tree.Repeat | tree.Scan):
            yield first, last
