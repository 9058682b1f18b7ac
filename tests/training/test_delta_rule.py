"""The gated delta rule, in chunks and in layouts, against torch, which takes one position after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked

# Two groups of keys, each for three heads of values; the second layer's gates are of each key. Some gates are zero.
TEXT = """
axis batch = 4, seq = 24, embed = 6, groups = 2, heads = 3, key = 4, value = 6
block memory(x: [batch, seq, embed], each: number) {
  param wq, wk: [embed, groups, key] ~ normal(0.5)
  param wv: [embed, groups, heads, value] ~ normal(0.5)
  param wb, wa: [embed, groups, heads] ~ normal(0.5)
  param we: [embed, groups, key] ~ normal(0.5)
  param wo: [groups, heads, value, embed] ~ normal(0.5)
  let q = dot(x, wq, over = embed)
  let k = dot(x, wk, over = embed)
  let k = k / sqrt(sum(k * k, over = key) + 1e-6)
  let v = dot(x, wv, over = embed)
  let beta = 2 * sigmoid(dot(x, wb, over = embed))
  let a = each + (1 - each) * sigmoid(dot(x, wa, over = embed))
  let e = each * sigmoid(dot(x, we, over = embed)) + 1 - each
  let begin = expand(sum(x, over = embed) > 2, [groups, heads, key])
  let o = delta_rule(q, k, v, beta, where(begin, 0.0, expand(a, key) * expand(e, heads)), over = seq, along = key)
  return x + dot(o, wo, over = [groups, heads, value])
}
model m(x: [batch, seq, embed]) {
  let h = x
  repeat 2 as layer {
    let h = memory(h, each = layer)
  }
  param wk: [embed, key] ~ normal(0.5)
  let k = softmax(dot(h, wk, over = embed), over = key)
  let h = delta_rule(k, k, h, 0.5, over = seq, along = key)
  loss mean(h * h * h)
}
mesh line(pipe = 2, data = 2, tensor = 2)
layout whole on line { }
layout heads on line { stage layer -> pipe  shard batch -> data  shard heads -> tensor }
layout sequence on line { stage layer -> pipe  shard batch -> data  shard seq -> tensor }
layout values on line { stage layer -> pipe  shard seq -> data  shard value, groups -> tensor }
schedule s = one_f_one_b(microbatches = 2)
train { layout = whole schedule = s data = random() optimizer = sgd(lr = 0.05) steps = 2 precision = f64 }
"""
ALONE = ("line.pipe=1", "line.data=1", "line.tensor=1", "schedule=gpipe(microbatches=1)")
LAYOUTS = {
    "whole": (*ALONE, "seq=81"),
    "heads": ("layout=heads", "line.tensor=3"),
    "sequence": ("layout=sequence",),
    "sequence of many": ("layout=sequence", "line.data=1", "line.tensor=6"),
    "values": ("layout=values",),
}


def rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """q, k, decay: [batch, seq, ..., key]; v: [batch, seq, ..., value]; beta: [batch, seq, ...]."""
    state = torch.zeros(*k[:, 0].shape, v.shape[-1], dtype=v.dtype)
    results = []
    for t in range(v.shape[1]):
        state = state * decay[:, t, ..., None]
        lacking = (v[:, t] - torch.einsum("...kv,...k->...v", state, k[:, t])) * beta[:, t, ..., None]
        state = state + k[:, t, ..., None] * lacking[..., None, :]
        results.append(torch.einsum("...kv,...k->...v", state, q[:, t]))
    return torch.stack(results, 1)


def meant(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = x
    for i in range(2):
        wq, wk, wv, wb, wa, we, wo = (p[f"m.layer.{i}.memory.w{name}"] for name in "qkvbaeo")
        q, k = (torch.einsum("bse,egk->bsgk", h, w)[:, :, :, None].expand(-1, -1, -1, 3, -1) for w in (wq, wk))
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        v = torch.einsum("bse,eghv->bsghv", h, wv)
        beta = 2 * torch.einsum("bse,egh->bsgh", h, wb).sigmoid()
        whole = torch.einsum("bse,egh->bsgh", h, wa).sigmoid()[..., None].expand_as(q)
        each = torch.einsum("bse,egk->bsgk", h, we).sigmoid()[:, :, :, None].expand_as(q)
        gate = torch.where(h.sum(-1)[:, :, None, None, None] > 2, 0.0, each if i == 1 else whole)
        h = h + torch.einsum("bsghv,ghve->bse", rule(q, k, v, beta, gate), wo)
    k = F.softmax(torch.einsum("bse,ek->bsk", h, p["m.wk"]), -1)
    h = rule(k, k, h, torch.full(h.shape[:2], 0.5, dtype=h.dtype), torch.ones_like(k))
    return (h * h * h).mean()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_delta_rule_equals_torch(layout: str):
    run = VirtualRun(prepare(checked(TEXT, "m.par", LAYOUTS[layout])))
    p = {path: value.clone().requires_grad_() for path, value in run.parameters().items()}
    (batch,) = batches(run.plan.program, 1)[:1]
    assert (batch["x"].sum(-1) > 2).any()
    loss = meant(p, batch["x"])
    loss.backward()
    found, _ = run.step(1, batch, 0.05)
    assert found == pytest.approx(loss.item(), rel=1e-9)
    for path, d in run.gradients().items():
        expected = p[path].grad
        torch.testing.assert_close(d, torch.zeros_like(d) if expected is None else expected, rtol=1e-8, atol=1e-10)
