"""The numbers of each file of the museum, by a script in numpy and torch alone: nothing of Partita is used here.

Each function computes what its file says, in one process, without a mesh, a layout or a schedule.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.museum.numbers import (
    Numbers,
    Parameters,
    adamw,
    drawn,
    initial,
    integers,
    kept,
    order,
    rms,
    sgd,
    trained,
)

FOLDER = Path(__file__).parent


def arrays(name: str) -> dict[str, Tensor]:
    found = {key: torch.from_numpy(value) for key, value in np.load(FOLDER / name).items()}
    return {key: value.double() if value.is_floating_point() else value for key, value in found.items()}


def cross_entropy(logits: Tensor, targets: Tensor, ignore: int = -100) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore)


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * scale + shift


def rope(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """[batch, seq, …, key]: halves of `key` rotated by position, base 10000 (Su et al., arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    where = torch.arange(x.shape[1]) if positions is None else positions
    angle = where[..., None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = angle.view(*angle.shape[:-1], *[1] * (x.dim() - 3), half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, sink: Tensor | None = None) -> Tensor:
    """[batch, seq, heads, key] each: causal attention, written out; a sink is one more score of each head."""
    scores = torch.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    scores = scores.masked_fill(~(seen if mask is None else seen & mask[:, None]), -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return torch.einsum("bhst,bthk->bshk", scores.softmax(-1)[..., : q.shape[1]], v)


def tied_embedding() -> Numbers:
    p = {"lm.table": initial("lm.table", 6, 8, std=0.5)}
    p |= {name: initial(name, 8, std=0.4) for name in ("lm.layer.0.scale", "lm.layer.1.scale")}

    def loss(q: Parameters, step: int) -> Tensor:
        x = q["lm.table"][integers(step, "tokens", 6, 4, 4)]
        for i in range(2):
            x = x + torch.tanh(x * q[f"lm.layer.{i}.scale"])
        return cross_entropy(x @ q["lm.table"].T, integers(step, "targets", 6, 4, 4))

    return trained(p, loss, 2, sgd(0.5))


def final_norm() -> Numbers:
    shapes = {"table": (6, 8), "up": (8, 8), "down": (8, 8), "scale": (8,), "shift": (8,)}
    p = {f"lm.{name}": initial(f"lm.{name}", *shape, std=0.5) for name, shape in shapes.items()}

    def loss(q: Parameters, step: int) -> Tensor:
        x = q["lm.table"][integers(step, "tokens", 6, 2, 4)]
        x = x + torch.tanh(x @ q["lm.up"]) @ q["lm.down"]
        h = layer_norm(x, q["lm.scale"], q["lm.shift"])
        return cross_entropy(h @ q["lm.table"].T, integers(step, "targets", 6, 2, 4))

    return trained(p, loss, 2, sgd(0.5))


def shared_norm() -> Numbers:
    p = {name: initial(name, 8, 4, 4, std=0.5) for name in ("m.wv", "m.wa")}
    p |= {"m.wo": initial("m.wo", 4, 4, 8, std=0.5), "m.gain": torch.ones(4)}

    def loss(q: Parameters, step: int) -> Tensor:
        x, y = drawn(step, "x", 4, 6, 8), drawn(step, "y", 4, 6, 8)
        keep = torch.einsum("bse,ehk->bshk", x, q["m.wa"]).sigmoid()
        new = torch.einsum("bse,ehk->bshk", x, q["m.wv"])
        states = [new[:, 0]]
        for t in range(1, 6):
            states.append(keep[:, t] * states[-1] + new[:, t])
        out = torch.einsum("bshk,hke->bse", rms(torch.stack(states, 1)) * q["m.gain"], q["m.wo"])
        return F.mse_loss(out, y)

    return trained(p, loss, 2, sgd(0.5))


def few_kv_heads() -> Numbers:
    shapes = {"wq": (8, 1, 4, 4), "wk": (8, 1, 4), "wv": (8, 1, 4), "wo": (1, 4, 4, 8)}
    p = {f"m.{name}": initial(f"m.{name}", *shape, std=0.5) for name, shape in shapes.items()}
    p["m.sink"] = initial("m.sink", 1, 4, std=1.0)

    def loss(q: Parameters, step: int) -> Tensor:
        x, y = drawn(step, "x", 2, 6, 8), drawn(step, "y", 2, 6, 8)
        query = torch.einsum("bse,ehk->bshk", x, q["m.wq"][:, 0])
        key, value = ((x @ q[name][:, 0]).unsqueeze(2).expand(-1, -1, 4, -1) for name in ("m.wk", "m.wv"))
        return F.mse_loss(
            torch.einsum("bshk,hke->bse", attended(query, key, value, sink=q["m.sink"][0]), q["m.wo"][0]), y
        )

    return trained(p, loss, 2, sgd(0.5))


def twice() -> Numbers:
    shapes = {"siamese.encode.up": (8, 16), "siamese.encode.down": (16, 8), "siamese.out": (8, 5)}
    p = {name: initial(name, *shape, std=0.4) for name, shape in shapes.items()}

    def loss(q: Parameters, step: int) -> Tensor:
        u, v = (
            x + torch.tanh(x @ q["siamese.encode.up"]) @ q["siamese.encode.down"]
            for x in (drawn(step, "a", 8, 8), drawn(step, "b", 8, 8))
        )
        return cross_entropy(u @ q["siamese.out"], integers(step, "y", 5, 8)) + 0.5 * F.mse_loss(v, u.detach())

    return trained(p, loss, 2, sgd(0.5))


def long_context() -> Numbers:
    p = {name: initial(name, 8, 4, 4, std=0.5) for name in ("m.wq", "m.wk", "m.wv")}
    p["m.wo"] = initial("m.wo", 4, 4, 8, std=0.5)

    def loss(q: Parameters, step: int) -> Tensor:
        x, y = drawn(step, "x", 2, 16, 8), drawn(step, "y", 2, 16, 8)
        query, key, value = (torch.einsum("bse,ehk->bshk", x, q[name]) for name in ("m.wq", "m.wk", "m.wv"))
        return F.mse_loss(torch.einsum("bshk,hke->bse", attended(rope(query), rope(key), value), q["m.wo"]), y)

    return trained(p, loss, 2, sgd(0.5))


def sliced_loss() -> Numbers:
    p = {f"lm.{name}": initial(f"lm.{name}", 6, 8, std=0.5) for name in ("table", "head")}
    p["lm.up"] = initial("lm.up", 8, 8, std=0.5)

    def loss(q: Parameters, step: int) -> Tensor:
        tokens, targets = integers(step, "tokens", 6, 4, 8), integers(step, "targets", 6, 4, 8)
        x = q["lm.table"][tokens]
        logits = (x + torch.tanh(x @ q["lm.up"])) @ q["lm.head"].T
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        weights = (tokens > 1).double().flatten() * 0.5
        return (each * weights).sum() / weights.sum()

    return trained(p, loss, 2, sgd(0.5))


def unequal_tokens() -> Numbers:
    p = {"lm.table": initial("lm.table", 12, 8, std=0.5), "lm.next": initial("lm.next", 8, 8, std=0.5)}
    p |= {name: initial(name, 8, std=1.0) for name in ("lm.layer.0.scale", "lm.layer.1.scale")}
    data = arrays("unequal_tokens.npz")
    rows = order(8, 3)

    def loss(q: Parameters, step: int) -> Tensor:
        tokens, targets, later = (data[name][rows[8 * step - 8 : 8 * step]] for name in ("tokens", "targets", "later"))
        x = q["lm.table"][tokens]
        for i in range(2):
            x = x + torch.tanh(x * q[f"lm.layer.{i}.scale"])
        second = (x @ q["lm.next"]) @ q["lm.table"].T
        return cross_entropy(x @ q["lm.table"].T, targets) + 0.3 * cross_entropy(second, later)

    return trained(p, loss, 3, sgd(0.1))


def microbatches() -> Numbers:
    p = {name: initial(name, 8, std=1.0) for name in ("m.last", *(f"m.layer.{i}.scale" for i in range(4)))}

    def loss(q: Parameters, step: int) -> Tensor:
        h = drawn(step, "x", 8, 8)
        for i in range(4):
            h = h + torch.tanh(h * q[f"m.layer.{i}.scale"])
        return F.mse_loss(h * q["m.last"], drawn(step, "y", 8, 8)) + 0.1 * (q["m.last"] ** 2).sum()

    return trained(p, loss, 2, sgd(0.1))


def packed() -> Numbers:
    p = {"lm.table": initial("lm.table", 10, 8, std=0.7)}
    p |= {name: initial(name, 8, 2, 4, std=0.5) for name in ("lm.wq", "lm.wk", "lm.wv")}
    p["lm.wo"] = initial("lm.wo", 2, 4, 8, std=0.5)
    data = arrays("packed.npz")
    rows = order(8, 1)

    def loss(q: Parameters, step: int) -> Tensor:
        names = ("tokens", "targets", "segments", "positions")
        tokens, targets, segments, positions = (data[name][rows[4 * step - 4 : 4 * step]] for name in names)
        x = q["lm.table"][tokens]
        query, key, value = (torch.einsum("bse,ehk->bshk", x, q[name]) for name in ("lm.wq", "lm.wk", "lm.wv"))
        same = segments[:, :, None] == segments[:, None, :]
        x = x + torch.einsum(
            "bshk,hke->bse", attended(rope(query, positions), rope(key, positions), value, same), q["lm.wo"]
        )
        return cross_entropy(x @ q["lm.table"].T, targets, ignore=-1)

    return trained(p, loss, 2, sgd(0.3))


def whole_evaluation() -> Numbers:
    p = {"lm.table": initial("lm.table", 10, 8, std=0.7)}
    p |= {name: initial(name, 8, std=1.0) for name in ("lm.layer.0.w", "lm.layer.1.w")}
    training, evaluation = arrays("whole_evaluation_train.npz"), arrays("whole_evaluation_eval.npz")

    def of(q: Parameters, tokens: Tensor, targets: Tensor) -> Tensor:
        x = q["lm.table"][tokens]
        for i in range(2):
            x = x * q[f"lm.layer.{i}.w"] + torch.tanh(x)
        return cross_entropy(x @ q["lm.table"].T, targets, ignore=-1)

    found = trained(p, lambda q, step: of(q, **training), 2, sgd(0.1))
    found.evaluation = float(of(found.parameters, **evaluation))
    return found


def _mlp(layers: int, shape: tuple[int, int] = (8, 8)) -> dict[str, Tensor]:
    up, down = shape, shape[::-1]
    return {
        f"m.layer.{i}.{name}": initial(f"m.layer.{i}.{name}", *(up if name == "up" else down), std=0.5)
        for i in range(layers)
        for name in ("up", "down")
    }


def _through(q: Parameters, h: Tensor, layers: int) -> Tensor:
    for i in range(layers):
        h = h + torch.tanh(h @ q[f"m.layer.{i}.up"]) @ q[f"m.layer.{i}.down"]
    return h


def global_norm() -> Numbers:
    def loss(q: Parameters, step: int) -> Tensor:
        return F.mse_loss(_through(q, drawn(step, "x", 4, 8) * q["m.scale"], 2), drawn(step, "y", 4, 8))

    return trained({"m.scale": torch.ones(8), **_mlp(2)}, loss, 3, sgd(0.5), clip=0.1)


def _routed(q: Parameters, x: Tensor, scores: Tensor, by: Tensor, prefix: str) -> tuple[Tensor, Tensor]:
    """What the chosen experts of each token make of it, and how many tokens each expert has."""
    ids = by.topk(2, -1).indices
    weights = scores.gather(-1, ids)
    hidden = F.silu(torch.einsum("bse,bscef->bscf", x, q[f"{prefix}.up"][ids]))
    out = torch.einsum("bscf,bscfe->bsce", hidden, q[f"{prefix}.down"][ids])
    return x + (out * weights[..., None]).sum(2), torch.bincount(ids.flatten(), minlength=4).double()


def _experts(prefix: str) -> dict[str, Tensor]:
    p = {f"{prefix}.gate": initial(f"{prefix}.gate", 8, 4, std=1.0)}
    return p | {f"{prefix}.{name}": initial(f"{prefix}.{name}", 4, 8, 8, std=0.5) for name in ("up", "down")}


def experts() -> Numbers:
    def loss(q: Parameters, step: int) -> Tensor:
        x, y = drawn(step, "x", 4, 4, 8), drawn(step, "y", 4, 4, 8)
        p = (x @ q["m.gate"]).softmax(-1)
        return F.mse_loss(_routed(q, x, p, p, "m")[0], y)

    return trained(_experts("m"), loss, 3, sgd(0.5), clip=0.2)


def expert_bias() -> Numbers:
    bias = torch.zeros(4, dtype=torch.float64)

    def loss(q: Parameters, step: int) -> Tensor:
        nonlocal bias
        x, y = drawn(step, "x", 4, 4, 8), drawn(step, "y", 4, 4, 8)
        scores = (x @ q["m.moe.gate"]).sigmoid()
        out, counts = _routed(q, x, scores, scores + bias, "m.moe")
        bias = bias + 0.01 * (counts.mean() - counts)
        return F.mse_loss(out, y)

    found = trained(_experts("m.moe"), loss, 3, sgd(0.5))
    found.parameters["m.moe.bias"] = bias
    return found


def batch_balance() -> Numbers:
    def loss(q: Parameters, step: int) -> Tensor:
        p = (drawn(step, "x", 8, 4, 8) @ q["m.gate"]).softmax(-1)
        best = p.topk(2, -1)
        counts = torch.bincount(best.indices.flatten(), minlength=4)
        return (best.values**2).mean() + 0.01 * (counts * p.mean((0, 1))).sum()

    return trained({"m.gate": initial("m.gate", 8, 4, std=1.0)}, loss, 2, sgd(0.1))


def decay(mixed: bool = False) -> Numbers:
    p = {"lm.table": initial("lm.table", 6, 8, std=0.5)}
    p |= {f"lm.{name}": initial(f"lm.{name}", 8, std=1.0) for name in ("scale", "shift")}
    for i in range(2):
        p[f"lm.layer.{i}.up"] = initial(f"lm.layer.{i}.up", 8, 8, std=0.5)
        p[f"lm.layer.{i}.bias"] = initial(f"lm.layer.{i}.bias", 8, std=0.5)

    def loss(q: Parameters, step: int) -> Tensor:
        x = q["lm.table"][integers(step, "tokens", 6, 4, 4)]
        for i in range(2):
            x = x + torch.tanh(x @ q[f"lm.layer.{i}.up"] + q[f"lm.layer.{i}.bias"])
        h = layer_norm(x, q["lm.scale"], q["lm.shift"])
        return cross_entropy(h @ q["lm.table"].T, integers(step, "targets", 6, 4, 4))

    rule = adamw(0.05, 0.5, lambda name: name.endswith((".up", ".table")))

    def by_two_rules(p: Parameters, gradients: Parameters, step: int) -> dict[str, Tensor]:
        table = sgd(0.5)({"lm.table": p["lm.table"]}, gradients, step)
        return rule({name: value for name, value in p.items() if name != "lm.table"}, gradients, step) | table

    return trained(p, loss, 3, by_two_rules if mixed else rule)


def mixed_rules() -> Numbers:
    return decay(mixed=True)


def bad_rank() -> Numbers:
    data = arrays("bad_rank.npz")
    rows = order(12, 2)

    def loss(q: Parameters, step: int) -> Tensor:
        chosen = rows[4 * step - 4 : 4 * step]
        return F.mse_loss(_through(q, data["x"][chosen], 2), data["y"][chosen])

    return trained(_mlp(2, (6, 8)), loss, 6, adamw(1e-2, 0.1), clip=1.0)


def dropout() -> Numbers:
    names = [f"m.{block}.{name}" for block in ("mlp", "mlp_2") for name in ("up", "down")]

    def loss(q: Parameters, step: int) -> Tensor:
        h = drawn(step, "x", 4, 8)
        for block in ("m.mlp", "m.mlp_2"):
            inner = torch.tanh(h @ q[f"{block}.up"]) * kept(f"{block}.dropout", step, 0.25, 4, 8)
            h = h + inner @ q[f"{block}.down"]
        return F.mse_loss(h, drawn(step, "y", 4, 8))

    return trained({name: initial(name, 8, 8, std=0.5) for name in names}, loss, 2, sgd(0.5))


def initial_values() -> Numbers:
    def loss(q: Parameters, step: int) -> Tensor:
        return F.mse_loss(_through(q, drawn(step, "x", 4, 8), 4), drawn(step, "y", 4, 8))

    return trained(_mlp(4), loss, 1, sgd(0.5))


def resumed() -> Numbers:
    p = {"m.both": initial("m.both", 6, 2, 8, std=0.5), "m.down": initial("m.down", 8, 6, std=0.5)}
    p["m.mixed"] = initial("m.mixed", 2, std=1.0)
    data = arrays("resumed.npz")
    rows = order(14, 3)

    def loss(q: Parameters, step: int) -> Tensor:
        chosen = rows[4 * step - 4 : 4 * step]
        h = torch.einsum("be,epf->bpf", data["x"][chosen], q["m.both"])
        gate = (h * q["m.mixed"][:, None]).sum(1)
        return F.mse_loss((F.silu(gate) * h.sum(1)) @ q["m.down"], data["y"][chosen])

    rates = [0.05 * s / 2 if s <= 2 else 0.05 * 0.5 * (1 + math.cos(math.pi * (s - 2) / 6)) for s in range(1, 9)]
    unit = adamw(1.0)

    def update(p: Parameters, gradients: Parameters, step: int) -> dict[str, Tensor]:
        new = unit(p, gradients, step)
        return {name: value + rates[step - 1] * (new[name] - value) for name, value in p.items()}

    return trained(p, loss, 8, update)


def few_rows() -> Numbers:
    data = arrays("few_rows.npz")
    rows = order(7, 4)

    def of(q: Parameters, chosen: np.ndarray) -> Tensor:
        return F.mse_loss(data["x"][chosen] @ q["m.w"], data["y"][chosen])

    w = {"m.w": initial("m.w", 4, std=1.0)}
    found = trained(w, lambda q, step: of(q, rows[4 * step - 4 : 4 * step]), 7, sgd(0.1))
    found.evaluation = float(of(found.parameters, np.arange(7, 10)))
    return found


def means() -> Numbers:
    """The mean of n updates is corrected, as by Adam: `mean += (1 - 0.999) / (1 - 0.999^n) (w - mean)`."""
    mean = initial("m.w", 8, std=1.0)

    def update(p: Parameters, gradients: Parameters, step: int) -> dict[str, Tensor]:
        nonlocal mean
        new = sgd(0.01)(p, gradients, step)
        mean = mean + 0.001 / (1 - 0.999**step) * (new["m.w"] - mean)
        return new

    def loss(q: Parameters, step: int) -> Tensor:
        return F.mse_loss(drawn(step, "x", 4, 8) * q["m.w"], drawn(step, "y", 4, 8))

    found = trained({"m.w": mean}, loss, 8, update)
    found.buffers["m.w"] = mean
    return found


def half_precision() -> Numbers:
    def loss(q: Parameters, step: int) -> Tensor:
        return ((drawn(step, "x", 256, 8) @ q["m.w"]) ** 2).mean()

    return trained({"m.w": initial("m.w", 8, 8, std=1.0)}, loss, 2, sgd(0.001))
