"""Hypothesis strategies for whole `.par` files: random models with their meshes, layouts and schedules.

A model has repeats whose bodies draw on a repertoire of lines (products, attention, norms, dropout, skip connections
from before the repeat, a second carried value, tied parameters, parameters transformed outside), so that values cross
stages, and axes meet in one operation, in every way that the language allows. `programs` cuts it into stages;
`sharded_programs` also lays its tensors out over up to four mesh axes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from math import gcd, lcm, prod

from attrs import frozen
from hypothesis import strategies as st

from partita.compiler.schedules.generator import SCHEDULES as GENERATORS

BLOCKS = """
block attention(x: [batch, seq, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ kaiming()
  param wo: [heads, key, embed] ~ kaiming()
  let h = layer_norm(x, over = embed)
  let a = attend(dot(h, wq, over = embed), dot(h, wk, over = embed), dot(h, wv, over = embed),
                 over = seq, along = key, causal = true)
  return x + dot(a, wo, over = [heads, key])
}
block grouped(x: [batch, seq, embed], seen: bool[batch, seq]) {
  param wq: [embed, heads, key] ~ kaiming()
  param wk, wv: [embed, key] ~ kaiming()
  param wo: [heads, key, embed] ~ kaiming()
  param near: [seq, spot] ~ normal(0.5)
  let h = rms_norm(x, over = embed)
  let q = rope(dot(h, wq, over = embed), over = seq, pairs = key, base = 50)
  let k = rename(rope(dot(h, wk, over = embed), over = seq, pairs = key, base = 50), seq -> spot)
  let v = rename(dot(h, wv, over = embed), seq -> spot)
  let a = attend(q, k, v, over = spot, along = key, mask = rename(seen, seq -> spot), bias = near)
  return x + dot(a, wo, over = [heads, key])
}
block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ kaiming()
  param down: [ffn, embed] ~ kaiming()
  param scale: [embed] ~ ones()
  return x + dot(silu(dot(rms_norm(x, over = embed, scale = scale), up, over = embed)), down, over = ffn)
}
"""

# Lines of a repeat's body. `x` is carried; `y` too; `skip`, `w`, `u`, `wte` come from outside.
LINES = (
    "let x = mlp(x)",
    "let x = attention(x)",
    "let x = x + skip * 0.5",
    "let x = x + dot(tanh(dot(x, w, over = embed)), w, over = ffn)",
    "let x = dropout(x, rate = 0.25)",
    "param b: [embed] ~ uniform(1.0)  let x = x * b",
    "let y = y * 0.5 + x",
    "let x = x + y * 0.25",
    "let x = x + u",
    "repeat 2 as inner { param g: [embed] ~ ones()  let x = rms_norm(x, over = embed, scale = g) }",
    "let x = maximum(x, y) + where(x > 0.0, y, 1.0)",
    "let x = softmax(x, over = embed) + log_softmax(y, over = embed)",
    "let x = x + embedding(tokens, wte, over = vocab)",
    "let m = cast(tokens > 1, f32)  let x = x * (expand(m, embed) + 0.5)",
    "let aux = aux + mean(x * x)",
    "sample eps: [batch, embed] ~ normal(0.5)  let x = x + eps",
    "let x = x * (cast(iota(batch), f32) * 0.01 + 1.0)",
    "let x = rope(x, over = seq, pairs = embed, base = 100)",
    "let x = merge(split(x, embed -> [heads, key]) * 0.9, [heads, key] -> embed)",
    "let x = concat(slice(x, seq -> left, start = 0) * 0.5, slice(x, seq -> right, start = size(left)), "
    "[left, right] -> seq)",
    "let x = x + stop_gradient(layer_norm(x, over = [seq, embed]))",
    "let h = rms_norm(x, over = embed)  let s = softmax(dot(h, rename(h, seq -> spot), over = embed), over = spot)  "
    "let x = x + dot(s, rename(h, seq -> spot), over = spot)",
    "let x = x - max(x, over = embed) * 0.1 + min(x, over = seq) * 0.1",
    "let x = grouped(x, tokens > 0)",
)

# Sizes where nothing is split over ranks.
SIZES = {"seq": 4, "left": 1, "right": 3, "embed": 4, "heads": 2, "key": 2, "ffn": 6, "vocab": 5}

# Schedules with what else they may be given; those of a fixed number of chunks.
SCHEDULES = {
    "gpipe": {},
    "one_f_one_b": {},
    "interleaved_1f1b": {"chunks": (1, 2, 3)},
    "looped_bfs": {"chunks": (1, 2, 3)},
    "zb_h1": {},
    "zb_h2": {},
    "zb_v": {},
    "v_half": {},
    "v_min": {},
    "dualpipe_v": {},
    "interlaced": {},
    "auto": {"chunks": (1, 2)},
    "policy": {
        "chunks": (1, 2),
        "prefer": ("backward", "forward"),
        "split_backward": ("false", "true"),
        "placement": ("loop", "v"),
    },
}


@frozen
class Program:
    """A file's text, and the overrides that make it a single-device program."""

    text: str
    single: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@frozen
