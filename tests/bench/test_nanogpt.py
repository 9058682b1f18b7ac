"""The nanoGPT-like loop and ours are the same training: every loss, in float64, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from random import Random
from string import ascii_letters

import nanogpt
import peers.nanogpt
import pytest
import torch
from peers.draws import drawn
from torch import nn

from partita.runtime.training import VirtualRun
from tests.marks import soak

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


@pytest.mark.soak
@pytest.mark.parametrize("layout", [(), *soak((("machine.data=2",),), (("machine.pipe=2", "fast.microbatches=2"),))])
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


@pytest.mark.few(1)
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


def test_nanogpts_own_draws(folder: Path):
    """Of its modules, made in the order of its `GPT`, and of its batches, in the order of its loop."""
    work = nanogpt.recipe(list(SMALL), folder)
    found = drawn(work, 1337)
    torch.manual_seed(1337)
    model = _Gpt(*work.weights["nanogpt.wte"].shape, positions=8, layers=work.layers)
    last = work.layers - 1
    weights = {name.removeprefix("nanogpt."): each.float() for name, each in found.weights.items()}
    assert torch.equal(weights["wte"], model.head.weight)
    assert torch.equal(weights["wpe"], model.positions.weight)
    assert torch.equal(
        weights[f"layer.{last}.attention.wk"].reshape(16, 16), model.blocks[last].qkv.weight.t()[:, 16:32]
    )
    assert torch.equal(weights[f"layer.{last}.attention.wo"].reshape(16, 16), model.blocks[last].out.weight.t())
    assert torch.equal(weights["layer.0.mlp.up"], model.blocks[0].up.weight.t())
    assert torch.equal(weights["layer.0.mlp.down"], model.blocks[0].down.weight.t())
    assert torch.equal(weights["scale"], torch.ones(16))

    def places(length: int) -> list[int]:
        return torch.randint(length - 8, (4,)).tolist()

    first = places(2_700)
    drawn_then = [places(length) for length in (2_700, 2_700, 300, 300, 2_700)]  # evaluations, and the next batch
    assert found.dataset.places[:2] == [first, drawn_then[-1]]
    assert len(found.dataset.places) > 8
    batch = found.dataset.batch(1)
    assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
    assert found.dataset.holdout_batch(1)["tokens"].shape == (4, 8)


class _Block(nn.Module):
    def __init__(self, embed: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(embed, 3 * embed, bias=False), nn.Linear(embed, embed, bias=False)
        self.up, self.down = nn.Linear(embed, 4 * embed, bias=False), nn.Linear(4 * embed, embed, bias=False)


class _Gpt(nn.Module):
    def __init__(self, vocab: int, embed: int, positions: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, embed), nn.Embedding(positions, embed)
        self.blocks = nn.ModuleList(_Block(embed) for _ in range(layers))
        self.head = nn.Linear(embed, vocab, bias=False)
        self.tokens.weight = self.head.weight
        self.apply(lambda module: nn.init.normal_(module.weight, 0.0, 0.02) if hasattr(module, "weight") else None)
        for block in self.blocks:
            for each in (block.out, block.down):
                nn.init.normal_(each.weight, 0.0, 0.02 / (2 * layers) ** 0.5)
