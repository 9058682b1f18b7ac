"""Outputs of a model, with given parameters and inputs, on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import partita
from partita.dsl.diagnostic import Refused
from partita.runtime.outputs import outputs
from tests.files import checked

TEXT = """
axis batch = 4, embed = 3, classes = 2, vocab = 5
block centered(x: [batch, embed]) {
  buffer mean_: [embed] ~ zeros()
  let own = mean(x, over = batch)
  update mean_ = 0.5 * mean_ + 0.5 * own
  return x - where(training(), own, mean_)
}
model m(ids: i64[batch], y: [batch, classes]) {
  param table: [vocab, embed] ~ normal(1.0)
  param w: [classes, embed] ~ normal(1.0)
  let h = centered(dropout(embedding(ids, table, over = vocab), 0.5))
  let logits = dot(h, w, over = embed)
  loss mse(logits, y)
  output logits = logits
  output likely = softmax(logits, over = classes)
  let logits = logits * 0
  output nothing = logits
}
mesh ranks(data = 2)
layout cut on ranks { shard batch -> data }
train { data = random() optimizer = sgd(lr = 0.1) steps = 2 }
"""
IDS = torch.tensor([4, 0, 2, 2])


def trained(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    file = tmp_path / "m.par"
    file.write_text(TEXT)
    return file, dict(partita.train(file).parameters)


def test_outputs_are_computed_as_in_evaluation(tmp_path: Path):
    file, parameters = trained(tmp_path)
    found = partita.outputs(file, parameters=parameters, inputs={"ids": IDS})
    assert parameters["m.centered.mean_"].abs().sum() > 0
    logits = (parameters["m.table"][IDS] - parameters["m.centered.mean_"]) @ parameters["m.w"].T
    torch.testing.assert_close(found["logits"], logits)
    torch.testing.assert_close(found["likely"], logits.softmax(-1))
    assert found["nothing"].abs().max() == 0
    assert list(partita.outputs(file, parameters=parameters, inputs={"ids": IDS}, names=["likely"])) == ["likely"]


def test_another_number_of_rows(tmp_path: Path):
    file, parameters = trained(tmp_path)
    whole = partita.outputs(file, parameters=parameters, inputs={"ids": IDS})
    one = partita.outputs(file, "batch=1", "ranks.data=1", parameters=parameters, inputs={"ids": IDS[1:2]})
    torch.testing.assert_close(one["logits"], whole["logits"][1:2])


def test_what_is_missing_or_wrong_is_said(tmp_path: Path):
    file, parameters = trained(tmp_path)
    spec = partita.load(file)
    less = {name: value for name, value in parameters.items() if name != "m.w"}
    with pytest.raises(ValueError, match=r"the outputs need the parameter `m\.w`"):
        outputs(spec, less, {"ids": IDS})
    with pytest.raises(ValueError, match="the outputs need the input `ids`"):
        outputs(spec, parameters, {})
    with pytest.raises(ValueError, match=r"the input `ids` has shape \(3,\), not \(4,\)"):
        outputs(spec, parameters, {"ids": IDS[:3]})
    with pytest.raises(ValueError, match="`ids` has ids that are not below 5"):
        outputs(spec, parameters, {"ids": IDS + 1})
    with pytest.raises(Refused, match="E0302"):
        outputs(spec, parameters, {"ids": IDS}, ["logit"])
    none = checked("\n".join(line for line in file.read_text().splitlines() if "output" not in line), "m.par")
    with pytest.raises(Refused, match="has no output"):
        outputs(none, parameters, {"ids": IDS})


ROUTED = """
axis batch = 4, embed = 3, experts = 2, chosen = 1, width = 2
model m(x: [batch, embed], y: [batch, embed]) {
  param router: [experts, embed] ~ normal(1.0)
  param up: [experts, embed, width] ~ normal(1.0)
  let weight, ids = top_k(dot(x, router, over = embed), experts -> chosen)
  output routed = relu(routed_dot(x, up, ids, over = embed, along = experts))
  loss mse(x * mean(weight), y) + 0.1 * mean(up)
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 2 }
"""


def test_an_output_in_the_order_of_experts_is_taken_back_into_its_own():
    spec, random = checked(ROUTED, "m.par"), torch.Generator().manual_seed(0)
    router, up, x = (torch.randn(shape, generator=random) for shape in ((2, 3), (2, 3, 2), (4, 3)))
    found = outputs(spec, {"m.router": router, "m.up": up}, {"x": x})["routed"]
    chosen = up[(x @ router.T).argmax(1)]
    torch.testing.assert_close(found, torch.einsum("be,bew->bw", x, chosen).relu()[:, None])
