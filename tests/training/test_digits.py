"""Handwritten digits, as a clone ships them: four data-parallel ranks learn them, and lose what a torch loop does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from partita.dsl.load import load
from partita.runtime.data.binding import open_data
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.commands import partita, records
from tests.files import SPECS

RANKS, GOAL = 4, 0.93


def test_the_digits_are_whole():
    with np.load(SPECS / "digits.npz") as arrays:
        image, label = arrays["image"], arrays["label"]
    assert image.shape == (1797, 64)
    assert label.shape == (1797,)
    assert (image.min(), image.max()) == (0, 1)
    # The holdout stands at the end: each digit must be there in its share, as everywhere.
    shares = np.bincount(label[-180:], minlength=10) / 180
    assert all(0.04 < share < 0.16 for share in shares)
    assert (SPECS / "digits.npz").stat().st_size < 200_000


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_learns_as_a_torch_loop_does(ranks: int):
    """The same initial values and batches; every loss within 1e-5, and the held-out digits are read."""
    spec, diagnostics = load(SPECS / "mlp.par", [f"pair.data={ranks}", "train.eval=every(100, batches=1)"])
    assert spec is not None, "\n\n".join(d.render() for d in diagnostics)
    plan = prepare(spec)
    assert plan.ranks == ranks
    run = VirtualRun(plan, strict=False)
    dataset = open_data(plan.program, plan.train, SPECS)
    assert dataset is not None
    names = ("w1", "b1", "w2", "b2")
    w1, b1, w2, b2 = (run.parameters()[f"classifier.{name}"].clone().requires_grad_() for name in names)
    optimizer = torch.optim.SGD([w1, b1, w2, b2], lr=0.1, momentum=0.9)

    def logits(image: torch.Tensor) -> torch.Tensor:
        return torch.relu(image @ w1 + b1) @ w2 + b2

    for step in range(1, plan.train.steps + 1):
        batch = run.ranks[0].tensors(dataset.batch(step))
        loss, _ = run.step(step, batch, 0.1)
        expected = F.cross_entropy(logits(batch["image"]), batch["label"])
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), abs=1e-5), f"step {step}"

    held = run.ranks[0].tensors(dataset.holdout_batch(0))
    _, metrics, _ = run.evaluate(held)
    with torch.no_grad():
        right = logits(held["image"]).argmax(-1) == held["label"]
    assert metrics["accuracy"] == pytest.approx(right.float().mean().item())
    assert metrics["accuracy"] >= GOAL


@pytest.mark.soak
def test_four_processes_learn_the_digits(tmp_path: Path):
    """`partita run`, over Gloo."""
    arguments = ("run", str(SPECS / "mlp.par"), f"pair.data={RANKS}", "--transport", "gloo", "--run-dir", str(tmp_path))
    done = partita(*arguments, timeout=200)
    assert done.returncode == 0, done.stderr
    evaluations = [record for record in records(tmp_path) if "eval_accuracy" in record]
    assert evaluations[-1]["step"] == 500
    assert evaluations[-1]["eval_accuracy"] >= GOAL
