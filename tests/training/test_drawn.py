"""Models that draw, against torch: masked diffusion, and contrast with a queue of what a slow copy has made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from partita.dsl.load import load_text
from partita.runtime.interpreter import drawn
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import SPECS

SEED = 3
MESH = """
mesh line(pipe = 2, data = 2, tensor = 2)
layout whole on line { }
layout cut on line { STAGES shard batch -> data  shard ffn, SPLIT -> tensor  shard state -> data }
layout zero on line { shard batch -> data, pipe  shard SPLIT -> tensor  shard param -> data }
schedule s = one_f_one_b(microbatches = 2)
"""
ALONE = ("layout=whole", "line.pipe=1", "line.data=1", "line.tensor=1", "schedule=gpipe(microbatches=1)")
Parameters = dict[str, Tensor]


def uniform(path: str, step: int, *shape: int) -> Tensor:
    return drawn.sample("uniform", 0.5, SEED, step, path, shape)


def mdlm(p: Parameters, tokens: Tensor, step: int) -> Tensor:
    """Every token that is masked is predicted from all others."""
    rows, length = tokens.shape
    rate = 1e-3 + (1 - 1e-3) * (uniform("mdlm.when", step, rows) + 0.5)
    hidden = uniform("mdlm.chance", step, rows, length) + 0.5 < rate[:, None]
    mask = p["mdlm.table"].shape[0] - 1
    x = p["mdlm.table"][torch.where(hidden, mask, tokens)]
    for i in range(2):
        own = {name.rpartition(".")[2]: p[name] for name in p if name.startswith(f"mdlm.layer.{i}.attention.")}
        h = norm(x) * own["scale"]
        q, k, v = (torch.einsum("bse,ehk->bhsk", h, own[f"w{name}"]) for name in "qkv")
        a = F.scaled_dot_product_attention(turned(q), turned(k), v)
        x = x + torch.einsum("bhsk,hke->bse", a, own["wo"])
        own = {name.rpartition(".")[2]: p[name] for name in p if name.startswith(f"mdlm.layer.{i}.mlp.")}
        x = x + F.gelu(norm(x) * own["scale"] @ own["up"], approximate="tanh") @ own["down"]
    logits = norm(x) * p["mdlm.scale"] @ p["mdlm.head"]
    nll = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(rows, length)
    return (nll * hidden / rate[:, None]).mean()


def norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def turned(x: Tensor) -> Tensor:
    """Rotary positions, of halves."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def moco(p: Parameters, image: Tensor, step: int) -> Tensor:
    """`p` has the queue as it is before the step, and what it is afterwards in the end."""

    def encoded(which: str, view: str) -> Tensor:
        noise = drawn.sample("normal", 1.0, SEED, step, f"moco.{view}", tuple(image.shape))
        up, b, down = (p[f"moco.{which}.{name}"] for name in ("up", "b", "down"))
        h = F.relu((image + 0.3 * noise) @ up + b) @ down
        return h * (h.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    q, k = encoded("query", "left"), encoded("key", "right").detach()
    logits = torch.cat(((q * k).sum(-1, keepdim=True), q @ p["moco.queue"].T), 1) / 0.2
    p["moco.queue"] = torch.cat((k, p["moco.queue"][: -len(k)]))
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


CASES: dict[
    str, tuple[Callable[[Parameters, Tensor, int], Tensor], str, str, tuple[str, ...], str, tuple[str, ...]]
] = {
    "mdlm": (mdlm, "tokens", "stage layer -> pipe", ("seq=12", "embed=16", "vocab=32", "layers=2"), "vocab, heads", ()),
    "moco": (moco, "image", "", ("rest=24", "pixels=12", "features=6", "ffn=8"), "pixels", ("s.microbatches=1",)),
}


@pytest.mark.parametrize("layout", ["whole", "cut", "zero"])
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_draws_equals_torch(name: str, layout: str):
    meant, field, stages, sizes, split, more = CASES[name]
    mesh = MESH.replace("SPLIT", split).replace("STAGES", stages)
    mesh = mesh if stages else mesh.replace("pipe = 2, ", "").replace(", pipe", "")
    text = (SPECS / "zoo" / f"{name}.par").read_text() + mesh
    where = ALONE if layout == "whole" else (f"layout={layout}", "schedule=s", *more)
    where = where if stages else tuple(each for each in where if each != "line.pipe=1")
    fixed = ("batch=8", "train.data=random()", "train.eval=none", "train.precision=f64", f"train.seed={SEED}")
    plain = ("train.optimizer=sgd(lr = 0.1)", "train.clip=none", "train.steps=2")
    spec, diagnostics = load_text(text, f"{name}.par", (*fixed, *plain, *sizes, *where))
    assert spec is not None, [each.render() for each in diagnostics]
    run = VirtualRun(prepare(spec))
    p = {path: value.clone() for path, value in run.parameters().items()}
    for step, batch in enumerate(batches(run.plan.program, 2), 1):
        for part in ("up", "b", "down") if name == "moco" else ():
            p[f"moco.key.{part}"] = 0.99 * p[f"moco.key.{part}"] + 0.01 * p[f"moco.query.{part}"]
        for path in p:
            p[path] = p[path].detach().requires_grad_(not path.startswith(("moco.key", "moco.queue")))
        loss = meant(p, batch[field], step)
        loss.backward()
        found, _ = run.step(step, batch, 0.1)
        assert found == pytest.approx(loss.item(), rel=1e-9)
        with torch.no_grad():
            for path in [each for each in p if p[each].grad is not None]:
                p[path] = p[path] - 0.1 * p[path].grad
    for path, value in run.parameters().items():
        torch.testing.assert_close(value, p[path].detach(), rtol=1e-8, atol=1e-10)
