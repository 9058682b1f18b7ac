"""Iterations that differ, against torch: numbers of iterations in a model, and rules for some iterations.

Losses and gradients in f64, and parameters after updates, on one device and in layouts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked

LAYERS = 6
FILE = """axis batch = 8, seq = 7, embed = 6, key = 3, wide = 10
const layers = 6
block attention(x: [batch, seq, embed], window: number) {
  param wq, wk: [embed, key] ~ kaiming()
  let q = dot(x, wq, over = embed)
  return attend(q, dot(x, wk, over = embed), x, over = seq, along = key, causal = true, window = window)
}
block mlp(x: [batch, seq, embed], scale: number) {
  param up: [embed, wide] ~ normal(0.5 / (1 + scale))
  param down: [wide, embed] ~ kaiming()
  return dot(gelu(dot(x, up, over = embed)), down, over = wide) * scale
}
model m(x: [batch, seq, embed], y: [batch, seq, embed]) {
  repeat layers as layer {
    let x = x + attention(x, window = 2 + layer) * power(0.5, layer)
    let x = x + where(layer == 3 or layer < 2 and not layer == 1, tanh(x) * 0.1, 0.05)
    let x = x + mlp(x, 1 / (1 + layer))
  }
  loss mse(x, y)
}
optimizer rates {
  freeze layer[0..1].attention, layer[4].mlp.up
  update layer[layers - 1] -> sgd(lr = 0.3)
  update layer -> sgd(lr = 0.2 * power(0.8, layers - 1 - layer), momentum = 0.5)
}
mesh line(pipe = 2, data = 2)
layout whole on line { }
layout cut on line { stage layer -> pipe  shard batch -> data }
layout zero on line {
  stage layer -> pipe  shard batch -> data  shard param -> data  recompute layer[2].mlp, layer[0]  offload layer[3]
}
layout placed on line {
  place layer[0..1] -> pipe[0]  place layer[2..5] -> pipe[1]
  shard batch -> data  shard layer[4..5].mlp.up: wide -> data
}
schedule s = one_f_one_b(microbatches = 2)
train { layout = whole schedule = s data = random() optimizer = rates steps = 3 precision = f64 }
"""
ALONE = ("line.pipe=1", "line.data=1", "schedule=gpipe(microbatches=1)")
LAYOUTS = {"whole": ALONE, "cut": ("layout=cut",), "zero": ("layout=zero",), "placed": ("layout=placed",)}
RATES = [0.2 * 0.8 ** (LAYERS - 1 - layer) for layer in range(LAYERS)]


def model(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    ahead = torch.arange(7)[:, None] - torch.arange(7)
    for i in range(LAYERS):
        own = f"m.layer.{i}"
        q, k = x @ p[f"{own}.attention.wq"], x @ p[f"{own}.attention.wk"]
        seen = (ahead >= 0) & (ahead < 2 + i)
        x = x + F.scaled_dot_product_attention(q, k, x, attn_mask=seen) * 0.5**i
        x = x + (torch.tanh(x) * 0.1 if i in (0, 3) else 0.05)
        h = F.gelu(x @ p[f"{own}.mlp.up"], approximate="tanh") @ p[f"{own}.mlp.down"]
        x = x + h / (1 + i)
    return F.mse_loss(x, y)


def rate(name: str) -> tuple[float, float] | None:
    """The rate and the momentum of a parameter; None if it is frozen."""
    _, _, layer, *rest = name.split(".")
    if (int(layer) < 2 and rest[0] == "attention") or (layer == "4" and rest == ["mlp", "up"]):
        return None
    return (0.3, 0.0) if layer == "5" else (RATES[int(layer)], 0.5)


def test_what_another_optimizer_leaves_has_rates_by_layer_too():
    """`muon` updates matrices alone, and leaves the others in the same layers to the next rule."""
    rules = "update layer -> muon(lr = 0.02)  update layer -> adamw(lr = 0.1 / (1 + layer))"
    text = FILE.replace("update layer[layers - 1] -> sgd(lr = 0.3)", rules).replace(
        "let x = x + mlp", "param gain: [embed] ~ ones()\n    let x = x * gain + mlp"
    )
    calls = prepare(checked(text, "m.par", ALONE)).training.rules
    found = {
        name: rule.call and (rule.call.name, rule.call.arguments["lr"].arguments["value"])
        for name, rule in calls.items()
    }
    assert found["m.layer.1.mlp.up"] == ("muon", 0.02)
    assert found["m.layer.3.gain"] == ("adamw", 0.1 / 4)
    assert found["m.layer.0.attention.wq"] is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_iterations_and_their_rules_equal_torch(layout: str):
    run = VirtualRun(prepare(checked(FILE, "m.par", LAYOUTS[layout])))
    p = {name: value.clone().requires_grad_(rate(name) is not None) for name, value in run.parameters().items()}
    assert len(p) == 4 * LAYERS
    optimizers = [
        torch.optim.SGD([value], lr=own[0], momentum=own[1])
        for name, value in p.items()
        if (own := rate(name)) is not None
    ]
    for number, batch in enumerate(batches(run.plan.program, 1)[:2], 1):
        loss = model(p, batch["x"], batch["y"])
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        found, _ = run.step(
            number, batch, *(each.arguments["lr"].arguments["value"] for each in run.plan.train.optimizer.calls)
        )
        assert found == pytest.approx(loss.item(), rel=1e-10)
        for name, gradient in run.gradients().items():
            torch.testing.assert_close(gradient, p[name].grad, rtol=1e-8, atol=1e-10)
        for each in optimizers:
            each.step()
    for name, value in run.parameters().items():
        torch.testing.assert_close(value, p[name].detach(), rtol=1e-8, atol=1e-10)
