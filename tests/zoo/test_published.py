"""Files of the zoo that each say one published idea, against torch: losses and gradients, whole and in layouts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import pi
from typing import NamedTuple

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
from tests.marks import soak

SEED = 3
MESH = """
mesh line(pipe = 2, data = 2, tensor = 2)
layout whole on line { }
layout cut on line { STAGES shard batch -> data  shard SPLIT -> tensor  shard state -> data }
layout zero on line { shard batch -> data, pipe  shard SPLIT -> tensor  shard param -> data }
schedule s = one_f_one_b(microbatches = 2)
"""
ALONE = ("layout=whole", "line.pipe=1", "line.data=1", "line.tensor=1", "schedule=gpipe(microbatches=1)")
Parameters = dict[str, Tensor]
Batch = dict[str, Tensor]


class Case(NamedTuple):
    """The loss at a step; which repeats are cut into stages, none where the whole batch is needed; which axes are split
    over `tensor`; and sizes.
    """

    loss: Callable[[Parameters, Batch, int], Tensor]
    stages: str
    split: str
    sizes: tuple[str, ...] = ()


def sampled(path: str, step: int, *shape: int, kind: str = "normal", argument: float = 1.0) -> Tensor:
    return drawn.sample(kind, argument, SEED, step, path, shape)


def of(p: Parameters, path: str) -> Parameters:
    """The parameters of a block or an iteration, by the rest of their names."""
    return {name.removeprefix(f"{path}."): value for name, value in p.items() if name.startswith(f"{path}.")}


def gradient(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def conv(x: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    return F.conv2d(x, kernel.permute(3, 2, 0, 1).contiguous(), stride=stride, padding=1)


def group_norm(x: Tensor, own: Parameters) -> Tensor:
    return F.group_norm(x, 4, own["scale"], own["shift"])


# ---------------------------------------------------------------- decoders


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Two halves of the last axis as pairs, turned by [seq, half] angles. The sequence is the second axis."""
    a, b = x.chunk(2, -1)
    cos, sin = (f(angle).view(1, len(angle), *[1] * (x.dim() - 3), -1) for f in (torch.cos, torch.sin))
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], scale, eps)


def attention(x: Tensor, own: Parameters, angle: Tensor, eps: float) -> Tensor:
    """Causal attention of grouped heads, with biases if there are any."""
    h = rms_norm(x, own["scale"], eps)
    q = turned(torch.einsum("bse,eghk->bsghk", h, own["wq"]) + own.get("bq", 0), angle)
    k = turned(torch.einsum("bse,egk->bsgk", h, own["wk"]) + own.get("bk", 0), angle)
    v = torch.einsum("bse,egk->bsgk", h, own["wv"]) + own.get("bv", 0)
    scores = torch.einsum("bsghk,btgk->bghst", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(later, -torch.inf), -1)
    return x + torch.einsum("bghst,btgk,ghke->bse", weights, v, own["wo"])


def mlp(x: Tensor, own: Parameters, eps: float) -> Tensor:
    h = rms_norm(x, own["scale"], eps)
    return x + (F.silu(h @ own["gate"]) * (h @ own["up"])) @ own["down"]


def stretched(length: int, half: int) -> Tensor:
    """The angles of Llama 3.1, where long wavelengths are eight times as long."""
    rate = 500_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    fits = 8192 * rate / (2 * pi)
    kept = ((fits - 1) / (4 - 1)).clamp(0, 1)
    return torch.arange(length)[:, None] * (kept * rate + (1 - kept) * rate / 8)


def llama(own: Parameters, tokens: Tensor, layers: int = 2) -> Tensor:
    """What a decoder's last norm yields."""
    x, angle = own["table"][tokens], stretched(tokens.shape[1], own["layer.0.attention.wk"].shape[-1] // 2)
    for i in range(layers):
        x = attention(x, of(own, f"layer.{i}.attention"), angle, 1e-5)
        x = mlp(x, of(own, f"layer.{i}.mlp"), 1e-5)
    return rms_norm(x, own["scale"], 1e-5)


def token_likelihoods(own: Parameters, batch: Batch, side: str) -> tuple[Tensor, Tensor]:
    """Log-likelihoods of the tokens of an answer, 0 elsewhere; and where they are."""
    targets = batch[f"{side}_targets"]
    logits = llama(own, batch[f"{side}_tokens"]) @ own["head"]
    there = (targets != -1).double()
    return there * torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0], there


