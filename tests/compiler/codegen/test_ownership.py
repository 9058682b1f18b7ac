"""What nothing else has, a product may add to: what is kept, sent or read again stays as it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings

from partita.compiler.ops import dot
from partita.runtime.kernels import products
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked
from tests.programs import Program, programs

LAYERS = """\
axis batch = 4, embed = 4, ffn = 4
model net(x: [batch, embed]) {
  let x = x * 2
  repeat 3 as layer {
    param up: [embed, ffn] ~ normal(0.5)
    param down: [ffn, embed] ~ normal(0.5)
    let h = gelu(dot(rms_norm(x, over = embed), up, over = embed))
    let y = x + dot(h, down, over = ffn)
    let x = y + dot(gelu(dot(y, up, over = embed)), down, over = ffn)
  }
  loss mean(x * x)
}
mesh line(pipe = 1)
layout split on line { stage layer -> pipe }
schedule s = gpipe(microbatches = 2)
train { layout = split schedule = s data = random() optimizer = adamw(lr = 0.05) steps = 1 precision = f64 }
"""


def outcome(run: VirtualRun) -> list[torch.Tensor]:
    number, batch = 1, batches(run.plan.program, run.plan.train.seed)[0]
    found = list(map(torch.tensor, run.step(number, batch)))
    return [*found, *run.gradients().values(), *run.parameters().values()]


def same_in_place(text: str) -> str:
    """The source of a program that computes the same where products are added in place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dot, "LARGE", 0)
        plan = prepare(checked(text, "random.par"))
        expected = outcome(VirtualRun(plan))
        patch.setattr(products, "in_place", lambda other: True)
        for found, wanted in zip(outcome(VirtualRun(plan)), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    return plan.program.source


def test_a_layer_adds_to_what_it_alone_reads():
    source = same_in_place(LAYERS)
    assert "y = kernels.sum_matmul(x, " in source
    assert ".add_(x)" not in source
    assert ".add_(y)" in source  # which the gradient of `up` reads


@given(program=programs())
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_others_read_stays(program: Program):
    note(program.text)
    same_in_place(program.text)


FLAT = """\
axis batch = 6, embed = 4, ffn = 7
model net(x: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.5)
  param down: [ffn, embed] ~ normal(0.5)
  loss mean(dot(gelu(dot(x, up, over = embed)), down, over = ffn))
}
mesh ranks(data = 3)
layout split on ranks { shard batch -> data shard state -> data }
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""


def test_what_is_made_to_be_sent_ends_as_it_has_been_copied() -> None:
    """Flat gradients, each behind the node that adds to it last; the collective that sends them stands elsewhere."""
    lines = prepare(checked(FLAT, "flat.par")).program.source.splitlines()
    (i,) = (i for i, line in enumerate(lines) if "reduce_scatter(" in line)
    flat = [line.split()[0] for line in lines if "kernels.flatten(" in line]
    assert len(flat) == 2
    assert all(name in lines[i] for name in flat)
    assert lines[i + 1].split(None, 1) == ["del", ", ".join(flat)]
