"""Buffers of a block that several calls share: one update follows the other, as in a module that is called twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked

GHOST = """axis batch = 8, features = 6, group_rows = 2, groups = batch / group_rows
block norm(x: [batch, features]) {
  param scale: [features] ~ uniform(1)
  buffer mean_kept: [features] ~ zeros()
  buffer calls: [] ~ zeros()
  let g = split(x, batch -> [groups, group_rows])
  let m = mean(g, over = group_rows)
  let v = mean((g - m) * (g - m), over = group_rows)
  update mean_kept = 0.9 * mean_kept + 0.1 * mean(m, over = groups)
  update calls = calls + 1
  let own = merge((g - m) * rsqrt(v + 1e-5), [groups, group_rows] -> batch)
  return where(training(), own, (x - mean_kept) * rsqrt(0.5 + calls)) * scale * (1 + 0.1 * calls)
}
model views(x: [batch, features], y: [batch, features]) {
  share tower = norm
  repeat 4 as layer {
    param w: [features] ~ normal(1)
    let x = tower(tanh(x * w) + 0.1 * x)
  }
  loss mse(x, y)
}
mesh line(pipe = 2, data = 2)
layout whole on line { }
layout cut on line { stage layer -> pipe  shard batch -> data }
schedule s = one_f_one_b(microbatches = 2)
schedule v = zb_v(microbatches = 2)
train { layout = whole  schedule = s  data = random()  optimizer = sgd(lr = 0.1)  steps = 2  precision = f64
  eval = every(2, batches = 1) }
"""
LAYOUTS = {
    "whole": ("line.pipe=1", "line.data=1", "schedule=gpipe(microbatches=1)"),
    "cut": ("layout=cut",),
    "v": ("layout=cut", "schedule=v", "line.data=1"),
    "microbatches": ("line.pipe=1", "line.data=1", "schedule=gpipe(microbatches=4)"),
}


def normalized(x: Tensor) -> Tensor:
    """Rows less the mean of their group of two, by its deviation."""
    g = x.reshape(4, 2, 6)
    return ((g - g.mean(1, keepdim=True)) / (g.var(1, correction=0, keepdim=True) + 1e-5).sqrt()).reshape(8, 6)


def views(p: dict[str, Tensor], x: Tensor, y: Tensor, training: bool) -> Tensor:
    """The loss. Training changes the buffers as a module changes them that is called four times."""
    scale, kept, calls = (p[f"views.tower.{name}"] for name in ("scale", "mean_kept", "calls"))
    for layer in range(4):
        x = torch.tanh(x * p[f"views.layer.{layer}.w"]) + 0.1 * x
        before = calls.clone()
        if training:
            kept.mul_(0.9).add_(0.1 * x.detach().mean(0))
            calls.add_(1)
            x = normalized(x)
        else:
            x = (x - kept) / (0.5 + calls).sqrt()
        x = x * scale * (1 + 0.1 * before)
    return F.mse_loss(x, y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_update_shared_buffers_one_after_the_other(layout: str):
    run = VirtualRun(prepare(checked(GHOST, "m.par", LAYOUTS[layout])))
    p = {path: value.clone() for path, value in run.parameters().items()}
    trained = {path: p[path].requires_grad_() for path in p if path.endswith((".scale", ".w"))}
    for step, batch in enumerate(batches(run.plan.program, 2), 1):
        loss = views(p, batch["x"], batch["y"], training=True)
        gradients = torch.autograd.grad(loss, list(trained.values()))
        found, _ = run.step(step, batch, 0.1)
        assert found == pytest.approx(loss.item(), rel=1e-9)
        for value, d in zip(trained.values(), gradients, strict=True):
            value.data.sub_(0.1 * d)
        for path, value in run.parameters().items():
            torch.testing.assert_close(value, p[path].detach(), rtol=1e-9, atol=1e-12)
    seen = views(p, batch["x"], batch["y"], training=False)
    assert run.evaluate(batch)[0] == pytest.approx(seen.item(), rel=1e-9)


COPIES = GHOST.replace(
    "share tower = norm", "share tower = norm\n  frozen copy still = tower\n  ema copy slow = tower(decay = 0.5)"
).replace("loss mse(x, y)", "let seen = slow(y)\n  loss mse(x, y) + mean(still(seen))\n  metric seen = max(abs(seen))")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_of_copies_update_nothing(layout: str):
    """The buffers of a copy stay, or follow those of its source as they are when a step begins."""
    run = VirtualRun(prepare(checked(COPIES, "m.par", LAYOUTS[layout])))
    slow = {name: run.parameters()[f"views.slow.{name}"].clone() for name in ("scale", "mean_kept", "calls")}
    for step, batch in enumerate(batches(run.plan.program, 3), 1):
        before = {path: value.clone() for path, value in run.parameters().items()}
        run.step(step, batch, 0.1)
        after = run.parameters()
        for name, kept in slow.items():
            slow[name] = 0.5 * kept + 0.5 * before[f"views.tower.{name}"]
            torch.testing.assert_close(after[f"views.slow.{name}"], slow[name])
            torch.testing.assert_close(after[f"views.still.{name}"], before[f"views.still.{name}"])
        assert after["views.tower.calls"].item() == 4 * step
        seen = normalized(batch["y"]) * slow["scale"] * (1 + 0.1 * slow["calls"])
        assert run.metrics()["seen"] == pytest.approx(seen.abs().max().item(), rel=1e-9)
