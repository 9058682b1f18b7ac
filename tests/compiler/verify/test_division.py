"""The certificate of an axis that all ranks of a pipeline share: what each of its parts has to be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from attrs import evolve

from partita.compiler.graph import Graph, Node, Phase, Value
from partita.compiler.ops.pointwise import Detach, Pointwise
from partita.compiler.pipeline import compile_run
from partita.compiler.state import Compilation
from partita.compiler.verify.checker import Checker
from partita.compiler.verify.division import Division
from partita.compiler.verify.equivalence import validate
from partita.compiler.verify.rules import Rules
from partita.compiler.verify.value_numbering import ValueNumbering
from tests.files import checked
from tests.marks import soak
from tests.training.test_shared_vocabulary import TIED, text_of


@cache
def program(tied: bool = False, training: bool = True) -> Compilation:
    """A program whose ranks share the vocabulary; it is frozen, so that one will do."""
    found = compile_run(checked(text_of(changes=TIED if tied else {}), "lm.par"))
    return found[0] if training else found[1]


def problems(state: Compilation, graph: Graph) -> list[str]:
    """What the certificate says of another graph in parts."""
    check = Checker(Rules(state.mesh), ValueNumbering())
    Division(state.undivided, graph, "pipe", state.spread, check).run()
    return [each.message for each in check.problems]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tied", [False, *soak(True)])
def test_a_division_is_certified(tied: bool, training: bool):
    state = program(tied, training)
    assert not problems(state, state.joint)
    assert any(each.part for each in state.joint.parameters)


def other_operands(graph: Graph) -> list[tuple[str, Graph]]:
    """Every graph in which one node of a part reads another value of the same type."""
    found, meaning = [], dict[Value, object]()
    values = [each.value for each in graph.parameters]
    for i, node in enumerate(graph.nodes):
        for j, own in enumerate(node.inputs):
            for value in values:
                other = meaning.get(value, value) != meaning.get(own, own) and value.type == own.type
                if other and node.placed_on >= 2:
                    changed = evolve(node, inputs=(*node.inputs[:j], value, *node.inputs[j + 1 :]))
                    nodes = (*graph.nodes[:i], changed, *graph.nodes[i + 1 :])
                    found.append((f"{node.outputs[0].name} reads {value.name}", evolve(graph, nodes=nodes)))
        values += node.outputs
        operands = tuple(meaning.get(value, value) for value in node.inputs)
        for k, value in enumerate(node.outputs):
            meaning[value] = operands[0] if isinstance(node.op, Detach) else (node.op, operands, k)
    return found


@pytest.mark.parametrize(("tied", "every"), [(False, 40), *soak((False, 1), (True, 1))])
def test_a_part_that_reads_another_value_is_none(tied: bool, every: int):
    state = program(tied)
    mutants = other_operands(state.joint)
    assert len(mutants) > 200
    unseen = [what for what, graph in mutants[::every] if not problems(state, graph)]
    assert not unseen


def changed(graph: Graph, find: Callable[[Node], bool], **changes: object) -> Graph:
    """A graph with another first node of some kind."""
    node = next(each for each in graph.nodes if find(each))
    return evolve(graph, nodes=tuple(evolve(each, **changes) if each is node else each for each in graph.nodes))


def without(graph: Graph, name: str) -> Graph:
    """A graph that lacks a contribution to a gradient."""
    kept = tuple(each for each in graph.gradients if each.parameter != name)
    assert len(kept) < len(graph.gradients)
    return evolve(graph, gradients=kept)


def part_of(graph: Graph, rank: int, **changes: object) -> Graph:
    """A graph with another second part of the table."""
    (found,) = (each for each in graph.parameters if each.name == f"lm.table.{rank}")
    parameters = (evolve(each, **changes) if each is found else each for each in graph.parameters)
    return evolve(graph, parameters=tuple(parameters))


def test_wrong_parts():
    state = program()
    graph, spread = state.joint, state.spread
    maxima = changed(
        graph, lambda node: node.op == Pointwise("maximum") and node.stage == spread.loss, op=Pointwise("add")
    )
    assert "`add` of these operands" in problems(state, maxima)[0]
    elsewhere = changed(
        graph, lambda node: node.stage == spread.output(0) and node.phase is Phase.FORWARD, stage=spread.output(1)
    )
    assert "no part of the undivided program" in problems(state, elsewhere)[0]
    assert "lacks a term" in problems(state, without(graph, "lm.head.1"))[0]
    table = next(each for each in graph.parameters if each.name == "lm.table.0")
    assert problems(state, part_of(graph, 1, part=table.part))
    head = next(each for each in graph.parameters if each.name == "lm.head.0")
    assert "does not begin as the whole" in problems(state, part_of(graph, 1, initial=head.initial))[0]
    assert "has another size" in problems(state, part_of(graph, 1, master=state.undivided.parameters[0].master))[0]
    value: Value = graph.metrics[0][1]
    assert "the loss" in problems(state, evolve(graph, loss=value))[0]


def test_programs_are_held_to_it():
    state = program()
    right = validate(state)
    assert right.passed
    wrong = validate(evolve(state, joint=without(state.joint, "lm.head.1")))
    assert "lacks a term" in wrong.problems[0].message
    assert right.nodes > validate(evolve(state, spread=None)).nodes
