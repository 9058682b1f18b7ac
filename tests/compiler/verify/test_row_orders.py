"""The certificate, of rows in the order of their experts: each is read in that order, or taken out of it before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
from attrs import evolve

from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import REPLICATED
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.grouped import (
    CombineRows,
    GroupedDot,
    GroupedWeightGradient,
    Permute,
    SortByExpert,
    Unpermute,
)
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.shape import Rename
from partita.compiler.passes.cut import StageGraph
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from partita.runtime.verification.execution import verify_execution
from tests.compiler.verify.broken import compiled, problem
from tests.files import checked

FILE = """axis batch = 4, seq = 6, embed = 4, ffn = 8, experts = 4, chosen = 2
block moe(x: [batch, seq, embed]) {
  param gate: [embed, experts] ~ normal(1.0)
  param up: [experts, embed, ffn] ~ kaiming()
  param down: [experts, ffn, embed] ~ kaiming()
  let weight, id = top_k(softmax(dot(x, gate, over = embed), over = experts), experts -> chosen)
  let u = silu(routed_dot(x, up, id, over = embed, along = experts))
  let y = routed_dot(u, down, id, over = ffn, along = experts)
  return x + dot(y, weight, over = chosen), sum(u)
}
model m(x: [batch, seq, embed], target: [batch, seq, embed]) {
  let x, a = moe(x)
  let x, b = moe(x)
  loss mse(x, target) + a + b
}
mesh cluster(data = 2, tensor = 2)
layout parts on cluster { shard batch -> data  shard RULE -> tensor }
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""
Nodes = Sequence[Node]


@cache
def program(rule: str = "ffn") -> Compilation:
    return compiled(FILE.replace("RULE", rule))


def stage() -> StageGraph:
    (found,) = program().partitioned.stages
    return found


def changed(nodes: Sequence[Node]) -> Compilation:
    """The program with other nodes."""
    state = program()
    return evolve(state, partitioned=evolve(state.partitioned, stages=(evolve(stage(), nodes=tuple(nodes)),)))


def replaced(old: Node, *new: Node) -> Compilation:
    return changed([each for node in stage().nodes for each in (new if node is old else (node,))])


def nodes(kind: type, phase: Phase | None = None) -> list[Node]:
    return [node for node in stage().nodes if isinstance(node.op, kind) and node.phase in (phase or node.phase,)]


def reading(node: Node, position: int, value: Value) -> Node:
    """The node with another operand."""
    inputs = (*node.inputs[:position], value, *node.inputs[position + 1 :])
    return evolve(node, inputs=inputs)


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", ["ffn", "embed", "experts", "seq", "chosen"])
def test_rows_in_order_are_certified(rule: str):
    state = program(rule)
    found = validate(state)
    assert found.passed, "\n\n".join(each.render() for each in found.problems)
    assert any(isinstance(node.op, SortByExpert) for each in state.partitioned.stages for node in each.nodes)


def test_rows_stay_in_order_between_products():
    """Only what is summed of them, and its gradient, is not in order: of each token once."""
    kinds = [type(node.op) for node in stage().nodes if node.phase is Phase.FORWARD]
    assert [kinds.count(kind) for kind in (SortByExpert, Permute, GroupedDot, CombineRows)] == [2, 2, 4, 2]


def order_of(node: Node) -> Node:
    """What made the order that a node reads."""
    return next(each for each in nodes(SortByExpert) if not {*each.outputs}.isdisjoint(node.inputs))


def places_for_order() -> Compilation:
    node = nodes(Permute)[0]
    return replaced(node, reading(node, 1, order_of(node).outputs[1]))


def order_for_places() -> Compilation:
    node = nodes(Unpermute)[0]
    return replaced(node, reading(node, 1, order_of(node).outputs[0]))


def order_of_another_layer() -> Compilation:
    node = nodes(Permute)[1]
    return replaced(node, reading(node, 1, nodes(SortByExpert)[0].outputs[0]))


def ends_of_another_layer() -> Compilation:
    node = nodes(GroupedDot)[2]
    return replaced(node, reading(node, 2, nodes(SortByExpert)[0].outputs[2]))


def places_of_another_layer() -> Compilation:
    node = nodes(CombineRows)[1]
    return replaced(node, reading(node, 1, nodes(SortByExpert)[0].outputs[1]))


