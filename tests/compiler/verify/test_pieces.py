"""The certificate, of collectives in pieces: the whole is joined of all its pieces, each of which is made alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from attrs import evolve

from partita.compiler.graph import Node, Phase, Value
from partita.compiler.ops.collective import AllGather, ReduceScatter
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.pieces import Join, Piece
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.passes.cut import StageGraph
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from tests.compiler.verify.broken import compiled, problem

FILE = """axis batch = 4, seq = 8, embed = 8, ffn = 12
model m(x: [batch, seq, embed], target: [batch, seq, embed]) {
  let x = rms_norm(x, over = embed)
  repeat 2 as layer {
    param gate, up: [embed, ffn] ~ normal(0.5)
    param down: [ffn, embed] ~ normal(0.5)
    let h = rms_norm(x, over = embed)
    let x = x + dot(silu(dot(h, gate, over = embed)) * dot(h, up, over = embed), down, over = ffn)
  }
  loss mse(x, target)
}
mesh cluster(tensor = 2)
layout parts on cluster { shard ffn, seq -> tensor  overlap tensor in PIECES }
schedule s = gpipe(microbatches = ROWS)
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


@cache
def program(pieces: int = 2, microbatches: int = 2) -> Compilation:
    return compiled(FILE.replace("PIECES", str(pieces)).replace("ROWS", str(microbatches)))


def stage() -> StageGraph:
    (found,) = program().partitioned.stages
    return found


def changed(nodes: Sequence[Node], state: Compilation | None = None) -> Compilation:
    """The program with other nodes."""
    state = state or program()
    (stage,) = state.partitioned.stages
    return evolve(state, partitioned=evolve(state.partitioned, stages=(evolve(stage, nodes=tuple(nodes)),)))


def replaced(old: Node, *new: Node) -> Compilation:
    return changed([each for node in stage().nodes for each in (new if node is old else (node,))])


def nodes(kind: type, phase: Phase | None = Phase.FORWARD, piece: str = "") -> list[Node]:
    """Nodes that are, with a `piece`, of pieces of this number."""
    found = (node for node in stage().nodes if isinstance(node.op, kind) and node.phase is phase)
    return [node for node in found if node.outputs[0].name.endswith(piece)]


def reading(node: Node, position: int, value: Value) -> Node:
    """The node with another operand."""
    inputs = (*node.inputs[:position], value, *node.inputs[position + 1 :])
    return evolve(node, inputs=inputs)


@pytest.mark.few(2)
@pytest.mark.parametrize(("pieces", "microbatches"), [(2, 1), (4, 1), (3, 2), (4, 4), (2, 4)])
def test_what_is_in_pieces_is_certified(pieces: int, microbatches: int):
    state = program(pieces, microbatches)
    found = validate(state)
    assert found.passed, "\n\n".join(each.render() for each in found.problems)
    assert {type(node.op) for node in state.partitioned.stages[0].nodes} >= {Piece, Join}


def test_what_waits_is_in_pieces_and_products_of_it_are():
    """Of each layer: two products of what is gathered, and one that is summed; backward the other way round, where the
    first layer has nothing to sum. Gradients of weights are whole.
    """
    assert len(nodes(AllGather, piece="piece1")) == len(nodes(ReduceScatter, piece="piece1")) == 2
    assert len(nodes(Dot, piece="piece1")) == 6
    assert len(nodes(AllGather, Phase.BACKWARD, "piece1")) == 2
    assert len(nodes(ReduceScatter, Phase.BACKWARD, "piece1")) == 1
    assert len(nodes(Dot, Phase.BACKWARD, "piece1")) == 4
    assert not nodes(Dot, Phase.WEIGHT, "piece1")


def pieces_in_another_order() -> Compilation:
    node = nodes(Join)[0]
    return replaced(node, evolve(node, inputs=node.inputs[::-1]))