class Pipeline:
    """A schedule as it is written, with its number of stages and of microbatches."""

    text: str
    ranks: int
    stages: int
    microbatches: int


@st.composite
def pipelines(draw: st.DrawFn, ranks: int, most: int = 6):
    """A random schedule of up to `most` microbatches."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    microbatches = draw(st.integers(1, most))
    own = {key: draw(st.sampled_from(values)) for key, values in SCHEDULES[name].items()}
    text = ", ".join(f"{key} = {value}" for key, value in {"microbatches": microbatches, **own}.items())
    chunks = GENERATORS[name].chunks or own.get("chunks", 1)
    return Pipeline(f"{name}({text})", ranks, ranks * chunks, microbatches)


@st.composite
def models(draw: st.DrawFn, stages: int, most: int = 3):
    """A random model with at least as many iterations as stages; of up to two repeats, of `most` turns otherwise."""
    repeats = draw(st.integers(1, 2))
    iterations = [draw(st.integers(1, most)) for _ in range(repeats)]
    iterations[0] += max(0, stages - sum(iterations))
    text = BLOCKS + "model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {\n"
    text += "  param wte: [vocab, embed] ~ kaiming()\n"
    lines = [draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=4, unique=True)) for _ in iterations]
    used = " ".join(" ".join(each) for each in lines)
    text += "  let x = embedding(tokens, wte, over = vocab)\n  let skip = tanh(x)\n  let y = x * 0.5\n"
    text += "  let aux = mean(x)\n"
    if "dot(x, w," in used:
        text += "  param w: [embed, ffn] ~ kaiming()\n"
    if "+ u" in used:
        text += "  param v: [seq, embed] ~ normal(0.5)\n  let u = exp(v) * 0.1\n"
    for count, body in zip(iterations, lines, strict=True):
        text += f"  repeat {count} as layer {{\n"
        for line in body:
            text += f"    {line}\n"
        text += "  }\n"
    last = draw(st.sampled_from(["x + y", "rms_norm(x, over = embed) + y"]))
    text += f"  let logits = dot({last}, wte, over = embed)\n"
    loss = draw(
        st.sampled_from(
            [
                "cross_entropy(logits, targets, over = vocab)",
                "cross_entropy(logits, targets, over = vocab) + 0.1 * aux",
                "cross_entropy(logits, targets, over = vocab, weights = cast(targets > 0, f32) + 0.25)",
                "mean(tanh(token_nll(logits, targets, over = vocab, ignore = 2)))",
                "0.5 * mse(logits, dot(x, wte, over = embed) * 0.5) + 0.01 * sum(wte * wte)",
            ]
        )
    )
    text += f"  loss {loss}\n"
    if draw(st.booleans()) or loss.startswith("0.5"):
        text += "  metric accuracy = accuracy(logits, targets, over = vocab)\n"
        text += "  metric size = sqrt(mean(logits * logits))\n"
    return text + "}\n"


@st.composite
def recomputations(draw: st.DrawFn, model: str):
    """A `recompute` rule for a model's text, an `offload` rule, both, or none."""
    rule = draw(st.sampled_from(["", "", "recompute mlp", "recompute layer", "recompute all"]))
    of_blocks = ["offload mlp", "offload layer", "offload all", "offload layer, state", "offload layer, param"]
    copied = draw(st.sampled_from(["", "", *of_blocks, "offload param"]))
    without = "= mlp(" not in model
    return " ".join(each for each in (rule, copied) if not (without and "mlp" in each))


