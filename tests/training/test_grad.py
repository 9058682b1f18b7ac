"""Models with gradients in their losses, against torch: one after another author's formula for each use of `grad`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked

Parameters = dict[str, Tensor]
Batch = dict[str, Tensor]
TRAIN = """
mesh line(pipe = 2, data = 2)
layout whole on line { }
layout cut on line { stage layer -> pipe  shard batch -> data  SPLIT  recompute layer }
layout zero on line { shard batch -> pipe, data  shard param -> data  offload state }
schedule s = one_f_one_b(microbatches = MICROBATCHES)
train { layout = whole schedule = s data = random() optimizer = sgd(lr = 0.05) steps = 2 precision = f64 }
"""
ALONE = ("line.pipe=1", "line.data=1", "schedule=gpipe(microbatches=1)")
LAYOUTS = {"whole": ALONE, "cut": ("layout=cut",), "zero": ("layout=zero",)}


class Case(NamedTuple):
    model: str
    loss: Callable[[Parameters, Batch], Tensor]
    split: str = ""
    microbatches: int = 2


def gradient(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


# Raissi et al., arXiv 1711.10561: the residual of u'' + u = f, by second derivatives at the points.
PINN = """axis batch = 8, hidden = 6, inner = 6
model m(x: f32[batch], f: f32[batch]) {
  param w, b: [hidden] ~ normal(1)
  let h = tanh(expand(x, hidden) * w + b)
  repeat 4 as layer {
    param v: [hidden, inner] ~ normal(0.4)
    let h = tanh(rename(dot(h, v, over = hidden), inner -> hidden))
  }
  param out: [hidden] ~ normal(0.5)
  let u = dot(h, out, over = hidden)
  let second = grad(grad(u, x), x)
  loss mse(second + u, f)
}
"""


def pinn(p: Parameters, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    h = torch.tanh(x[:, None] * p["m.w"] + p["m.b"])
    for i in range(4):
        h = torch.tanh(h @ p[f"m.layer.{i}.v"])
    u = h @ p["m.out"]
    return F.mse_loss(gradient(gradient(u, x), x) + u, batch["f"])


# Gulrajani et al., arXiv 1704.00028: the critic's gradient between data and samples has length 1.
CRITIC = """axis batch = 8, channels = 2, height = 5, width = 5, kh = 2, kw = 2, rows = 4, columns = 4, filters = 4
axis wide = 6, into = 6
model m(real: [batch, channels, height, width], fake: [batch, channels, height, width], part: [batch]) {
  share critic = judge
  let mixed = real * sigmoid(part) + fake * (1 - sigmoid(part))
  let g = grad(critic(mixed), mixed)
  let length = sqrt(sum(g * g, over = [channels, height, width]))
  loss mean(critic(fake)) - mean(critic(real)) + 10 * mean((length - 1) * (length - 1))
}
block judge(image: [batch, channels, height, width]) {
  param kernel: [channels, kh, kw, filters] ~ normal(0.4)
  param w: [filters, rows, columns, wide] ~ normal(0.2)
  let h = conv(image, kernel, [height, width] -> [rows, columns], over = channels)
  let h = dot(maximum(h, 0.2 * h), w, over = [filters, rows, columns])
  repeat 2 as layer {
    param v: [wide, into] ~ normal(0.5)
    let h = rename(dot(silu(layer_norm(h, over = wide)), v, over = wide), into -> wide)
  }
  param out: [wide] ~ normal(0.5)
  return dot(h, out, over = wide)
}
"""


def critic(p: Parameters, batch: Batch) -> Tensor:
    def judge(image: Tensor) -> Tensor:
        h = F.conv2d(image, p["m.critic.kernel"].permute(3, 0, 1, 2))
        h = torch.einsum("bfrc,frcw->bw", F.leaky_relu(h, 0.2), p["m.critic.w"])
        for i in range(2):
            h = F.silu(F.layer_norm(h, (6,))) @ p[f"m.critic.layer.{i}.v"]
        return h @ p["m.critic.out"]

    part = torch.sigmoid(batch["part"])[:, None, None, None]
    mixed = (batch["real"] * part + batch["fake"] * (1 - part)).requires_grad_()
    length = gradient(judge(mixed), mixed).flatten(1).norm(dim=1)
    return judge(batch["fake"]).mean() - judge(batch["real"]).mean() + 10 * ((length - 1) ** 2).mean()


# Song et al., arXiv 1905.07088: sliced score matching.
SCORE = """axis batch = 8, seq = 4, embed = 6, wide = 8, keys = seq
model m(x: [batch, seq, embed], v: [batch, seq, embed]) {
  let h = x
  repeat 2 as layer {
    param up: [embed, wide] ~ normal(0.4)
    param down: [wide, embed] ~ normal(0.4)
    param scale: [embed] ~ ones()
    let n = rms_norm(h, over = embed, scale = scale)
    let weights = softmax(dot(n, rename(n, seq -> keys), over = embed), over = keys)
    let h = h + dot(weights, rename(n, seq -> keys), over = keys)
    let h = h + dot(gelu(dot(h, up, over = embed)), down, over = wide)
  }
  let trace = v * grad(h * v, x)
  loss mean(sum(trace, over = [seq, embed])) + 0.5 * mean(h * h)
}
"""


def score(p: Parameters, batch: Batch) -> Tensor:
    x, v = batch["x"].clone().requires_grad_(), batch["v"]
    h = x
    for i in range(2):
        own = f"m.layer.{i}"
        n = F.rms_norm(h, (6,), p[f"{own}.scale"], 1e-5)
        h = h + torch.softmax(n @ n.transpose(1, 2), -1) @ n
        h = h + F.gelu(h @ p[f"{own}.up"], approximate="tanh") @ p[f"{own}.down"]
    return (v * gradient(h * v, x)).sum((1, 2)).mean() + 0.5 * (h * h).mean()


# Foret et al., arXiv 2010.01412, with the second-order term: the loss where it is worst nearby.
SAM = """axis batch = 8, embed = 5, wide = 6, classes = 4
model m(x: [batch, embed], y: i64[batch]) {
  param up: [embed, wide] ~ normal(0.5)
  param down: [wide, classes] ~ normal(0.5)
  repeat 2 as layer { param bias: [embed] ~ normal(0.5)  let x = x + bias }
  let loss_here = at(x, y, up, down)
  let a = grad(loss_here, up)
  let b = grad(loss_here, down)
  let rho = 0.05 * rsqrt(sum(a * a) + sum(b * b) + 1e-12)
  loss at(x, y, up + rho * a, down + rho * b)
}
block at(x: [batch, embed], y: i64[batch], up: [embed, wide], down: [wide, classes]) {
  return cross_entropy(dot(tanh(dot(x, up, over = embed)), down, over = wide), y, over = classes)
}
"""


def sam(p: Parameters, batch: Batch) -> Tensor:
    x = batch["x"] + p["m.layer.0.bias"] + p["m.layer.1.bias"]

    def at(up: Tensor, down: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(x @ up) @ down, batch["y"])

    up, down = p["m.up"], p["m.down"]
    a, b = torch.autograd.grad(at(up, down), [up, down], create_graph=True)
    rho = 0.05 / (a.square().sum() + b.square().sum() + 1e-12).sqrt()
    return at(up + rho * a, down + rho * b)


CASES = {
    "pinn": Case(PINN, pinn, "shard hidden -> data"),
    "critic": Case(CRITIC, critic),
    "score": Case(SCORE, score, "shard wide -> data"),
    "sam": Case(SAM, sam, microbatches=1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_model_with_gradients_equals_torch(name: str, layout: str):
    case = CASES[name]
    train = TRAIN.replace("MICROBATCHES", str(case.microbatches)).replace("SPLIT", case.split)
    if case.split:
        train = train.replace("shard batch -> data  shard", "shard")
    run = VirtualRun(prepare(checked(case.model + train, "m.par", LAYOUTS[layout])))
    p = {path: value.clone().requires_grad_() for path, value in run.parameters().items()}
    (batch,) = batches(run.plan.program, 1)[:1]
    loss = case.loss(p, batch)
    loss.backward()
    found, _ = run.step(1, batch, 0.05)
    assert found == pytest.approx(loss.item(), rel=1e-9)
    for path, d in run.gradients().items():
        torch.testing.assert_close(d, p[path].grad, rtol=1e-8, atol=1e-10)
