"""Integers of eight bits: inputs, buffers and values, which wrap around, in every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load
from partita.runtime.data.binding import open_data
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun

FILE = """axis batch = 12, pixels = 6, classes = 4
model m(image: u8[batch, pixels], offset: i8[batch], label: i64[batch]) {
  buffer packed: u8[pixels, classes] ~ constant(145)
  param scale: [classes] ~ normal(0.1)
  let low = cast(remainder(packed, 16), f32) - 8
  let high = cast(floor_divide(packed, 16), f32) - 8
  let turned = cast(image * 3 - 100, i8)
  let x = cast(abs(turned), f32) / 255
  let y = dot(x, low, over = pixels) + dot(cast(image, f32) / 255, high, over = pixels) + cast(offset, f32) / 100
  let best = cast(arg_max(cast(image, i32), over = pixels), u8)
  repeat 2 as layer {
    param mix: [classes] ~ normal(0.1)
    let y = y + tanh(y) * mix
  }
  loss cross_entropy(y * (1 + scale) + cast(best, f32) / 10, label, over = classes)
  metric brightest = max(image)
}
mesh ranks(data = 1, tensor = 1, pipe = 1)
layout cut on ranks {
  shard batch -> data
  shard pixels -> tensor
  stage layer -> pipe
}
schedule turns = one_f_one_b(microbatches = 2)
train {
  model = m  layout = cut  schedule = turns  data = arrays("data.npz")  optimizer = sgd(0.1)  steps = 2  precision = f64
}
"""
LAYOUTS = [(), ("ranks.data=2", "ranks.tensor=2"), ("ranks.tensor=3", "ranks.pipe=2")]


def written(folder: Path, **arrays: np.ndarray) -> Path:
    draws = np.random.default_rng(0)
    data = {
        "image": draws.integers(0, 256, (12, 6), dtype=np.uint8),
        "offset": draws.integers(-128, 128, 12),
        "label": draws.integers(0, 4, 12),
    }
    np.savez(folder / "data.npz", **(data | arrays))
    file = folder / "m.par"
    file.write_text(FILE)
    return file


def theirs(folder: Path, parameters: dict[str, torch.Tensor]) -> float:
    """The loss of the whole set, by torch."""
    data = {name: torch.from_numpy(array) for name, array in np.load(folder / "data.npz").items()}
    image, packed = data["image"], torch.full((6, 4), 145, dtype=torch.uint8)
    turned = (image * 3 - 100).to(torch.int8)
    y = turned.abs().double() / 255 @ ((packed & 15).double() - 8)
    y = y + image.double() / 255 @ ((packed >> 4).double() - 8) + data["offset"].double()[:, None] / 100
    for i in range(2):
        y = y + y.tanh() * parameters[f"m.layer.{i}.mix"]
    y = y * (1 + parameters["m.scale"]) + image.argmax(1).double()[:, None] / 10
    return float(torch.nn.functional.cross_entropy(y, data["label"]))


@pytest.mark.parametrize("overrides", LAYOUTS, ids=["alone", "data and pixels", "pixels and stages"])
def test_they_compute_what_torch_computes(overrides: tuple[str, ...], tmp_path: Path):
    spec, diagnostics = load(written(tmp_path), overrides)
    assert spec is not None, diagnostics
    run = VirtualRun(prepare(spec))
    expected = theirs(tmp_path, run.parameters())
    batch = {name: torch.from_numpy(array) for name, array in np.load(tmp_path / "data.npz").items()}
    loss, _ = run.step(1, {**batch, "offset": batch["offset"].to(torch.int8)}, 0.1)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert run.metrics() == {"brightest": float(batch["image"].max())}


@pytest.mark.parametrize("overrides", LAYOUTS, ids=["alone", "data and pixels", "pixels and stages"])
def test_they_are_verified(overrides: tuple[str, ...], tmp_path: Path):
    assert main(["verify", str(written(tmp_path)), *overrides]) == 0


def test_random_data_takes_all_of_their_numbers(tmp_path: Path):
    assert main(["run", str(written(tmp_path)), "--transport", "virtual", "train.data=random()"]) == 0


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"offset": np.full(12, 128)}, "`offset` in `data.npz` has 128, and i8 holds -128 to 127"),
        ({"image": np.full((12, 6), -1, np.int8)}, "`image` in `data.npz` has -1, and u8 holds 0 to 255"),
    ],
)
def test_numbers_that_they_do_not_hold_are_refused(arrays: dict[str, np.ndarray], message: str, tmp_path: Path):
    spec, diagnostics = load(written(tmp_path, **arrays))
    assert spec is not None, diagnostics
    plan = prepare(spec)
    with pytest.raises(Refused) as refused:
        open_data(plan.program, plan.train, tmp_path)
    assert [(each.code, each.message) for each in refused.value.diagnostics] == [("E0605", message)]
