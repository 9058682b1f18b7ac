"""Reverse-mode differentiation of nodes: from the cotangents of values to those of what they were computed from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from partita.compiler.graph import Builder, Node, Value
from partita.compiler.ops.pointwise import Detach, added

# Of each value the parts of its cotangent, one for each use, with the node that reads it there.
Parts = dict[Value, list[tuple[Value, Node]]]


def reverse(
    build: Builder,
    nodes: Sequence[Node],
    parts: Parts,
    differentiable: Collection[Value],
    cotangent: Callable[[Value, Node], Value | None],
) -> None:
    """Append the derivatives of nodes, from the last to the first. `cotangent` makes one of a value of its parts, and
    is given the node that computed the value; what this node gives its operands is added to their parts.

    Raises Refused (E0423) where an operation has no derivative.
    """
    for node in reversed(nodes):
        if not isinstance(node.op, Detach) and any(value in differentiable for value in node.inputs):
            gradients = derivatives(build, node, [cotangent(value, node) for value in node.outputs])
            for value, gradient in zip(node.inputs, gradients, strict=True):
                if gradient is not None and value in differentiable:
                    parts.setdefault(value, []).append((gradient, node))


def cotangents(
    build: Builder, nodes: Sequence[Node], seeds: Mapping[Value, Value], of: Iterable[Value]
) -> list[Value | None]:
    """The cotangents of values `of` which others were computed by nodes, from those of the others; None if no gradient
    flows there. Raises Refused (E0423) as `reverse` does.
    """
    parts: Parts = {value: [(seed, nodes[-1])] for value, seed in seeds.items()}
    known: dict[Value, Value] = {}

    def cotangent(value: Value, _: Node | None = None) -> Value | None:
        if value not in known and value in parts:
            known[value] = added(build, [part for part, _ in parts[value]])
        return known.get(value)

    wanted = list(of)
    reverse(build, nodes, parts, dependent(nodes, wanted), cotangent)
    return [cotangent(value) for value in wanted]


def dependent(nodes: Iterable[Node], on: Iterable[Value]) -> set[Value]:
    """The floats among values, and those from which a gradient flows back to them."""
    values = {value for value in on if value.type.is_float}
    for node in nodes:
        if not isinstance(node.op, Detach) and any(value in values for value in node.inputs):
            values.update(value for value in node.outputs if value.type.is_float)
    return values


def derivatives(build: Builder, node: Node, d: Sequence[Value | None]) -> tuple[Value | None, ...]:
    """The cotangents of a node's operands, by the operation's rule, or from its formula."""
    if not any(d):
        return (None,) * len(node.inputs)
    before, build.nodes = build.nodes, []
    results = node.op.formula(build, node)
    formula, build.nodes = build.nodes, before
    if results is None:
        return node.op.gradients(build, node, d)
    build.nodes += formula
    seeds = {value: each for value, each in zip(results, d, strict=True) if each is not None}
    return tuple(cotangents(build, formula, seeds, node.inputs))
