"""Whole matrices whose parts lie on several ranks: each rank has its share of the work, and no number changes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pytest
from attrs import evolve

from partita.compiler.analysis.traffic import traffic
from partita.compiler.graph import Node, Phase
from partita.compiler.ops.stack import OfMatrices, Stack
from partita.compiler.pipeline import compile_spec
from partita.compiler.report.shares import MatrixShare, matrix_shares
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from partita.dsl.types import Axis, Type
from partita.runtime.verification.execution import executed
from partita.runtime.verification.experiment import settled
from tests.files import checked

FILE = """
axis batch = 8, embed = 24, heads = 4, key = 6, ffn = 48, experts = 6, vocab = 16
const layers = 2
block attention(x: [batch, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ normal(0.5)
  param wo: [heads, key, embed] ~ normal(0.5)
  let v = dot(x, wq, over = embed) * dot(x, wk, over = embed) + dot(x, wv, over = embed)
  return x + dot(tanh(v), wo, over = [heads, key])
}
block mlp(x: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.5)
  param down: [ffn, embed] ~ normal(0.5)
  return x + dot(tanh(dot(x, up, over = embed)), down, over = ffn)
}
block moe(x: [batch, embed]) {
  param inside: [experts, embed, ffn] ~ normal(0.5)
  let h = dot(expand(x, experts), inside, over = embed)
  return x + mean(mean(h, over = experts), over = ffn)
}
model m(x: [batch, embed], ids: i64[batch]) {
  param head: [embed, vocab] ~ normal(0.5)
  repeat layers as layer { let x = BODY }
  loss cross_entropy(dot(x, head, over = embed), ids, over = vocab)
}
optimizer mixed { update head -> sgd(lr = 0.1)  update all -> muon(lr = 0.1, eps = 0.01) }
mesh ranks(MESH)
layout cut on ranks { shard batch -> data  RULES }
schedule s = one_f_one_b(microbatches = 2)
train {
  precision = f64 data = random() optimizer = mixed steps = 2 clip = 1.0 layout = cut eval = every(1, batches = 2)
}
"""


def compiled(body: str, mesh: str, rules: str, *overrides: str) -> Compilation:
    text = FILE.replace("BODY", body).replace("MESH", mesh).replace("RULES", rules)
    return compile_spec(checked(text, "m.par", overrides))


def sent(state: Compilation, kind: str) -> float:
    """Bytes that one rank sends to share matrices."""
    return sum(
        each.bytes
        for each in traffic(state)
        if each.kind == kind and each.phase is Phase.UPDATE and each.parameter is None
    )


ZERO = "shard state -> data"
TENSOR = "shard heads, ffn -> tensor"
# By body, mesh and rules: the shares.
SHARED: dict[tuple[str, str, str], tuple[MatrixShare, ...]] = {
    ("attention(x)", "data = 2", ZERO): (MatrixShare("orthogonalize", 24, 24, ("data",), 8, 4),),
    ("mlp(x)", "data = 2", "shard param -> data"): (MatrixShare("orthogonalize", 24, 48, ("data",), 4, 2),),
    ("mlp(attention(x))", "data = 2, tensor = 2", f"{TENSOR}  {ZERO}"): (
        MatrixShare("orthogonalize", 24, 24, ("data", "tensor"), 8, 2),
        MatrixShare("orthogonalize", 24, 48, ("data", "tensor"), 4, 1),
    ),
    ("attention(x)", "tensor = 2, data = 2", "shard heads, embed -> tensor"): (
        MatrixShare("orthogonalize", 24, 24, ("tensor",), 8, 4),
    ),
    ("moe(x)", "data = 4", ZERO): (MatrixShare("orthogonalize", 24, 48, ("data",), 12, 3),),
    # Experts stay where they are, and what each rank has of them is shared along the other mesh axis.
    ("moe(x)", "data = 2, tensor = 2", f"shard experts -> tensor  {ZERO}"): (
        MatrixShare("orthogonalize", 24, 48, ("data", "tensor"), 12, 3),
    ),
}


@pytest.mark.parametrize(("body", "mesh", "rules"), SHARED)
def test_each_rank_has_its_share_of_the_matrices(body: str, mesh: str, rules: str):
    state = compiled(body, mesh, rules)
    assert matrix_shares(state) == SHARED[body, mesh, rules]
    assert validate(state).passed
    assert not sent(state, "all_gather")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_sends_its_part_there_and_back(ranks: int):
    """Of M bytes, K = M / N are stored on each of N ranks, which sends all but its own share of these, twice."""
    state = compiled("mlp(x)", f"data = {ranks}", ZERO, "layers=4", "batch=16")
    matrices, bytes = 8, 24 * 48 * 8
    assert sent(state, "all_to_all") == 2 * (matrices * bytes / ranks) * (ranks - 1) / ranks
    # Gathered whole, as all of them would have to be without sharing, it would be more from 3 ranks on.
    assert not sent(state, "all_gather")


# ---------------------------------------------------------------- numbers that do not divide


@pytest.mark.parametrize(("layers", "size"), [(1, 1), (1, 40), (3, 1), (3, 40), (5, 1)])
def test_every_matrix_is_in_a_share_however_many_there_are(layers: int, size: int):
    """Also of large ones, whose bytes and products cost more than latency."""
    state = compiled("mlp(x)", "data = 4", ZERO, f"layers={layers}", f"embed={24 * size}", f"ffn={48 * size}")
    shares = matrix_shares(state)
    assert sum(each.matrices for each in shares) == 2 * layers
    for each in shares:
        assert each.each == -(-each.matrices // prod(state.mesh.sizes[over] for over in each.over))
    assert shares[0].over == ("data",) or (layers, size) == (1, 1)
    assert validate(state).passed


def test_one_that_is_left_over_is_gathered():
    """A stack of it and of zeros would take two exchanges, and no rank would be done any sooner."""
    state = compiled("mlp(x)", "data = 3", ZERO, "batch=12")
    assert matrix_shares(state) == (
        MatrixShare("orthogonalize", 24, 48, ("data",), 3, 1),
        MatrixShare("orthogonalize", 24, 48, (), 1, 1),
    )
    assert validate(state).passed


def test_what_a_stack_takes_is_counted():
    """Its zeros, and copies of operands in which axes become one that are not adjacent."""
    a, b, c, d = (Axis(name, 4) for name in "abcd")
    pair = Stack((("a", "b"), ("a", "b")), ("rows", "columns"), 3)
    operands = [Type("f64", (a, b))] * 2
    assert pair.workspace(operands, pair.infer(*operands)) == operands[0].bytes
    merged = Stack((("d", "c", "a", "b"),), ("rows", "columns"), 16)
    operands = [Type("f64", (a, b, c, d))]
    assert merged.workspace(operands, merged.infer(*operands)) == operands[0].bytes


# ---------------------------------------------------------------- what it computes


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("body", "mesh", "rules", "overrides"),
    [
        ("mlp(attention(x))", "data = 2, tensor = 2", f"{TENSOR}  {ZERO}", ()),
        ("mlp(attention(x))", "pipe = 2, data = 2", f"{ZERO}  stage layer -> pipe", ()),
        ("mlp(x)", "data = 4", ZERO, ("layers=3",)),
        ("moe(x)", "data = 4", ZERO, ("experts=3", "layers=3")),
        ("moe(x)", "data = 2, tensor = 2", f"shard experts -> tensor  {ZERO}", ()),
    ],
)
def test_the_program_computes_what_one_rank_does(body: str, mesh: str, rules: str, overrides: Sequence[str]):
    text = FILE.replace("BODY", body).replace("MESH", mesh).replace("RULES", rules)
    experiment = settled(checked(text, "m.par", overrides))
    assert experiment is not None
    assert any(node.op.name == "stack" for each in experiment.plan.training.update.stacked for node in each.nodes)
    assert executed(experiment).passed


# ---------------------------------------------------------------- what the certificate refuses


def test_results_go_back_to_their_own_parameters():
    """Exchanged, taken from elsewhere in the stack, or of another operation: none is the matrix of the parameter."""
    state = compiled("mlp(x)", "data = 2", ZERO)
    (stacked,) = state.update.stacked
    *_, first, second = stacked.nodes
    op = next(node for node in stacked.nodes if isinstance(node.op, OfMatrices))

    def refused(*replaced: tuple[Node, Node]) -> str:
        changes = dict(replaced)
        nodes = tuple(changes.get(node, node) for node in stacked.nodes)
        update = evolve(state.update, stacked=(evolve(stacked, nodes=nodes),))
        return "\n".join(each.message for each in validate(evolve(state, update=update)).problems)

    assert not refused()
    swapped = (first, evolve(first, outputs=second.outputs)), (second, evolve(second, outputs=first.outputs))
    assert "updated from something else" in refused(*swapped)
    assert "updated from something else" in refused((second, evolve(second, op=evolve(second.op, start=0))))
    assert "updated from something else" in refused((op, evolve(op, op=evolve(op.op, steps=4))))
    mixed = evolve(op.op, stacked=(), inner=("rows", "matrix"))
    assert "no sharding rule of `orthogonalize`" in refused((op, evolve(op, op=mixed)))
    stack = stacked.nodes[0]
    assert "updated from something else" in refused((stack, evolve(stack, inputs=stack.inputs[::-1])))


def test_only_what_the_same_stages_update_shares_work():
    state = compiled("mlp(x)", "pipe = 2, data = 2", f"{ZERO}  stage layer -> pipe")
    first, second = state.update.stacked
    assert (first.stages, second.stages) == ((0,), (1,))
    wrong = evolve(first, stages=(1,))
    update = evolve(state.update, stacked=(wrong, second))
    (problem, *_) = validate(evolve(state, update=update)).problems
    assert "is not updated on the same stages" in problem.message


def test_nothing_is_written_before_the_updates():
    state = compiled("mlp(x)", "data = 2", ZERO)
    first = state.update.parameters[0]
    (own,) = (node for node in first.update if node.op.overwrites and node.outputs)
    early = evolve(first, prepare=(*first.prepare, own), update=tuple(n for n in first.update if n is not own))
    update = evolve(state.update, parameters=(early, *state.update.parameters[1:]))
    problems = [each.message for each in validate(evolve(state, update=update)).problems]
    assert "something is overwritten before the updates" in problems
