"""What is emitted: alike iterations and stages share functions, so that the source does not grow with depth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from partita.compiler.pipeline import compile_spec
from partita.dsl.load import load
from partita.runtime.data.binding import open_data
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import SPECS, checked


def source(*overrides: str) -> str:
    spec, diagnostics = load(SPECS / "tiny.par", overrides)
    assert spec is not None, "\n\n".join(d.render() for d in diagnostics)
    return compile_spec(spec).program.source


def functions(text: str) -> list[str]:
    return re.findall(r"(?m)^def (\w+)", text)


def test_stages_share_their_functions():
    """Four stages: the first embeds, the last has the head, those between are one."""
    names = functions(source())
    assert [name for name in names if name.endswith("_forward") and name.startswith("stage")] == [
        "stage0_forward",
        "stage1_forward",
        "stage3_forward",
    ]
    # The first layer of a stage may add nothing to what was sent, which is not its own; the others are one.
    assert sum(name.startswith("layer_forward") for name in names) <= 2
    # The first turn's input needs no cotangent's sum with anything else; its backward is the others'.
    assert sum(name.startswith("layer_backward") for name in names) <= 2


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_source_lines_are_one_an_operation(schedule: str):
    text = source("laptop.pipe=1", f"schedule={schedule}")
    body = text[text.index("def layer_forward") :].split("\n\n")[0]
    for line in body.splitlines()[1:]:
        operation, view = r"\w+(, \w+)* = .*# .*tiny\.par:\d+", r"\w+_matrix = \w+(\.reshape\(.*\)|\.t\(\))+"
        assert re.match(rf"    ({operation}|{view}|del .*|return .*)$", line), line


HOSTILE = """axis batch = 4, embed = 3
block body(x: [batch, embed]) {
  param torch, kernels, q: [embed] ~ ones()
  let q_2 = x * q
  let q = q_2 + 1.0
  let layer_forward = q * torch
  let layer_weight_2 = layer_forward * kernels
  let lambda = tanh(layer_weight_2)
  let del = lambda + q_2
  let f = del * 0.5
  let p = f + q
  let c = p + x
  return c
}
model a(x: [batch, embed]) {
  repeat 4 as layer { let x = body(x) }
  loss mean(x * x)
}
mesh line(pipe = 2)
layout cut on line { stage layer -> pipe }
schedule s = one_f_one_b(microbatches = 2)
train { model = a layout = cut schedule = s data = random() optimizer = sgd(lr = 0.1) steps = 1 precision = f64 }
"""


@pytest.mark.few(3)
@pytest.mark.parametrize("repeat", ["layer", "stage0", "stage1", "rank0", "kernels"])
def test_hostile_names_shadow_nothing(repeat: str, tmp_path: Path):
    """Names of a file that are Python's, torch's, or those of emitted functions and arguments stay names of values."""
    name = "x\nimport os; os._exit(7)  #.par"
    spec = checked(HOSTILE.replace("as layer", f"as {repeat}").replace("stage layer", f"stage {repeat}"), name)
    plan = prepare(spec)
    for line in plan.program.source.splitlines():
        assert not line.startswith("import os"), line
    run = VirtualRun(plan)
    batch = run.ranks[0].tensors(open_data(plan.program, plan.train, tmp_path).batch(1))
    loss, _ = run.step(1, batch)
    x = batch["x"]
    for _ in range(4):
        q_2 = x
        q = q_2 + 1
        x = (q.tanh() + q_2) * 0.5 + q + x
    assert loss == pytest.approx(float((x * x).mean()), rel=1e-12)
