"""The text of a stage's last action: it reads no sum before all is added to it."""

from __future__ import annotations

import re

import pytest
from attrs import evolve

from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from tests.files import checked

# The last action of the second stage has three nodes: what it adds for `p` is exchanged, and what it adds for `q` is
# there. Nothing reduces either, so both gradients are copied to the host there.
FILE = """\
axis batch = 4, seq = 4, embed = 8
model m(x: [batch, seq, embed]) {
  param w: [seq, embed] ~ normal(0.3)
  let h = w
  repeat 2 as layer {
    param p, q: [seq, embed] ~ normal(0.3)
    let h = -(h + p + q)
  }
  loss mean(expand(h, batch) * x)
}
mesh four(pipe = 2, tensor = 2)
layout split on four {
  stage layer -> pipe
  shard seq -> tensor
  shard layer.p: embed -> tensor
  offload state
}
schedule s = SCHEDULE(microbatches = 2)
train { data = random()  optimizer = adamw(lr = 0.01)  compile = COMPILE  steps = 2 }
"""


def compiled(schedule: str = "zb_h1", compile: str = "true") -> Compilation:
    return compile_spec(checked(FILE.replace("SCHEDULE", schedule).replace("COMPILE", compile), "written.par"))


@pytest.mark.parametrize("compile", ["false", "true"])
def test_what_is_copied_is_added_up(compile: str) -> None:
    state = compiled(compile=compile)
    closing = state.program.source.partition("def stage1_closing")[2].partition("\ndef ")[0]
    assert closing.index("a[0].add_(") < closing.index("copy_out(a[0]")
    assert closing.index("a[1].add_(") < closing.index("copy_out(a[1]")
    assert validate(state).problems == ()


@pytest.mark.parametrize(("schedule", "stage"), [("zb_h1", 0), ("zb_h1", 1), ("gpipe", 1)])
def test_a_copy_of_what_is_not_added_up_is_refused(schedule: str, stage: int) -> None:
    """Whether the action adds to the sum itself, or calls a function that does, with results or none."""
    state = compiled(schedule)
    head, name, rest = state.program.source.partition(f"def stage{stage}_closing(p, f, a, c):\n")
    copy = re.search(r".*copy_out\(a\[0\].*\n", rest)[0]
    early = evolve(state.program, source=f"{head}{name}{copy}{rest.replace(copy, '', 1)}")
    (problem,) = validate(evolve(state, program=early)).problems
    assert f"stage {stage} reads the sum of" in problem.message