def dpo(p: Parameters, batch: Batch, step: int) -> Tensor:
    policy, reference = of(p, "dpo.policy"), of(p, "dpo.reference")
    won, lost = (
        (token_likelihoods(policy, batch, side)[0] - token_likelihoods(reference, batch, side)[0]).sum(1)
        for side in ("chosen", "rejected")
    )
    return torch.log1p(torch.exp(-0.1 * (won - lost))).mean()


def orpo(p: Parameters, batch: Batch, step: int) -> Tensor:
    policy = of(p, "orpo.policy")
    (chosen, there), (rejected, other) = (token_likelihoods(policy, batch, side) for side in ("chosen", "rejected"))
    won, lost = (torch.exp(log_p.sum(1) / own.sum(1)) for log_p, own in ((chosen, there), (rejected, other)))
    ratio = won / (1 - won) / (lost / (1 - lost))
    return -chosen.sum() / there.sum() - 0.1 * torch.log(ratio / (1 + ratio)).mean()


def reward(p: Parameters, batch: Batch, step: int) -> Tensor:
    judge = of(p, "reward.judge")

    def score(side: str) -> Tensor:
        scores, targets = llama(judge, batch[f"{side}_tokens"]) @ judge["score"], batch[f"{side}_targets"].tolist()
        last = [max(i + 1 for i, each in enumerate(row[:-1]) if each != -1) for row in targets]
        return scores[range(len(last)), last]

    return torch.log1p(torch.exp(score("rejected") - score("chosen"))).mean()


def distill(p: Parameters, batch: Batch, step: int) -> Tensor:
    teacher, student = of(p, "distill.teacher.decoder"), of(p, "distill.student.decoder")
    logits = llama(student, batch["tokens"], 1) @ student["head"]
    known = torch.softmax((llama(teacher, batch["tokens"]) @ teacher["head"]).detach() / 2, -1)
    kl = F.kl_div(torch.log_softmax(logits / 2, -1), known, reduction="none").sum(-1).mean()
    return 0.5 * F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) + 0.5 * 4 * kl


