"""Files for the tests of layouts: the transformer of specs/gpt.par under any mesh and rules, and a small network."""

from __future__ import annotations

import re

from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from tests.files import SPECS, checked

GPT = (SPECS / "gpt.par").read_text(encoding="utf-8")

# Four microbatches of the batch of 64; two of its twelve layers, which are all alike.
LAYERS, MICROBATCHES = 2, 4

NETWORK = """axis batch = 8, width = 6, hidden = 12

model net(x: [batch, width], wanted: [batch, width]) {{
  param up: [width, hidden] ~ kaiming()
  param down: [hidden, width] ~ kaiming()
  let y = x
  repeat 2 as layer {{
    let h = relu(dot(y, up, over = width))
    let y = dot(h, down, over = hidden)
  }}
  loss mse(y, wanted)
}}

mesh cluster({mesh})

layout split on cluster {{
{rules}
}}

schedule plain = one_f_one_b(microbatches = {microbatches})

train {{
  data = random()
  optimizer = sgd(lr = 0.1)
  steps = 1
}}
"""


def transformer(mesh: str, *rules: str, memory: str = "80GiB", metric: str = "") -> Compilation:
    """specs/gpt.par on another mesh of devices with this much memory, under other rules, with a metric."""
    device = f"device(flops = 989TFLOP/s, memory = {memory}, bandwidth = 3.35TB/s)"
    text = _replaced(GPT, "mesh", f"mesh cluster({mesh}) {{ device = {device} }}")
    text = _replaced(text, "layout", f"layout megatron on cluster {{ {' '.join(rules)} }}")
    text = _replaced(text, "expect", "")
    text = re.sub(r"(?m)^schedule .*$", f"schedule fast = one_f_one_b(microbatches = {MICROBATCHES})", text)
    text = re.sub(r"(?m)^  checkpoint .*$", "", text).replace("repeat 12", f"repeat {LAYERS}")
    text = re.sub(r"(?m)^(  loss .*)$", rf"\1\n  {metric}", text)
    return compile_spec(checked(text, "gpt.par"))


def network(mesh: str, *rules: str, microbatches: int = 2, optimizer: str = "") -> Compilation:
    """A network of two layers. Raises Refused."""
    lines = "\n".join(f"  {rule}" for rule in rules)
    chosen = [f"train.optimizer={optimizer}"] if optimizer else []
    return compile_spec(checked(NETWORK.format(mesh=mesh, rules=lines, microbatches=microbatches), "net.par", chosen))


def _replaced(text: str, keyword: str, by: str) -> str:
    """The text with the declaration that begins with a keyword replaced."""
    found, count = re.subn(rf"(?ms)^{keyword} .*?^}}$", by, text)
    assert count == 1, keyword
    return found