def gathered_pieces_in_another_order() -> Compilation:
    """The second is gathered as the first, and the first as the second."""
    first, second = nodes(Piece)[:2]
    return replaced(first, evolve(first, op=second.op))


def one_piece_twice() -> Compilation:
    node = nodes(Join)[0]
    return replaced(node, evolve(node, inputs=(node.inputs[0],) * 2))


def a_piece_dropped() -> Compilation:
    node = nodes(Join)[0]
    return replaced(node, evolve(node, inputs=node.inputs[:1]))


def a_piece_of_another_size() -> Compilation:
    node = nodes(Piece)[0]
    return replaced(node, evolve(node, op=evolve(node.op, pieces=4)))


def blocks_one_after_another() -> Compilation:
    """Of one row, positions that are gathered from two ranks."""
    state = program(2, 4)
    own = state.partitioned.stages[0].nodes
    node = next(node for node in own if isinstance(node.op, Join) and node.op.blocks == 2)
    new = evolve(node, op=Join(node.op.axis))
    return changed([new if each is node else each for each in own], state)


def a_sum_of_different_pieces() -> Compilation:
    one, other = (next(n for n in nodes(Pointwise, Phase.BACKWARD, f"piece{k}") if len(n.inputs) == 2) for k in (0, 1))
    return replaced(other, reading(other, 1, one.inputs[1]))


def a_product_of_another_piece() -> Compilation:
    first, second = (nodes(Dot, piece=f"piece{k}")[0] for k in range(2))
    return replaced(second, reading(second, 0, first.inputs[0]))


def a_piece_times_other_weights() -> Compilation:
    first, second = nodes(Dot, piece="piece1")[:2]
    return replaced(second, reading(second, 1, first.inputs[1]))


def a_piece_of_another_sum() -> Compilation:
    """The first layer's, reduced as the second's."""
    first, second = nodes(ReduceScatter, piece="piece0")[:2]
    return replaced(second, reading(second, 0, first.inputs[0]))


def a_piece_for_the_whole() -> Compilation:
    node = next(node for node in nodes(Pointwise) if node.op.function == "silu")
    part = next(each for each in nodes(Join) if each.output is node.inputs[0]).inputs[0]
    return replaced(node, reading(node, 0, part))


def a_piece_summed_over() -> Compilation:
    """The gradient of weights is of the first piece alone."""
    pieces = {each.output: each.inputs[0] for each in nodes(Join, Phase.BACKWARD)}
    node = next(each for each in nodes(Dot, Phase.WEIGHT) if not pieces.keys().isdisjoint(each.inputs))
    return replaced(node, evolve(node, inputs=tuple(pieces.get(value, value) for value in node.inputs)))


def a_piece_not_reduced() -> Compilation:
    """Of a sum, the second piece stays partial."""
    node = nodes(Join)[-1]
    sent = next(each for each in nodes(ReduceScatter) if each.output is node.inputs[1])
    return replaced(node, reading(node, 1, sent.inputs[0]))


def pieces_of_a_later_phase() -> Compilation:
    """What is gathered forward is taken backward."""
    node = nodes(Piece)[0]
    return replaced(node, evolve(node, phase=Phase.BACKWARD))


def read_before_it_is_made() -> Compilation:
    node = nodes(Piece)[0]
    others = [each for each in stage().nodes if each is not node]
    return changed([*others, node])


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "broken",
    [
        pieces_in_another_order,
        gathered_pieces_in_another_order,
        one_piece_twice,
        a_piece_dropped,
        a_piece_of_another_size,
        blocks_one_after_another,
        a_sum_of_different_pieces,
        a_product_of_another_piece,
        a_piece_times_other_weights,
        a_piece_of_another_sum,
        a_piece_for_the_whole,
        a_piece_summed_over,
        a_piece_not_reduced,
        pieces_of_a_later_phase,
        read_before_it_is_made,
    ],
)
def test_a_program_that_mixes_pieces_up_is_refused(broken: Callable[[], Compilation]):
    problem(broken())