def qwen2_vl(p: Parameters, batch: Batch, step: int) -> Tensor:
    """Patches of 2 x 2 of an image of 8 x 8, then a token, and the digit that is to be said."""
    own = of(p, "qwen2_vl")
    patches = batch["image"].view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).flatten(1, 2)
    seen = torch.einsum("bnhw,hwe->bne", patches, own["project"])
    tokens = torch.stack((torch.full_like(batch["label"], 10), batch["label"]), 1)
    targets = torch.stack((batch["label"], torch.full_like(batch["label"], 11)), 1)
    x = torch.cat((seen, own["table"][tokens]), 1)
    places = torch.tensor([(0, i, j) for i in range(4) for j in range(4)] + [(4, 4, 4), (5, 5, 5)])
    rate = 1e6 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angle = places[:, [0, 0, 1, 1, 1, 2, 2, 2]] * rate
    for i in range(2):
        x = attention(x, of(own, f"layer.{i}.mrope_attention"), angle, 1e-6)
        x = mlp(x, of(own, f"layer.{i}.mlp"), 1e-6)
    logits = rms_norm(x[:, -2:], own["scale"], 1e-6) @ own["table"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------- several copies, several players


def siamese(p: Parameters, batch: Batch, step: int) -> Tensor:
    own, image = of(p, "siamese.tower"), batch["image"]

    def seen(name: str) -> Tensor:
        x = image + 0.3 * sampled(f"siamese.{name}", step, *image.shape)
        h = F.relu(x @ own["up"] + own["b"]) @ own["down"]
        return F.batch_norm(h, None, None, training=True)

    c = seen("left").T @ seen("right") / len(image)
    same = c.diagonal()
    return (1 - same).square().sum() + 0.02 * (c.square().sum() - same.square().sum())


def gan(p: Parameters, batch: Batch, step: int) -> Tensor:
    """Both losses, each of which moves one of the players."""
    rows = len(batch["image"])
    maker, h = of(p, "gan.generator"), sampled("gan.z", step, rows, 16)
    h = F.relu(h @ maker["up"] + maker["b"])
    for i in range(2):
        h = F.relu(h @ maker[f"layer.{i}.w"] + maker[f"layer.{i}.b"])
    fake = torch.sigmoid(h @ maker["down"] + maker["shade"])

    def real(image: Tensor, call: int, judge: Parameters) -> Tensor:
        h = (torch.einsum("bp,phk->bhk", image, judge["w"]) + judge["b"]).amax(-1)
        kept = drawn.kept(0.2, SEED, step, f"gan.discriminator_{call}.dropout.keep", tuple(h.shape))
        return h * kept / 0.8 @ judge["out"]

    judge = of(p, "gan.discriminator")
    still = {name: value.detach() for name, value in judge.items()}
    taken = F.softplus(-real(fake, 2, still)).mean()
    return taken + F.softplus(real(fake.detach(), 2, judge)).mean() + F.softplus(-real(batch["image"], 3, judge)).mean()


# ---------------------------------------------------------------- gradients


def pinn(p: Parameters, batch: Batch, step: int) -> Tensor:
    x, along, edge = (sampled(f"pinn.{name}", step, 8, kind="uniform") for name in ("x", "along", "edge"))
    t, edge_t = (sampled(f"pinn.{name}", step, 8, kind="uniform", argument=0.5) + 0.5 for name in ("t_", "edge_t"))
    own = of(p, "pinn.u")

    def u(x: Tensor, t: Tensor) -> Tensor:
        h = torch.tanh(x[:, None] * own["wx"] + t[:, None] * own["wt"] + own["b"])
        for i in range(3):
            h = torch.tanh(h @ own[f"layer.{i}.w"] + own[f"layer.{i}.b"])
        return h @ own["out"]

    x, t = x.requires_grad_(), t.requires_grad_()
    inside = u(x, t)
    slope = gradient(inside, x)
    residual = gradient(inside, t) + inside * slope - 0.01 / pi * gradient(slope, x)
    start = u(along, torch.zeros_like(along)) + torch.sin(pi * along)
    return residual.square().mean() + start.square().mean() + u(edge.sign(), edge_t).square().mean()


def score(p: Parameters, batch: Batch, step: int) -> Tensor:
    own, image = of(p, "score"), batch["image"]
    v = sampled("score.v", step, *image.shape)
    x = (image + 0.3 * sampled("score.blur", step, *image.shape)).requires_grad_()
    h = x @ own["up"]
    for i in range(2):
        h = h + F.silu(h + own[f"layer.{i}.b"]) @ own[f"layer.{i}.w"]
    s = F.silu(h) @ own["down"]
    return (v * gradient(s * v, x)).sum(1).mean() + 0.5 * s.square().sum(1).mean()


def sam(p: Parameters, batch: Batch, step: int) -> Tensor:
    here = [p[f"sam.{name}"] for name in ("up", "b", "down")]

    def loss(up: Tensor, b: Tensor, down: Tensor) -> Tensor:
        return F.cross_entropy(F.relu(batch["image"] @ up + b) @ down, batch["label"])

    uphill = torch.autograd.grad(loss(*here), here)
    far = 0.05 / torch.sqrt(sum((each.square().sum() for each in uphill), torch.tensor(1e-12)))
    return loss(*(value + far * each for value, each in zip(here, uphill, strict=True)))


# ---------------------------------------------------------------- graphs, by how many edges lead to i from j


def edges(batch: Batch, nodes: int) -> Tensor:
    hot = [F.one_hot(batch[name], nodes).double() for name in ("target", "source")]
    return torch.einsum("bei,bej->bij", *hot)


def gat(p: Parameters, batch: Batch, step: int) -> Tensor:
    x = batch["x"]
    count = edges(batch, x.shape[1])
    # A node to which nothing points has the first class.
    label = (count @ x)[..., :4].argmax(-1)
    count = (count + torch.eye(x.shape[1]))[..., None]

    def attended(h: Tensor, own: Parameters) -> Tensor:
        v = torch.einsum("bnf,fhk->bnhk", h, own["w"])
        left, right = ((v * own[name]).sum(-1) for name in ("left", "right"))
        weight = count * torch.exp(F.leaky_relu(left[:, :, None] + right[:, None], 0.2))
        return F.elu(torch.einsum("bijh,bjhk->bihk", weight / weight.sum(2, keepdim=True), v).flatten(2))

    h = attended(x, of(p, "gat.attention"))
    for i in range(2):
        h = h + attended(h, of(p, f"gat.layer.{i}.attention"))
    return F.cross_entropy((h @ p["gat.head"]).flatten(0, 1), label.flatten())


def egnn(p: Parameters, batch: Batch, step: int) -> Tensor:
    x, charge = batch["x"], batch["charge"]
    count = edges(batch, x.shape[1])
    mean = count / count.sum(2, keepdim=True).clamp(min=1)
    apart = x[:, :, None] - x[:, None]
    force = charge[:, :, None] * charge[:, None] / (1 + apart.square().sum(-1)) ** 1.5
    after = x + 10 * torch.einsum("bij,bij,bijs->bis", mean, force, apart)
    h = charge[..., None] * p["egnn.enter"]
    for i in range(2):
        own = of(p, f"egnn.layer.{i}.convolution")
        apart = x[:, :, None] - x[:, None]
        m = (h @ own["left"])[:, :, None] + (h @ own["right"])[:, None]
        m = F.silu(F.silu(m + apart.square().sum(-1, keepdim=True) * own["far"] + own["b"]) @ own["message"])
        x = x + torch.einsum("bij,bij,bijs->bis", mean, m @ own["move"], apart)
        heard = torch.einsum("bij,bijw->biw", count, m) @ own["heard"]
        h = h + F.silu(h @ own["own"] + heard) @ own["down"]
    return F.mse_loss(x, after)


# ---------------------------------------------------------------- layers that are left out, layers that are kept


def stochastic_depth(p: Parameters, batch: Batch, step: int) -> Tensor:
    x = conv(batch["image"].view(-1, 1, 8, 8), p["stochastic_depth.enter"])
    for i in range(4):
        own = of(p, f"stochastic_depth.layer.{i}.change")
        h = conv(F.relu(group_norm(x, of(own, "activated"))), own["first"])
        h = conv(F.relu(group_norm(h, of(own, "activated_2"))), own["second"])
        rate = 0.5 * (i + 1) / 4
        kept = drawn.kept(rate, SEED, step, f"stochastic_depth.layer.{i}.stays.keep", (len(x),))
        x = x + kept[:, None, None, None] * h / (1 - rate)
    x = F.relu(group_norm(x, of(p, "stochastic_depth.activated")))
    return F.cross_entropy(torch.einsum("bchw,chwk->bk", x, p["stochastic_depth.head"]), batch["label"])


def unet_skips(p: Parameters, batch: Batch, step: int) -> Tensor:
    image = batch["image"]

    def residual(x: Tensor, path: str) -> Tensor:
        own = of(p, f"unet_skips.{path}residual")
        h = conv(F.silu(group_norm(x, of(own, "activated"))), own["first"])
        return x + conv(F.silu(group_norm(h, of(own, "activated_2"))), own["second"])

    noisy = image + 0.5 * sampled("unet_skips.blur", step, *image.shape)
    x = conv(noisy.view(-1, 1, 8, 8), p["unet_skips.enter"])
    skips = []
    for i in range(3):
        x = residual(x, f"down.{i}.")
        skips.append(x)
    x = residual(conv(x, p["unet_skips.halve"], stride=2), "")
    x = F.interpolate(x, scale_factor=2)
    for i in range(3):
        x = torch.einsum("bchw,cd->bdhw", torch.cat((x, skips.pop()), 1), p[f"unet_skips.up.{i}.fuse"])
        x = residual(x, f"up.{i}.")
    x = conv(F.silu(group_norm(x, of(p, "unet_skips.activated"))), p["unet_skips.leave"])
    return F.mse_loss(x.flatten(1), image)


LLAMA = ("seq=12", "embed=8", "key=8", "ffn=12", "vocab=16", "layers=2")
CASES = {
    "dpo": Case(dpo, "layer", "groups, ffn, vocab", LLAMA),
    "orpo": Case(orpo, "layer", "groups, ffn, vocab", LLAMA),
    "reward": Case(reward, "layer", "groups, ffn, vocab", LLAMA),
    "distill": Case(distill, "layer", "groups, ffn, vocab", LLAMA),
    "siamese": Case(siamese, "", "ffn", ("pixels=12", "ffn=10", "features=6")),
    "gan": Case(gan, "layer", "ffn, hidden", ("pixels=12", "ffn=10", "hidden=6")),
    "pinn": Case(pinn, "layer", "ffn", ("ffn=10",)),
    "score": Case(score, "layer", "ffn", ("pixels=6", "ffn=10")),
    "sam": Case(sam, "", "ffn", ("pixels=12", "ffn=10")),
    "gat": Case(gat, "layer", "heads", ("nodes=7", "edges=12", "features=6", "key=3")),
    "egnn": Case(egnn, "layer", "ffn", ("edges=12", "embed=6", "ffn=8", "inner=10", "layers=2")),
    "stochastic_depth": Case(stochastic_depth, "layer", "channels, groups", ("channels=8", "layers=4")),
    "unet_skips": Case(unet_skips, "down, up", "channels, groups", ("channels=8",)),
    "qwen2_vl": Case(qwen2_vl, "layer", "groups, ffn, vocab", ("embed=8", "ffn=12", "layers=2")),
}


LAYOUTS = ("whole", "cut", "zero")
# Of those that a neighbour's parts make up: `make test` compares them whole.
LIKE_OTHERS = ("orpo", "reward", "distill")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        each
        for case in product(CASES, LAYOUTS)
        for each in (soak(case) if case[0] in LIKE_OTHERS and case[1] != "whole" else [case])
    ],
)
def test_a_published_model_equals_torch(name: str, layout: str):
    run, rates = started(name, layout)
    for step, batch in enumerate(batches(run.plan.program, 2)[:2], 1):
        p = {path: value.clone().requires_grad_(trained(path)) for path, value in run.parameters().items()}
        loss = CASES[name].loss(p, batch, step)
        own = {path: value for path, value in p.items() if value.requires_grad}
        expected = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
        found, _ = run.step(step, batch, *rates)
        assert found == pytest.approx(loss.item(), rel=1e-9)
        gradients = run.gradients()
        assert gradients.keys() == own.keys()
        for path, d in zip(own, expected, strict=True):
            torch.testing.assert_close(gradients[path], d, rtol=1e-8, atol=1e-10)


