"""Cuts are balanced: the dearest stage is as cheap as any cut could make it."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from partita.compiler.passes.place import balance
from partita.compiler.pipeline import compile_run
from tests.files import checked


@st.composite
def costs_and_parts(draw):
    costs = draw(st.lists(st.integers(0, 50).map(float), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@given(costs_and_parts())
@example(([2.0, 3.0, 2.0, 5.0, 1.0, 6.0], 5))
def test_balance_is_optimal(case):
    costs, parts = case
    counts = balance(costs, parts)
    assert len(counts) == parts
    assert sum(counts) == len(costs)
    assert min(counts) >= 1

    def worth(bounds):
        edges = [0, *bounds, len(costs)]
        sums = [sum(costs[a:b]) for a, b in pairwise(edges)]
        return max(sums), sum(s * s for s in sums)

    best = min(worth(bounds) for bounds in combinations(range(1, len(costs)), parts - 1))
    edges = [sum(counts[: i + 1]) for i in range(parts - 1)]
    assert worth(edges) == best


LOOKUPS = """
axis batch = 8, vocab = 5, embed = 4, other = 4, ffn = 64
model m(x: i64[batch], y: [batch, embed]) {
  param head: [embed, ffn] ~ normal(0.1)
  let h = y
  repeat 4 as layer {
    param table: [vocab, embed] ~ normal(0.1)
    param w: [embed, other] ~ normal(0.1)
    let h = rename(dot(h, w, over = embed), other -> embed) + embedding(x + 1, table, over = vocab)
  }
  loss mean(dot(h, head, over = embed))
}
mesh line(pipe = 2)
layout split on line { stage layer -> pipe }
train {
  model = m  layout = split  schedule = gpipe(microbatches = 2)
  data = random()  optimizer = sgd(lr = 0.1)  steps = 1  eval = every(1, batches = 100_000)
}
"""


def test_evaluation_has_the_stages_of_training():
    """However many rows it has more, and though lookups are guarded."""
    training, evaluation = compile_run(checked(LOOKUPS, "lookups.par"))
    assert training.placed.guards
    stages = [
        [[each.name for each in stage.parameters] for stage in state.partitioned.stages]
        for state in (training, evaluation)
    ]
    assert stages[0] == stages[1]


@given(st.integers(1, 12), st.integers(1, 12))
def test_equal_costs_are_cut_evenly(parts, each):
    counts = balance([1.0] * (parts * each), parts)
    assert counts == (each,) * parts
