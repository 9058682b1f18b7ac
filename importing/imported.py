"""A module → the text of a `.par` file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor, nn

from partita.importing import rules
from partita.importing.capture import capture
from partita.importing.factors import RULES, Solver
from partita.importing.graph import Captured, NotUnderstood, Value, number, rewritten
from partita.importing.normal import layers, pointwise, products, reductions, views
from partita.importing.normal.arguments import normal
from partita.importing.patterns import RULES as PATTERNS
from partita.importing.patterns.projections import split_projections
from partita.importing.writing.names import snake
from partita.importing.writing.program import Program

# What registers operations.
REGISTERED = (rules, layers, pointwise, products, reductions, views)


@frozen(eq=False)
class Imported:
    """The text of a file, and the graph that it was written of."""

    text: str
    graph: Captured
    program: Program


def imported(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    name: str | None = None,
    axes: Mapping[str, list[str]] | None = None,
) -> Imported:
    """The file of a module, called with these keyword arguments: tensors of example sizes, a batch of at least 2.

    `axes`: names of the dimensions of inputs. Raises NotUnderstood.
    """
    graph = capture(module, inputs)
    graph.outputs = understood(graph.outputs)
    solver = Solver(graph.outputs)
    state = {key: value for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    program = Program(graph, solver, name or snake(type(module).__name__, ""), state, dict(axes or {}))
    return Imported(program.text(), graph, program)


def understood(outputs: list[Value]) -> list[Value]:
    """What a graph of ATen computes, in the operations of this package."""
    outputs = rewritten(outputs, [_normal])
    outputs = rewritten(outputs, PATTERNS)
    outputs = split_projections(outputs)
    return rewritten(outputs, [_folded])


def _normal(value: Value) -> Value | None:
    if value.constant is None:
        return normal(value)
    try:
        return normal(value)
    except NotUnderstood:
        return None


def _folded(value: Value) -> Value | None:
    """A constant that is a number, a progression, or of operations that the language lacks: only its elements count."""
    if value.constant is None or value.op == "constant":
        return None
    whole = value.constant.dtype not in (torch.float32, torch.float64)
    line = value.rank == 1 and whole and value.constant.dtype != torch.bool
    if number(value) is not None or value.op not in RULES or line or _of_nothing(value):
        made = value.make("constant", name="")
        made.constant = value.constant
        return made
    return None


def _of_nothing(value: Value) -> bool:
    return not value.inputs
