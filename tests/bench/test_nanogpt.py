"""The nanoGPT-like loop and ours are the same training: every loss, in float64, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from random import Random
from string import ascii_letters

import nanogpt
import peers.nanogpt
import pytest
import torch

from partita.runtime.training import VirtualRun

# Small, with a warm-up, a decay and a floor that are all reached, clipping that bites, and two evaluations. The rate
# and the weight decay are great enough for each to be seen in the losses.
SMALL = (
    *("batch=4", "seq=8", "embed=16", "heads=2", "train.precision=f64", "train.clip=0.5"),
    *("train.steps=8", "train.eval=every(4, batches=2)", "train.optimizer.weight_decay=0.5"),
    "train.optimizer.lr=cosine(peak=1e-2, warmup=3, total=7, floor=1e-3)",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A text where the recipe expects its own."""
    (tmp_path / nanogpt.TEXT).write_text("".join(Random(1).choices(ascii_letters + " \n", k=3_000)))
    return tmp_path


@pytest.mark.parametrize("layout", [(), ("machine.data=2",), ("machine.pipe=2", "fast.microbatches=2")])
def test_the_peer_trains_what_ours_trains(folder: Path, layout: tuple[str, ...]):
    work = nanogpt.recipe([*SMALL, *layout], folder)
    expected = peers.nanogpt.Training(work).run()
    run, seen = VirtualRun(work.plan), nanogpt.Seen()
    run.train(work.dataset, [seen])
    assert seen.losses.training == pytest.approx(expected.training, rel=1e-10)
    assert seen.losses.evaluations == pytest.approx(expected.evaluations, rel=1e-10)
    assert len(expected.training) == 8
    assert len(expected.evaluations) == 2


def test_the_recipe_decays_what_nanogpt_decays(folder: Path):
    """All matrices, embeddings and positions; no scale."""
    work = nanogpt.recipe([], folder)
    graph = work.plan.training.forward
    assert graph is not None
    decaying = {each.name for each in graph.parameters if each.decays}
    assert decaying == {name for name, weight in work.weights.items() if weight.dim() >= 2}
    assert "nanogpt.wpe" in decaying
    assert sum(weight.numel() for weight in work.weights.values()) == 804_096


@pytest.mark.parametrize("wrong", ["rate", "decay", "clip"])
def test_what_differs_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str):
    """The comparison can fail."""
    work = nanogpt.recipe(list(SMALL), folder)
    right = peers.nanogpt.Training(work).run().training
    if wrong == "rate":
        monkeypatch.setattr(peers.nanogpt, "rate_at", lambda step, **call: call["floor"])
    elif wrong == "decay":
        made = peers.nanogpt.optimizer_of
        monkeypatch.setattr(peers.nanogpt, "optimizer_of", lambda m, settings: made(m, {**settings, "weight_decay": 0}))
    else:
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)
    assert peers.nanogpt.Training(work).run().training != pytest.approx(right, rel=1e-7)
