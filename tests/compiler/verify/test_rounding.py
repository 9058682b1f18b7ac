"""What rounding decides: choices among equal elements."""

from __future__ import annotations

import pytest

from partita.compiler.verify.rounding import perturbed
from partita.dsl.load import load
from partita.runtime.rank import prepare
from partita.runtime.verification.execution import verify_execution
from partita.runtime.verification.experiment import experiments, figures, rounded
from partita.runtime.verification.figures import compare
from tests.files import SPECS, checked

# Positions with the same token are equal in exact arithmetic, and the router chooses some of them.
ROUTED = """
axis batch = 12, seq = 16, picked = 4, embed = 32, ffn = 64, vocab = 50
block layer_(x: [batch, seq, embed]) {
  param router: [embed] ~ normal(0.1)
  param up: [embed, ffn] ~ xavier()
  param down: [ffn, embed] ~ xavier()
  let weight, id = top_k(dot(x, router, over = embed), seq -> picked)
  let inside = gather(x, id, along = seq)
  let done = dot(gelu(dot(inside, up, over = embed)), down, over = ffn) * sigmoid(weight)
  return x + dot(one_hot(id, seq), done, over = picked)
}
model depths(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(0.02)
  let x = embedding(tokens, table, over = vocab)
  repeat 4 as layer { let x = layer_(x) }
  loss cross_entropy(dot(x, table, over = embed), targets, over = vocab)
}
mesh eight(context = 2, tensor = 2, pipe = 3)
layout split on eight {
  shard ffn, embed, vocab, seq -> context
  shard embed, vocab, seq, ffn, picked -> tensor
  stage layer -> pipe
}
schedule zero = zb_h2(microbatches = 6)
train { data = random()  optimizer = adamw(lr = 1e-3)  steps = 6 }
"""


@pytest.mark.soak
def test_a_choice_among_equal_elements_is_no_error_of_a_layout():
    assert verify_execution(checked(ROUTED, "routed.par")).passed


@pytest.mark.soak
def test_other_last_digits_choose_other_elements():
    experiment = next(experiments(checked(ROUTED, "routed.par")))
    expected = figures(experiment.single, experiment.rates)
    change = compare(figures(rounded(experiment, 1), experiment.rates), expected)
    assert change["gradient of `depths.table` in step 1"] > 1e-3
    other = compare(figures(rounded(experiment, 2), experiment.rates), expected)
    assert other != change


@pytest.mark.soak
@pytest.mark.parametrize("name", ["lstm", "mixtral", "vqvae"])
def test_without_a_change_it_is_the_same_model(name: str):
    """Through blocks, repeats, scans and updates of buffers."""
    spec, _ = load(SPECS / "zoo" / f"{name}.par")
    assert spec is not None
    experiment = next(experiments(spec))
    expected = figures(experiment.single, experiment.rates)
    plan = prepare(perturbed(experiment.single.spec, 0.0, 1))
    assert max(compare(figures(plan, experiment.rates), expected).values()) == 0.0
