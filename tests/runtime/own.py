"""A model with an operation of its own, as files in a folder."""

from __future__ import annotations

from pathlib import Path

FORWARD = """\
import torch


def norm(x, w):
    rate = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * rate * w
"""

BACKWARD = """

def norm_backward(d, x, w):
    rate = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    y, g = x * rate, d * w
    return rate * (g - y * (g * y).mean(-1, keepdim=True)), (d * y).sum((0, 1))
"""

ENTRIES = """\
  forward = python("kernels.py", "norm")
  backward = python("kernels.py", "norm_backward")
  split = [batch, seq]
  linear = [w]
  flops = 4 * size(embed)
"""

FILE = """\
axis batch = 8, seq = 6, embed = 8, vocab = 12

op norm(x: [batch, seq, embed], w: [embed]) -> [batch, seq, embed] {
ENTRIES}

model lm(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [vocab, embed] ~ normal(1.0)
  param w: [embed] ~ normal(1.0)
  let x = embedding(tokens, table, over = vocab)
  repeat 2 as layer {
    param up: [embed, heads] ~ kaiming()
    let h = dot(norm(x, w), up, over = embed)
    let x = x + rename(h, heads -> embed)
  }
  loss cross_entropy(dot(NORM, table, over = embed), targets, over = vocab)
}

axis heads = embed

mesh m(data = 2, tensor = 2)

layout parts on m {
  shard batch -> data
  shard seq -> tensor
}

schedule fast = gpipe(microbatches = 2)

train {
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 3
  eval = every(2, batches = 2)
}
"""


def written(
    folder: Path,
    kernels: str = FORWARD + BACKWARD,
    entries: str = ENTRIES,
    norm: str = "norm(x, w)",
    file: str = FILE,
) -> Path:
    """The model's file, beside that of its operation."""
    folder.mkdir(exist_ok=True)
    (folder / "kernels.py").write_text(kernels)
    path = folder / "own.par"
    path.write_text(file.replace("ENTRIES", entries).replace("NORM", norm))
    return path
