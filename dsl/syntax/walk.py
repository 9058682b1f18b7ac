"""Walks over syntax trees: the nodes in them, and the names that statements bind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import fields

from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span


def parts(node: tree.Node) -> Iterator[tree.Node]:
    """The nodes that a node consists of, in source order."""
    for field in fields(type(node)):
        value = getattr(node, field.name)
        if isinstance(value, tree.Node):
            yield value
        elif isinstance(value, tuple):
            yield from value


def nodes(*roots: tree.Node) -> Iterator[tree.Node]:
    """Some nodes and all that are in them, in source order."""
    stack = list(reversed(roots))
    while stack:
        top = stack.pop()
        yield top
        stack += reversed(list(parts(top)))


def bindings_in(statements: Sequence[tree.Statement], inside: bool = False) -> dict[str, tuple[Span, bool]]:
    """Where each name of a body is bound (outside repeats and scans, if both), and whether that is inside one."""
    found: dict[str, tuple[Span, bool]] = {}
    for statement in statements:
        if isinstance(statement, tree.Let | tree.Param | tree.Buffer | tree.Sample):
            found.update({name.text: (name.span, inside) for name in statement.names})
        elif isinstance(statement, tree.Repeat | tree.Scan):
            for name, place in bindings_in(statement.body, True).items():
                found.setdefault(name, place)
    return found
