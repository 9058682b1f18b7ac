"""One of two ranks on Gloo: trains a small model in every way that changes what is held for gradients and averages, and
prints the bound and the peak of live tensors of each of the cases that its arguments name, as one JSON line; of an
argument that ends with `.json`, those of the programs in that file.
"""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from measure import joined
from memory import held

from partita.dsl.load import load_text
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.transports.process import ProcessTransport

MODEL = """
axis batch = 16, embed = 64, ffn = 256
block mlp(x: [batch, embed]) {
  param scale, shift: [embed] ~ ones()
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  let h = layer_norm(x, over = embed, scale = scale, shift = shift)
  return x + dot(gelu(dot(h, up, over = embed)), down, over = ffn)
}
model net(x: [batch, embed]) {
  repeat 3 as layer { let x = mlp(x) }
  loss mean(x * x)
}
model centered(x: [batch, embed]) {
  let x = mlp(x - mean(x, over = batch))
  loss mean(x * x)
}
optimizer norms { update scale, shift -> adamw(lr = 1e-3)  freeze all }
mesh two(split = 2)
layout chosen on two { RULES }
schedule s = one_f_one_b(microbatches = 2)
train { model = net layout = chosen schedule = s data = random() optimizer = OPTIMIZER steps = 5 MORE }
"""
ADAMW = "adamw(lr = 1e-3)"
EVEN = "batch = 16, embed = 64, ffn = 256"
ROWS = "shard batch -> split"
UNEVEN = "batch = 16, embed = 63, ffn = 255"  # two ranks store them as padded flat buffers
# Rules of the layout, the optimizer, settings, and if they are others, sizes and overrides.
CASES = {
    "copied": (ROWS, ADAMW, ""),
    "sgd": (ROWS, "sgd(lr = 0.1)", ""),
    "zero1": (f"{ROWS} shard state -> split", ADAMW, ""),
    "zero2": (f"{ROWS} shard state -> split shard grad -> split", ADAMW, ""),
    "zero3": (f"{ROWS} shard param -> split", ADAMW, ""),
    "zero1, flat": (f"{ROWS} shard state -> split", ADAMW, "", UNEVEN),
    "zero3, flat": (f"{ROWS} shard param -> split", ADAMW, "", UNEVEN),
    "tensor": ("shard ffn -> split", ADAMW, ""),
    "groups": (ROWS, ADAMW, "sync = local(groups = 2, every = 2)"),
    "groups of one rank": (ROWS, ADAMW, "sync = local(groups = 4, every = 2)"),
    "delayed": (ROWS, ADAMW, "sync = delayed(1)"),
    "delayed by two, zero1": (f"{ROWS} shard state -> split", ADAMW, "sync = delayed(2)"),
    "paired": (ROWS, ADAMW, "sync = paired()"),
    "paired, zero1": (f"{ROWS} shard state -> split", ADAMW, "sync = paired()"),
    "eight bits": (ROWS, "adamw_8bit(lr = 1e-3)", ""),
    "frozen, in bf16": (f"{ROWS} shard state -> split", "norms", "precision = bf16"),
    "frozen, zero3, in bf16": (f"{ROWS} shard param -> split", "norms", "precision = bf16"),
    "evaluated": (ROWS, ADAMW, "eval = every(2, batches = 3)"),
    "groups of one rank, evaluated together": (
        ROWS,
        "sgd(lr = 0.1)",
        "sync = local(groups = 8, every = 2)  eval = every(2, batches = 3)",
        "batch = 256, embed = 32, ffn = 8",
    ),
    "evaluated at once": (  # of all batches, the mean
        ROWS,
        ADAMW,
        "eval = every(2, batches = 32)",
        "batch = 512, embed = 32, ffn = 64",
        "train.model=centered",
    ),
    "validated after": (ROWS, ADAMW, "validate = after(calm = 0)"),
    "offloaded": (
        f"{ROWS} offload all",
        ADAMW,
        "",
        "batch = 512, embed = 32, ffn = 64",
        "schedule=gpipe(microbatches=4)",
    ),
    "offloaded state": (f"{ROWS} offload state", ADAMW, ""),
    "offloaded parameters, in bf16": (f"{ROWS} offload param", ADAMW, "precision = bf16"),
}


def random(text: str) -> CompiledRun:
    spec, _ = load_text(text, "net.par", ("train.steps=3",))
    assert spec is not None, text
    return prepare(spec)


def planned(rules: str, optimizer: str, more: str, sizes: str = EVEN, *overrides: str) -> CompiledRun:
    text = MODEL.replace(EVEN, sizes).replace("RULES", rules).replace("OPTIMIZER", optimizer).replace("MORE", more)
    spec, diagnostics = load_text(text, "net.par", overrides)
    assert spec is not None, [each.render() for each in diagnostics]
    return prepare(spec)


def main() -> None:
    joined()
    device = torch.device("cpu")
    plans = {name: planned(*CASES[name]) for name in sys.argv[1:] if name in CASES}
    for file in map(Path, sys.argv[1:]):
        if file.suffix == ".json":
            plans.update((f"program {i}", random(text)) for i, text in enumerate(json.loads(file.read_text())))
    found = {}
    for name, plan in plans.items():
        transport = ProcessTransport(device)
        found[name] = held(plan, Path(), transport)
    os.write(1, (json.dumps(found) + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    main()
