"""Walks over syntax trees: the names that statements bind, their types and expressions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.dsl.syntax import tree
from partita.dsl.syntax.source import Span


def rebound(statements: Sequence[tree.Statement]) -> Iterator[tree.Name]:
    """The names that the lets of a body bind, including those in repeats and scans."""
    for statement in statements:
        if isinstance(statement, tree.Let):
            yield from statement.names
        elif isinstance(statement, tree.Repeat | tree.Scan):
            yield from rebound(statement.body)


def types_in(statements: Sequence[tree.Statement]) -> Iterator[tree.TensorType]:
    """The types of parameters, buffers and samples, including those in repeats and scans."""
    for statement in statements:
        if isinstance(statement, tree.Param | tree.Buffer | tree.Sample):
            yield statement.type
        elif isinstance(statement, tree.Repeat | tree.Scan):
            yield from types_in(statement.body)


def expressions_in(statements: Sequence[tree.Statement]) -> Iterator[tree.Expression]:
    """The expressions of statements, including those in repeats and scans."""
    for statement in statements:
        match statement:
            case tree.Let(value=value) | tree.Loss(value=value) | tree.Metric(value=value):
                yield value
            case tree.Update(value=value) | tree.Output(value=value):
                yield value
            case tree.Param(initial=value) | tree.Buffer(initial=value) | tree.Sample(distribution=value):
                yield value
            case tree.Repeat():
                yield statement.count
                yield from expressions_in(statement.body)
            case tree.Scan():
                yield from expressions_in(statement.body)


def scanned_in(statements: Sequence[tree.Statement]) -> Iterator[tree.Name]:
    """The axes of scans."""
    for statement in statements:
        if isinstance(statement, tree.Scan):
            yield statement.axis
        if isinstance(statement, tree.Repeat | tree.Scan):
            yield from scanned_in(statement.body)


def subexpressions(expressions: Sequence[tree.Expression]) -> Iterator[tree.Expression]:
    """The expressions and all their subexpressions, in source order."""
    stack = list(reversed(expressions))
    while stack:
        top = stack.pop()
        yield top
        match top:
            case tree.Binary(left=left, right=right) | tree.Arrow(left=left, right=right):
                stack += [right, left]
            case tree.Negative(operand=inner) | tree.Not(operand=inner) | tree.Group(inner=inner):
                stack.append(inner)
            case tree.Call():
                stack += [argument.value for argument in reversed(top.arguments)]
            case tree.List():
                stack += reversed(top.items)


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


def repeats_in(statements: Sequence[tree.Statement]) -> Iterator[tree.Repeat]:
    """The repeats of a body, and those in them and in its scans."""
    for statement in statements:
        if isinstance(statement, tree.Repeat):
            yield statement
        if isinstance(statement, tree.Repeat | tree.Scan):
            yield from repeats_in(statement.body)