@st.composite
def endings(draw: st.DrawFn):
    """The optimizer and the clipping of a train block."""
    optimizer = draw(
        st.sampled_from(
            [
                "adamw(lr = 0.01, weight_decay = 0.1)",
                "sgd(lr = 0.05, momentum = 0.9, nesterov = true, weight_decay = 0.1, decay = all)",
                "sgd(lr = 0.05)",
            ]
        )
    )
    clip = draw(st.sampled_from(["", "clip = 0.5"]))
    return (
        f"train {{ model = m layout = cut schedule = s data = random() optimizer = {optimizer} {clip}\n"
        "  steps = 2 seed = 3 precision = f64 eval = every(1, batches = 1) }\n"
    )


def axes(sizes: dict[str, int]) -> str:
    """Axis declarations."""
    return "axis " + ", ".join(f"{name} = {size}" for name, size in sizes.items()) + "\n"


@st.composite
def programs(draw: st.DrawFn):
    """A random program, with at least as many iterations as stages."""
    pipeline = draw(pipelines(draw(st.integers(1, 4))))
    batch = pipeline.microbatches * draw(st.integers(1, 2))
    model = draw(models(pipeline.stages))
    text = axes({"batch": batch, **SIZES, "spot": SIZES["seq"]}) + model
    text += f"mesh line(pipe = {pipeline.ranks})\nlayout cut on line {{\n  stage layer -> pipe\n"
    text += f"  {draw(recomputations(model))}\n}}\nlayout whole on line {{ }}\n"
    text += f"schedule s = {pipeline.text}\n" + draw(endings())
    return Program(text, ("line.pipe=1", "layout=whole", "schedule=gpipe(microbatches=1)"))


# ---------------------------------------------------------------- layouts

SHARDED = ("batch", "seq", "spot", "left", "right", "embed", "heads", "key", "ffn", "vocab")
MOST_RANKS = 32
AXES_RULE = re.compile(r"shard (?!param|grad|state).*")


@st.composite
def layouts(draw: st.DrawFn, mesh: dict[str, int], model: str):
    """Shard rules for the axes of a mesh, in random order; each axis of the mesh stands in one of them at least."""
    rules = []
    usual = {
        "data": ["shard batch -> data"],
        "tensor": ["shard heads, ffn, vocab -> tensor", "shard seq -> tensor"],
        "context": ["shard seq -> context"],
    }
    for name in mesh:
        if draw(st.booleans()):
            rules += usual[name][: draw(st.integers(1, 2))]
        else:
            targets = draw(st.lists(st.sampled_from(SHARDED), min_size=1, max_size=3, unique=True))
            rules.append(f"shard {', '.join(targets)} -> {name}")
    names = list(mesh)
    several = st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True).map(", ".join)
    if draw(st.booleans()):
        targets = draw(st.lists(st.sampled_from(SHARDED), min_size=1, max_size=2, unique=True))
        rules.append(f"shard {', '.join(targets)} -> {draw(several)}")
    if draw(st.integers(0, 3)) == 0:
        there = [("wte", "embed"), ("wte", "vocab")]
        there += [("mlp.up", "embed"), ("down", "ffn")] if "= mlp(" in model else []
        there += [("attention.wq", "key"), ("wo", "embed")] if "= attention(" in model else []
        tensor, axis = draw(st.sampled_from(there))
        rules.append(f"shard {tensor}: {axis} -> {draw(several)}")
    rules = draw(st.permutations(rules))
    if draw(st.booleans()):
        rules.append(f"shard {draw(st.sampled_from(['param', 'grad', 'state']))} -> {draw(several)}")
    if draw(st.booleans()):
        rules.append(f"overlap {draw(several)} in {draw(st.integers(2, 4))}")
    return rules