def other_weights() -> Compilation:
    """Of the second layer: those of the first."""
    first, second = nodes(CombineRows, Phase.FORWARD)
    return replaced(second, reading(second, 2, first.inputs[2]))


def gradient_of_other_rows() -> Compilation:
    """Rows of the other layer, in its order."""
    first, second = (node for node in nodes(GroupedWeightGradient) if node.op.over == ("embed",))
    return replaced(first, reading(first, 0, second.inputs[0]))


def another_function() -> Compilation:
    node = next(node for node in nodes(Pointwise) if node.op.function == "silu")
    return replaced(node, evolve(node, op=Pointwise("tanh")))


def rows_renamed() -> Compilation:
    """What is in order is read as if it were in its own."""
    node = nodes(GroupedDot)[0]
    (value,) = node.outputs
    op = Rename((("ffn", "other"),))
    made = Value("renamed", op.infer(value.type)[0], REPLICATED)
    return replaced(node, node, evolve(node, op=op, inputs=(value,), outputs=(made,)))


def ids_not_yet_known() -> Compilation:
    node = nodes(SortByExpert)[0]
    others = [each for each in stage().nodes if each is not node]
    return changed([node, *others])


def taken_in_a_later_phase() -> Compilation:
    node = nodes(Permute)[0]
    return replaced(node, evolve(node, phase=Phase.WEIGHT))


def other_rows() -> Compilation:
    """The axes of the rows in another order."""
    node = nodes(Unpermute)[0]
    return replaced(node, evolve(node, op=evolve(node.op, rows=tuple(reversed(node.op.rows)))))


def other_experts() -> Compilation:
    node = nodes(SortByExpert)[0]
    return replaced(node, evolve(node, op=evolve(node.op, shards=(("experts", "tensor", 2),))))


def another_layout() -> Compilation:
    """Said to be the same rows everywhere."""
    node = nodes(Permute)[0]
    (value,) = node.outputs
    other = evolve(value, layout=REPLICATED)
    state = replaced(node, evolve(node, outputs=(other,)))
    (own,) = state.partitioned.stages
    found = [evolve(each, inputs=tuple(other if v is value else v for v in each.inputs)) for each in own.nodes]
    return changed(found)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (places_for_order, "is not what puts rows in order"),
        (order_for_places, "is not what puts rows in order"),
        (order_of_another_layer, "reads rows in another order"),
        (ends_of_another_layer, "reads rows in another order"),
        (places_of_another_layer, "reads rows in another order"),
        (other_weights, "the single-device program has no `dot` of these operands"),
        (gradient_of_other_rows, "reads rows in another order"),
        (another_function, "the single-device program has no `tanh` of these operands"),
        (rows_renamed, "does not compute each row by itself"),
        (ids_not_yet_known, "is read before it is made"),
        (taken_in_a_later_phase, "is read before it is made"),
        (other_rows, "puts other rows than were put in order"),
        (other_experts, "has other experts"),
        (another_layout, "is not laid out as"),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_rows_in_another_order_are_refused(broken: Callable[[], Compilation], message: str):
    assert message in problem(broken()).message


def test_a_sum_over_the_rows_does_not_compute_each_by_itself():
    product = Dot(("batch",))
    assert not product.elementwise_over({"batch", "seq"})
    assert product.elementwise_over({"seq", "chosen"})


def test_one_vector_for_all_indices_has_no_rows_to_put_in_order():
    text = """axis batch = 4, chosen = 2, experts = 4, embed = 8, ffn = 6
model m(x: [batch, embed]) {
  param q: [embed] ~ normal(1.0)
  param w: [experts, embed, ffn] ~ normal(0.5)
  param gate: [embed, experts] ~ normal(0.5)
  let p, id = top_k(softmax(dot(x, gate, over = embed), over = experts), experts -> chosen)
  loss mean(tanh(sum(routed_dot(q, w, id, over = embed, along = experts), over = ffn)) * p)
}
mesh two(data = 2)
layout parts on two { shard batch -> data }
train { data = random() optimizer = sgd(lr = 0.1) steps = 2 }
"""
    assert verify_execution(checked(text, "one.par")).passed
