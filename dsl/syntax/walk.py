"""Walks over syntax trees: the nodes in them, and the names that statements bind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from attrs import fields

from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name != "span")


def parts(node: tree.Node) -> Iterator[tree.Node]:
    """The nodes that a node consists of, in source order."""
    kind: Any = type(node)
    for name in _fields(kind):
        value = getattr(node, name)
        if isinstance(value, tree.Node):
            yield value
        elif isinstance(value, tuple):
            yield from (each for each in value if each is not None)


def nodes(*roots: tree.Node) -> Iterator[tree.Node]:
    """Some nodes and all that are in them, in source order."""
    stack = list(reversed(roots))
    while stack:
        top = stack.pop()
        yield top
        stack += [*parts(top)][::-1]


def bindings_in(statements: Sequence[tree.Statement], inside: bool = False) -> dict[str, tuple[Span, bool]]:
    """Where each name of a body is bound (outside repeats and scans, if both), and whether that is inside one."""
    bindings: dict[str, tuple[Span, bool]] = {}
    for statement in statements:
        if isinstance(statement, tree.Let | tree.Param | tree.Buffer | tree.Sample):
            bindings.update({name.text: (name.span, inside) for name in statement.names})
        elif isinstance(statement, tree.Repeat | tree.Scan):
            for name, place in bindings_in(statement.body, True).items():
                bindings.setdefault(name, place)
    return bindings
