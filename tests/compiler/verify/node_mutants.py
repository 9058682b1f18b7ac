"""Mutants of the end of a step: one of its nodes is left out, done again, done too early, or reads another value.

What reads the result of a node that is left out reads an operand of it. What is done again is what writes to something
that outlives the step, and what is done too early is that, too: as soon as its operands are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attrs import evolve

from partita.compiler.graph import Node, Value
from partita.compiler.ops.optimizer import Store
from partita.compiler.state import Compilation
from tests.compiler.verify.changes import Exchange, Place, Replacement, places
from tests.compiler.verify.mutants import Mutant


def node_mutants(state: Compilation) -> Iterator[Mutant]:
    """All mutants of the nodes at the end of a step."""
    for place in places(state):
        if place.stage is None:
            for i, node in enumerate(place.nodes):
                yield from _left_out(place, node)
                yield from _other_operands(place, i, node)
                if node.op.overwrites:
                    yield from _again(place, node)
                    yield from _too_early(place, i, node)


def _mutant(
    kind: str, place: Place, node: Node, what: str, values: Exchange, nodes: Replacement, instead: Value | None = None
) -> Mutant:
    name = node.outputs[0].name if node.outputs else node.inputs[0].name
    return Mutant(
        kind,
        node.op.name,
        f"`{name}`{what} in {place.name}",
        partial(place.changed, values, nodes),
        nodes=(node, *place.nodes),
        value=instead,
    )


def _left_out(place: Place, node: Node) -> Iterator[Mutant]:
    values = {}
    for value in node.outputs:
        alike = [other for other in node.inputs if _alike(value, other)]
        if not alike:
            return  # nothing could be read instead
        values[value] = alike[0]
    yield _mutant("drop", place, node, "", values, {node: ()})


def _again(place: Place, node: Node) -> Iterator[Mutant]:
    again = tuple(evolve(value, name=f"{value.name} again") for value in node.outputs)
    yield _mutant("double", place, node, "", {}, {node: (node, evolve(node, outputs=again))})


def _too_early(place: Place, i: int, node: Node) -> Iterator[Mutant]:
    """Before the nodes between its operands and itself, if one of them reads what it writes to."""
    written = node.inputs[:1] if isinstance(node.op, Store) else node.inputs
    made = [j for j, other in enumerate(place.nodes[:i]) if any(value in node.inputs for value in other.outputs)]
    first = max(made, default=-1) + 1
    jumped = place.nodes[first:i]
    if any(value in other.inputs for other in jumped for value in written):
        yield _mutant("early", place, node, "", {}, {jumped[0]: (node, jumped[0]), node: ()})


def _other_operands(place: Place, i: int, node: Node) -> Iterator[Mutant]:
    """The last of the values that are there for each operand, and of which it could be."""
    there = [value for other in place.nodes[: i + 1] for value in other.inputs]
    there += [value for other in place.nodes[:i] for value in other.outputs]
    for k, value in enumerate(node.inputs):
        for other in [x for x in dict.fromkeys(there) if x is not value and _alike(x, value)][-2:]:
            inputs = (*node.inputs[:k], other, *node.inputs[k + 1 :])
            what = f" of `{other.name}` in place of `{value.name}`"
            yield _mutant("operand", place, node, what, {}, {node: (evolve(node, inputs=inputs),)}, other)


def _alike(a: Value, b: Value) -> bool:
    return (a.type, a.layout, a.host) == (b.type, b.layout, b.host)
