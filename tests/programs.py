"""Hypothesis strategies for whole `.par` files: random models with their meshes, layouts and schedules.

A model has repeats whose bodies draw on a repertoire of lines (products, attention, norms, dropout, skip connections
from before the repeat, a second carried value, tied parameters, parameters transformed outside), so that values cross
stages in every way that the language allows.
"""

from __future__ import annotations

from attrs import frozen
from hypothesis import strategies as st

AXES = """axis batch = {batch}, seq = 4, spot = 4, left = 1, right = 3
axis embed = 4, heads = 2, key = 2, ffn = 6, vocab = 5
"""

BLOCKS = """
block attention(x: [batch, seq, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ normal(0.5)
  param wo: [heads, key, embed] ~ normal(0.5)
  let h = layer_norm(x, over = embed)
  let a = attend(dot(h, wq, over = embed), dot(h, wk, over = embed), dot(h, wv, over = embed),
                 over = seq, along = key, causal = true)
  return x + dot(a, wo, over = [heads, key])
}
block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.5)
  param down: [ffn, embed] ~ normal(0.5)
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
    "let x = concat(slice(x, seq -> left, start = 0) * 0.5, slice(x, seq -> right, start = 1), [left, right] -> seq)",
    "let x = x + stop_gradient(layer_norm(x, over = [seq, embed]))",
    "let s = softmax(dot(x, rename(x, seq -> spot), over = embed), over = spot)  "
    "let x = x + dot(s, rename(x, seq -> spot), over = spot)",
    "let x = x - max(x, over = embed) * 0.1 + min(x, over = seq) * 0.1",
)

CHUNKED = ("interleaved_1f1b", "looped_bfs")


@frozen
class Program:
    """A file's text, and the overrides that make it a single-device program."""

    text: str
    single: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@st.composite
def programs(draw: st.DrawFn, schedules: tuple[str, ...] = ("gpipe", "one_f_one_b", "interleaved_1f1b", "looped_bfs")):
    """A random program, with at least as many turns as stages."""
    schedule = draw(st.sampled_from(schedules))
    ranks = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if schedule in CHUNKED else 1
    microbatches = draw(st.integers(1, 6))
    stages = ranks * chunks
    repeats = draw(st.integers(1, 2))
    turns = [draw(st.integers(1, 3)) for _ in range(repeats)]
    turns[0] += max(0, stages - sum(turns))
    text = AXES.format(batch=microbatches * draw(st.integers(1, 2))) + BLOCKS
    text += "model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {\n"
    text += "  param wte: [vocab, embed] ~ normal(0.5)\n"
    lines = [draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=4, unique=True)) for _ in turns]
    used = " ".join(" ".join(each) for each in lines)
    text += "  let x = embedding(tokens, wte, over = vocab)\n  let skip = tanh(x)\n  let y = x * 0.5\n"
    text += "  let aux = mean(x)\n"
    if "dot(x, w," in used:
        text += "  param w: [embed, ffn] ~ normal(0.5)\n"
    if "+ u" in used:
        text += "  param v: [seq, embed] ~ normal(0.5)\n  let u = exp(v) * 0.1\n"
    for count, body in zip(turns, lines, strict=True):
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
                "0.5 * mse(logits, dot(x, wte, over = embed) * 0.5) + 0.01 * sum(wte * wte)",
            ]
        )
    )
    text += f"  loss {loss}\n"
    if draw(st.booleans()) or loss.startswith("0.5"):
        text += "  metric accuracy = accuracy(logits, targets, over = vocab)\n"
        text += "  metric size = sqrt(mean(logits * logits))\n"
    text += "}\n"
    text += f"mesh line(pipe = {ranks})\nlayout cut on line {{\n  stage layer -> pipe\n"
    recompute = draw(st.sampled_from(["", "", "recompute mlp", "recompute layer", "recompute all"]))
    if recompute == "recompute mlp" and "mlp(" not in used:
        recompute = ""
    text += f"  {recompute}\n}}\nlayout whole on line {{ }}\n"
    arguments = f"microbatches = {microbatches}" + (f", chunks = {chunks}" if schedule in CHUNKED else "")
    text += f"schedule s = {schedule}({arguments})\n"
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
    text += (
        f"train {{ model = m layout = cut schedule = s data = random() optimizer = {optimizer} {clip}\n"
        "  steps = 2 seed = 3 precision = f64 eval = every(1, batches = 1) }\n"
    )
    return Program(text, ("line.pipe=1", "layout=whole", "schedule=gpipe(microbatches=1)"))
