"""Trained models from Python: what `train` returns, and what `load_model` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import partita

TEXT = """
axis batch = 4, embed = 3, classes = 2, vocab = 5
model m(ids: i64[batch], y: [batch, classes]) {
  param table: [vocab, embed] ~ normal(1.0)
  param w: [classes, embed] ~ normal(1.0)
  let logits = dot(embedding(ids, table, over = vocab), w, over = embed)
  loss mse(logits, y)
  output logits = logits
  output likely = softmax(logits, over = classes)
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 3 checkpoint = every(2) }
"""
IDS = torch.tensor([4, 0, 2, 2, 1, 3, 0])  # no whole number of batches


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.par"
    path.write_text(TEXT)
    return path


@pytest.mark.soak
def test_what_train_returns_computes_outputs(file: Path, tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    trained = partita.train(file, run_dir=tmp_path / "run", on_step=told.append)
    assert told == list(trained)
    found = trained.outputs({"ids": IDS})
    expected = trained.parameters["m.table"][IDS] @ trained.parameters["m.w"].T
    torch.testing.assert_close(found["logits"], expected)
    torch.testing.assert_close(found["likely"], expected.softmax(-1))
    assert list(trained.outputs({"ids": IDS}, ["likely"])) == ["likely"]


@pytest.mark.soak
def test_a_loaded_model_is_that_of_the_newest_checkpoint(file: Path, tmp_path: Path) -> None:
    trained = partita.train(file, run_dir=tmp_path / "run")
    model = partita.load_model(file, run_dir=tmp_path / "run")
    assert (model.step, model.checkpoint.name) == (3, "step-00000003")
    torch.testing.assert_close(model({"ids": IDS}), trained.outputs({"ids": IDS}))
    before = partita.load_model(file, run=tmp_path / "run" / "checkpoints" / "step-00000002", names=["logits"])
    assert (before({"ids": IDS})["logits"] - trained.outputs({"ids": IDS})["logits"]).abs().max() > 0


def test_what_does_not_fit_is_said(file: Path, tmp_path: Path) -> None:
    trained = partita.train(file, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="the outputs need the input `ids`"):
        trained.outputs({})
    with pytest.raises(ValueError, match="`ids` has ids that are not below 5"):
        trained.outputs({"ids": IDS + 1})
    with pytest.raises(partita.Refused, match="there is no checkpoint in"):
        partita.load_model(file, run=tmp_path / "nowhere")
    with pytest.raises(partita.Refused, match="is of another model"):
        partita.load_model(file, "embed=4", run=tmp_path / "run")
