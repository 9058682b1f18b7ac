"""Muon where matrices are stored in parts: two real processes share the work, and find what one process finds."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
import torch

from partita.runtime.rank import CompiledRun, prepare
from tests.commands import partita, records
from tests.files import checked
from tests.runtime.checkpoint.runs import tensors, trained

FILE = """
axis batch = 8, embed = 24, ffn = 48, vocab = 16
block mlp(x: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.2)
  param down: [ffn, embed] ~ normal(0.2)
  return x + dot(tanh(dot(x, up, over = embed)), down, over = ffn)
}
model m(x: [batch, embed], ids: i64[batch]) {
  param head: [embed, vocab] ~ normal(0.2)
  repeat 3 as layer { let x = mlp(x) }
  loss cross_entropy(dot(x, head, over = embed), ids, over = vocab)
}
optimizer mixed { update head -> sgd(lr = 0.1)  update all -> muon(lr = 0.01) }
mesh ranks(data = 2)
layout zero1 on ranks { shard batch -> data  shard state -> data }
layout zero3 on ranks { shard batch -> data  shard param -> data }
schedule s = one_f_one_b(microbatches = 2)
train {
  precision = f64 data = random() optimizer = mixed steps = 4 clip = 1.0 layout = zero1 eval = every(2, batches = 1)
  checkpoint = every(2)
}
"""


def plan_of(*overrides: str) -> CompiledRun:
    return prepare(checked(FILE, "m.par", overrides))


@pytest.mark.soak
def test_two_processes_find_what_one_finds_and_others_go_on_from_there(tmp_path: Path):
    """Also one rank alone, and two that store parameters in parts as well."""
    file = tmp_path / "m.par"
    file.write_text(FILE)
    done = partita("run", str(file), "train.steps=2", "--run-dir=two", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = trained(plan_of("ranks.data=1", "train.checkpoint=none"), tmp_path)
    losses = [each["loss"] for each in records(tmp_path / "two") if "loss" in each]
    assert losses == pytest.approx([whole.steps[step][0] for step in (1, 2)], rel=1e-9)
    for i, overrides in enumerate([("ranks.data=1",), ("layout=zero3",)]):
        there = tmp_path / f"{i}"
        copytree(tmp_path / "two" / "checkpoints", there / "checkpoints")
        again = trained(plan_of(*overrides), there)
        assert again.steps.keys() == {3, 4}
        for name, value in tensors(again.run).items():
            torch.testing.assert_close(value, tensors(whole.run)[name], rtol=1e-9, atol=1e-9, msg=name)