def divisors(mesh: dict[str, int], rules: Iterable[str]) -> dict[str, int]:
    """What each axis must divide by: the mesh axes of all rules that name it."""
    found: dict[str, set[str]] = {}
    for rule in rules:
        if rule.startswith("overlap"):
            continue
        targets, _, over = rule.removeprefix("shard ").partition(" -> ")
        for target in targets.split(", "):
            found.setdefault(target.rpartition(": ")[2], set()).update(over.split(", "))
    return {name: prod(mesh[axis] for axis in over) for name, over in found.items() if name in SHARDED}


def sizes_for(parts: dict[str, int], microbatches: int, scale: int = 1) -> dict[str, int]:
    """Small sizes that divide, and go together as the lines of models need them; all but two `scale` times as large."""

    def of(name: str) -> int:
        return parts.get(name, 1)

    left = scale * lcm(of("left"), of("right"), of("seq"), of("spot"))
    right = left * (1 if left > 2 else 2)
    heads, key = of("heads") * (1 if of("heads") > 1 else 2), lcm(of("key"), 2)
    key *= scale * of("embed") // gcd(heads * key, of("embed"))
    sizes = {"seq": left + right, "spot": left + right, "left": left, "right": right}
    sizes |= {"heads": heads, "key": key, "embed": heads * key}
    for name, least in (("ffn", 6), ("vocab", 5)):
        sizes[name] = scale * of(name) * -(-least // of(name))
    return {"batch": microbatches * of("batch"), **sizes}


@st.composite
def meshes(draw: st.DrawFn, most: int = MOST_RANKS):
    """A mesh in random order of its axes: one to three that tensors are split over, and a pipeline or none."""
    splitting = draw(st.lists(st.sampled_from(("data", "tensor", "context")), min_size=1, max_size=3, unique=True))
    names = draw(st.permutations([*splitting, *draw(st.sampled_from(([], ["pipe"])))]))
    names = names[: most.bit_length() - 1]
    if names == ["pipe"]:
        names = splitting[:1]
    sizes = [sizes for sizes in product((2, 3, 4), repeat=len(names)) if prod(sizes) <= most]
    return dict(zip(names, draw(st.sampled_from(sizes)), strict=True))


@st.composite
def sharded_programs(draw: st.DrawFn, most: int = MOST_RANKS, scale: int = 1):
    """A random program on a mesh of up to four axes and 32 ranks, its tensors laid out by random rules."""
    mesh = draw(meshes(most))
    pipeline = draw(pipelines(mesh.get("pipe", 1), most=4))
    model = draw(models(pipeline.stages, most=2))
    rules = draw(layouts({name: size for name, size in mesh.items() if name != "pipe"}, model))
    sizes = sizes_for(divisors(mesh, rules), pipeline.microbatches, scale)
    if draw(st.integers(0, 3)) == 0:
        # Any sizes: what does not divide is padded.
        sizes = sizes_for({"heads": draw(st.integers(1, 3))}, pipeline.microbatches, scale)
        if any(rule.startswith("shard batch") for rule in rules):
            sizes["batch"] = draw(st.integers(1, 2 * pipeline.microbatches + 1))
        rules = [AXES_RULE.sub(r"\g<0> padded", rule) for rule in rules]
    text = axes(sizes) + model
    mesh.setdefault("pipe", 1)
    text += f"mesh cluster({', '.join(f'{name} = {size}' for name, size in mesh.items())})\nlayout cut on cluster {{\n"
    for rule in (*rules, "stage layer -> pipe", draw(recomputations(model))):
        text += f"  {rule}\n"
    text += f"}}\nlayout whole on cluster {{ }}\nschedule s = {pipeline.text}\n" + draw(endings())
    ones = tuple(f"cluster.{name}=1" for name in mesh)
    return Program(text, (*ones, "layout=whole", "schedule=gpipe(microbatches=1)"))
