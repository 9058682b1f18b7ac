"""Graph networks, whose edges are ids of nodes, against torch: attention over neighbors, and equivariant layers."""

from __future__ import annotations

from collections.abc import Callable

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
NODES = 7
AXES = "axis batch = 4, nodes = 7, edges = 12, embed = 6, heads = 2, key = 3, space = 3, wide = 6\n"
TRAIN = """
mesh line(pipe = 2, data = 2, tensor = 2)
layout whole on line { }
layout heads on line { stage layer -> pipe  shard batch -> data  shard SPLIT -> tensor }
layout edges on line { stage layer -> pipe  shard batch -> data  shard edges -> tensor }
layout nodes on line { stage layer -> pipe  shard batch -> data  shard edges -> tensor  shard param -> data }
schedule s = one_f_one_b(microbatches = 2)
train { layout = whole schedule = s data = random() optimizer = sgd(lr = 0.05) steps = 2 precision = f64 }
"""
ALONE = ("line.pipe=1", "line.data=1", "line.tensor=1", "schedule=gpipe(microbatches=1)")
LAYOUTS = {
    "whole": ALONE,
    "heads": ("layout=heads", "line.data=1", "s.microbatches=4"),
    "edges": ("layout=edges",),
    "zero": ("layout=nodes",),
}

# Veličković et al., arXiv 1710.10903.
GAT = """model m(x: [batch, nodes, embed], source: i64[batch, edges], target: i64[batch, edges]) {
  let h = x
  repeat 2 as layer {
    param w: [embed, heads, key] ~ normal(0.5)
    param a, b: [heads, key] ~ normal(0.5)
    let v = dot(h, w, over = embed)
    let s = gather(dot(v, a, over = key), source, along = nodes) + gather(dot(v, b, over = key), target, along = nodes)
    let weight = softmax_by(maximum(s, 0.2 * s), target, edges -> nodes)
    let h = merge(sum_by(gather(v, source, along = nodes) * weight, target, edges -> nodes), [heads, key] -> embed)
    let h = silu(h) + max_by(gather(h, source, along = nodes), target, edges -> nodes)
  }
  loss mse(h, x)
}
"""


def gat(p: Parameters, batch: Batch) -> Tensor:
    """One graph after the other, one node after the other."""
    total = torch.tensor(0.0, dtype=torch.float64)
    for x, source, target in zip(batch["x"], batch["source"], batch["target"], strict=True):
        h = x
        for i in range(2):
            w, a, b = (p[f"m.layer.{i}.{name}"] for name in ("w", "a", "b"))
            v = torch.einsum("ne,ehk->nhk", h, w)
            rows = []
            for node in range(NODES):
                edges = (target == node).nonzero().flatten().tolist()
                if not edges:
                    rows.append(torch.zeros(6, dtype=torch.float64))
                    continue
                near = v[source[edges]]
                weight = torch.softmax(F.leaky_relu((near * a).sum(-1) + (v[node] * b).sum(-1), 0.2), 0)
                rows.append((near * weight[:, :, None]).sum(0).flatten())
            h = torch.stack(rows)
            largest = [
                h[source[target == node]].amax(0) if (target == node).any() else torch.zeros(6, dtype=torch.float64)
                for node in range(NODES)
            ]
            h = F.silu(h) + torch.stack(largest)
        total = total + F.mse_loss(h, x) / len(batch["x"])
    return total


# Satorras et al., arXiv 2102.09844, equations 3 to 6.
EGNN = """
model m(x: [batch, nodes, space], h: [batch, nodes, embed], source: i64[batch, edges], target: i64[batch, edges]) {
  let at = x
  repeat 2 as layer {
    param own, other: [embed, wide] ~ normal(0.4)
    param far, step: [wide] ~ normal(0.4)
    param up: [wide, embed] ~ normal(0.4)
    let apart = gather(at, target, along = nodes) - gather(at, source, along = nodes)
    let mixed = gather(dot(h, own, over = embed), target, along = nodes)
    let mixed = mixed + gather(dot(h, other, over = embed), source, along = nodes)
    let message = silu(mixed + expand(sum(apart * apart, over = space), wide) * far)
    let at = at + mean_by(apart * dot(message, step, over = wide), target, edges -> nodes)
    let h = h + dot(sum_by(message, target, edges -> nodes), up, over = wide)
  }
  loss mse(at, x + 1) + mean(h * h)
}
"""


def egnn(p: Parameters, batch: Batch) -> Tensor:
    at, h = batch["x"], batch["h"]
    rows = torch.arange(len(at))[:, None]
    source, target = batch["source"], batch["target"]
    hot = F.one_hot(target, NODES).double()
    for i in range(2):
        own, other, far, step, up = (p[f"m.layer.{i}.{name}"] for name in ("own", "other", "far", "step", "up"))
        apart = at[rows, target] - at[rows, source]
        message = F.silu(h[rows, target] @ own + h[rows, source] @ other + (apart**2).sum(-1, keepdim=True) * far)
        moved = torch.einsum("ben,bes->bns", hot, apart * (message @ step)[..., None])
        at = at + moved / hot.sum(1).clamp(min=1)[..., None]
        h = h + torch.einsum("ben,bew->bnw", hot, message) @ up
    return F.mse_loss(at, batch["x"] + 1) + h.square().mean()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("model", "split", "meant"), [(GAT, "heads", gat), (EGNN, "wide", egnn)], ids=["gat", "egnn"])
def test_a_graph_network_equals_torch(
    model: str, split: str, meant: Callable[[Parameters, Batch], Tensor], layout: str
):
    text = AXES + model + TRAIN.replace("SPLIT", split)
    run = VirtualRun(prepare(checked(text, "m.par", LAYOUTS[layout])))
    p = {path: value.clone().requires_grad_() for path, value in run.parameters().items()}
    (batch,) = batches(run.plan.program, 1)[:1]
    assert all(int(batch[name].max()) < NODES for name in ("source", "target"))
    loss = meant(p, batch)
    loss.backward()
    found, _ = run.step(1, batch, 0.05)
    assert found == pytest.approx(loss.item(), rel=1e-9)
    for path, d in run.gradients().items():
        torch.testing.assert_close(d, p[path].grad, rtol=1e-8, atol=1e-10)
