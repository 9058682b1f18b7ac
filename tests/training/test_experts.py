"""Experts equal a computation by all experts, however they are split; those with slots where there are enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.dsl.load import load
from partita.runtime.data.binding import open_data
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.marks import soak

FILE = """
axis batch = 8, seq = 6, embed = 4, ffn = 8, experts = 4, other = 4, chosen = 2, slots = 12

block moe(x: [batch, seq, embed]) {
  param gate: [embed, experts] ~ normal(1.0)
  param up: [experts, embed, ffn] ~ kaiming()
  param down: [experts, ffn, embed] ~ kaiming()
  let p = softmax(dot(x, gate, over = embed), over = experts)
  let weight, id = top_k(p, experts -> chosen)
  PRODUCTS
  return x + y, mean(load(id, over = [seq, chosen], into = experts) * mean(p, over = seq)) / 3
}

model mixed(x: [batch, seq, embed], target: [batch, seq, embed]) {
  let balance = 0
  repeat 2 as layer {
    let x, more = moe(x)
    let balance = balance + more
  }
  loss mse(x, target) + 0.1 * balance
}

mesh ranks(data = 1, tensor = 1, pipe = 1)
layout split on ranks { RULES }
schedule plain = one_f_one_b(microbatches = 1)
train { data = random() optimizer = sgd(lr = 0.3, momentum = 0.9) steps = 2 precision = f64 }
"""
# All experts for all tokens, of which the chosen ones count.
DENSE = """let every = dot(silu(dot(x, up, over = embed)), down, over = ffn)
  let hit = expand(id, other) == iota(other)
  let counted = sum(cast(hit, f32) * weight, over = chosen)
  let y = dot(every, rename(counted, other -> experts), over = experts)"""
ROUTED = """let u = silu(routed_dot(x, up, id, over = embed, along = experts))
  let y = sum(routed_dot(u, down, id, over = ffn, along = experts) * weight, over = chosen)"""
SLOTTED = """let inside = dispatch(x, id, over = seq, into = [experts, slots])
  let u = dot(silu(dot(inside, up, over = embed)), down, over = ffn)
  let y = combine(u, id, weight, over = seq, from = [experts, slots])"""

QUICK = (
    "shard seq -> data  shard experts, ffn -> tensor",
    "shard batch -> data  shard experts -> data  shard ffn -> tensor",
)
RULES = (
    "shard batch -> data",
    "shard seq -> data",
    "shard chosen -> data",
    "shard ffn -> tensor",
    "shard embed -> tensor",
    "shard experts -> tensor",
    "shard batch -> data  shard experts -> data",
    "shard experts -> data  shard batch -> data",
    "shard seq -> data  shard experts -> tensor  shard param -> data",
    "shard batch -> data  shard experts -> data  shard state -> data  stage layer -> pipe",
)


def trained(folder: Path, products: str, rules: str = "", *overrides: str) -> dict[str, torch.Tensor]:
    path = folder / "experts.par"
    path.write_text(FILE.replace("PRODUCTS", products).replace("RULES", rules))
    spec, diagnostics = load(path, list(overrides))
    assert spec is not None, diagnostics
    plan = prepare(spec)
    run = VirtualRun(plan)
    run.train(open_data(plan.program, plan.train, folder), [])
    return run.parameters()


def sizes(rules: str) -> list[str]:
    """Two ranks along each mesh axis that is used, and two microbatches."""
    over = [f"ranks.{axis}=2" for axis in ("data", "tensor", "pipe") if f"-> {axis}" in rules]
    return [*over, "plain.microbatches=2"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return trained(tmp_path_factory.mktemp("dense"), DENSE)


@pytest.mark.few(1)
@pytest.mark.parametrize("rules", [*QUICK, *soak(*RULES)])
@pytest.mark.parametrize("products", [ROUTED, SLOTTED], ids=["routed", "slotted"])
def test_experts_equal_the_dense_computation(tmp_path: Path, dense: dict[str, torch.Tensor], products: str, rules: str):
    found = trained(tmp_path, products, rules, *sizes(rules))
    assert set(found) == set(dense)
    for name, value in dense.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
