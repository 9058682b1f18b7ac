"""Syntax tree → text: expressions as text that parses to the same tree."""

from __future__ import annotations

from partita.dsl.syntax import tree


def expression_text(expression: tree.Expression) -> str:
    """The source form of an expression, on one line."""
    match expression:
        case tree.Path():
            iterations = expression.iterations or (None,) * len(expression.parts)
            parts = zip(expression.parts, iterations, strict=True)
            return ".".join(name.text + (_iterations(some) if some else "") for name, some in parts)
        case tree.Number(text=text) | tree.String(text=text):
            return text
        case tree.Boolean(value=value):
            return "true" if value else "false"
        case tree.Negative(operand=operand):
            return f"-{expression_text(operand)}"
        case tree.Not(operand=operand):
            return f"not {expression_text(operand)}"
        case tree.Binary(left=left, operator=operator, right=right):
            return f"{expression_text(left)} {operator} {expression_text(right)}"
        case tree.Group(inner=inner):
            return f"({expression_text(inner)})"
        case tree.Arrow(left=left, right=right):
            return f"{expression_text(left)} -> {expression_text(right)}"
        case tree.Call(name=name, arguments=arguments):
            return f"{name.text}({', '.join(map(_argument, arguments))})"
        case tree.List(items=items):
            return f"[{', '.join(map(expression_text, items))}]"


def _argument(argument: tree.Argument) -> str:
    value = expression_text(argument.value)
    return value if argument.name is None else f"{argument.name.text} = {value}"


def _iterations(some: tree.Iterations) -> str:
    last = f"..{expression_text(some.last)}" if some.last is not None else ""
    return f"[{expression_text(some.first)}{last}]"
