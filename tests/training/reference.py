"""The example models written by hand in torch, with autograd and torch.optim: what ours must equal.

Parameters come by their full `.par` names. No function of Partita is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

Parameters = Mapping[str, Tensor]
Batch = Mapping[str, Tensor]


def _rms(x: Tensor, scale: Tensor | None = None) -> Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return y if scale is None else y * scale


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, seq, …heads, key] attention, written out."""
    scores = torch.einsum("bs...k,bt...k->b...st", q, k) / q.shape[-1] ** 0.5
    length = scores.shape[-1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("b...st,bt...k->bs...k", p, v)


def tiny(p: Parameters, batch: Batch, layers: int = 4) -> Tensor:
    x = p["tiny.wte"][batch["tokens"]] + p["tiny.wpe"]
    for i in range(layers):
        a = f"tiny.layer.{i}.attention"
        h = _rms(x)
        q, k, v = (torch.einsum("bse,ehk->bshk", h, p[f"{a}.{n}"]) for n in ("wq", "wk", "wv"))
        x = x + torch.einsum("bshk,hke->bse", _causal(q, k, v), p[f"{a}.wo"])
        m = f"tiny.layer.{i}.mlp"
        x = x + F.gelu(_rms(x) @ p[f"{m}.up"], approximate="tanh") @ p[f"{m}.down"]
    logits = _rms(x) @ p["tiny.wte"].t()
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def _rope(x: Tensor, base: float) -> Tensor:
    """[batch, seq, …, key]: the two halves of `key` rotated by position."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * base ** (-torch.arange(half, dtype=x.dtype) / half)
    shape = (x.shape[1], *[1] * (x.dim() - 3), half)
    cos, sin = angle.cos().view(shape), angle.sin().view(shape)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def llama(p: Parameters, batch: Batch, layers: int = 6) -> Tensor:
    x = p["llama.embed_in"][batch["tokens"]]
    for i in range(layers):
        a = f"llama.layer.{i}.attention"
        h = _rms(x, p[f"{a}.scale"])
        q = _rope(torch.einsum("bse,eghk->bsghk", h, p[f"{a}.wq"]), 500_000)
        k = _rope(torch.einsum("bse,egk->bsgk", h, p[f"{a}.wk"]), 500_000)
        v = torch.einsum("bse,egk->bsgk", h, p[f"{a}.wv"])
        heads = q.shape[3]
        k, v = (t.unsqueeze(3).expand(-1, -1, -1, heads, -1) for t in (k, v))
        x = x + torch.einsum("bsghk,ghke->bse", _causal(q, k, v), p[f"{a}.wo"])
        m = f"llama.layer.{i}.mlp"
        h = _rms(x, p[f"{m}.scale"])
        x = x + (F.silu(h @ p[f"{m}.gate"]) * (h @ p[f"{m}.up"])) @ p[f"{m}.down"]
    logits = _rms(x, p["llama.scale"]) @ p["llama.embed_out"].t()
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def classifier(p: Parameters, batch: Batch) -> Tensor:
    h = torch.relu(batch["image"] @ p["classifier.w1"] + p["classifier.b1"])
    logits = h @ p["classifier.w2"] + p["classifier.b2"]
    return F.cross_entropy(logits, batch["label"])


MODELS: dict[str, Callable[[Parameters, Batch], Tensor]] = {
    "tiny": tiny,
    "llama": llama,
    "classifier": classifier,
}


def optimizer(name: str, parameters: dict[str, Tensor], **arguments: float) -> torch.optim.Optimizer:
    """torch's optimizer, with weight decay where a product or an embedding reads the parameter (not scales, biases)."""
    plain = [p for n, p in parameters.items() if n.rsplit(".", 1)[-1] in ("scale", "shift", "b1", "b2", "wpe")]
    decayed = [p for p in parameters.values() if not any(p is q for q in plain)]
    decay = arguments.pop("weight_decay", 0.0)
    assert not arguments.pop("sparse", False)  # torch has no such updates
    assert (arguments.pop("every", 1), arguments.pop("from", 1)) == (1, 1)
    groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    return cls([g for g in groups if g["params"]], **arguments)