def trained(path: str) -> bool:
    return "reference" not in path and "teacher" not in path


def started(name: str, layout: str) -> tuple[VirtualRun, list[float]]:
    """A file of the zoo at a small size, and a rate for each rule of its optimizer."""
    case = CASES[name]
    where = ALONE if layout == "whole" else (f"layout={layout}", "schedule=s")
    mesh = MESH.replace("STAGES", f"stage {case.stages} -> pipe").replace("SPLIT", case.split)
    if not case.stages:
        mesh = mesh.replace("pipe = 2, ", "").replace(", pipe", "").replace("stage  -> pipe", "")
        where = (*(each for each in where if "pipe" not in each), "s.microbatches=1")
    plain = ("train.eval=none", "train.clip=none", "train.precision=f64", f"train.seed={SEED}", "train.steps=2")
    optimizer = () if name in ("gan", "distill") else ("train.optimizer=sgd(lr = 0.1)",)
    path = SPECS / "zoo" / f"{name}.par"
    overrides = ("batch=8", *plain, *optimizer, *case.sizes, *where)
    spec, diagnostics = load_text(path.read_text() + mesh, path.name, overrides, path)
    assert spec is not None, [each.render() for each in diagnostics]
    assert spec.train is not None
    return VirtualRun(prepare(spec)), [0.01] * len(spec.train.optimizer.calls)


def test_players_of_a_gan_take_turns():
    run, rates = started("gan", "whole")
    moved = []
    for step, batch in enumerate(batches(run.plan.program, 2)[:2], 1):
        before = {path: value.clone() for path, value in run.parameters().items()}
        run.step(step, batch, *rates)
        moved.append({path.split(".")[1] for path, value in run.parameters().items() if (value != before[path]).any()})
    assert moved == [{"discriminator"}, {"generator"}]
