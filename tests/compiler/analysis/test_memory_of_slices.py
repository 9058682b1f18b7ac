"""What slices of the sequence need: the compiler's bound, beside torch's allocator, and beside whole microbatches."""

from __future__ import annotations

import pytest
import torch

from partita.compiler.analysis.memory import memory_report, peak_memory
from partita.compiler.pipeline import schedule_spec
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.compiler.analysis.test_memory import peak_of
from tests.files import checked
from tests.marks import soak

FILE = """
axis batch = 8, seq = 64, embed = 32, heads = 2, key = 16, ffn = 64
block attention(x: [batch, seq, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ normal(0.1)
  param wo: [heads, key, embed] ~ normal(0.1)
  let h = rms_norm(x, over = embed)
  let q = rope(dot(h, wq, over = embed), over = seq, pairs = key)
  let k = rope(dot(h, wk, over = embed), over = seq, pairs = key)
  let a = attend(q, k, dot(h, wv, over = embed), over = seq, along = key, causal = true)
  return x + dot(a, wo, over = [heads, key])
}
block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.1)
  param down: [ffn, embed] ~ normal(0.1)
  return x + dot(gelu(dot(rms_norm(x, over = embed), up, over = embed)), down, over = ffn)
}
model net(x: [batch, seq, embed]) {
  repeat 8 as layer { let x = mlp(attention(x)) }
  loss mean(x * x)
}
mesh m(pipe = RANKS)
layout split on m { stage layer -> pipe }
schedule s = SCHEDULE
train { model = net layout = split schedule = s data = random() optimizer = sgd(lr = 0.1) steps = 2 }
"""


@pytest.mark.parametrize(
    ("schedule", "seq"),
    [
        ("one_f_one_b(microbatches = 2, slices = 2)", 64),
        # Where queries of a slice see many keys, what says which of them is large.
        *soak(
            ("one_f_one_b(microbatches = 1, slices = 4)", 1024),
            ("gpipe(microbatches = 2, slices = 4)", 64),
            ("one_f_one_b(microbatches = 2, slices = 8)", 64),
            ("interleaved_1f1b(microbatches = 4, chunks = 2, slices = 2)", 64),
        ),
    ],
)
def test_the_bound_holds_and_is_near(schedule: str, seq: int) -> None:
    text = FILE.replace("RANKS", "1").replace("SCHEDULE", schedule).replace("seq = 64", f"seq = {seq}")
    plan = prepare(checked(text, "net.par"))
    runs = []

    def run() -> None:
        runs.append(VirtualRun(plan))
        for step in (1, 2):
            runs[0].step(step, {"x": torch.ones(8, seq, 32)}, 0.1)

    peak = peak_of(run)
    bound = peak_memory(plan.training, plan.program.ranks[0])
    assert 0.85 * bound <= peak <= bound, (bound, peak)
    stages = [stage for rank in runs[0].ranks for stage in rank.training.stages.values()]
    assert not any(stage.in_flight for stage in stages)


@pytest.mark.parametrize("slices", [2, *soak(4, 8)])
def test_memory_falls_as_the_paper_says(slices: int) -> None:
    """Of four ranks, the first keeps P+S−1 slices in place of P microbatches; keys and values it keeps of all positions
    of each microbatch of which it has any.
    """
    ranks = 4
    kept = {}
    for count in (1, slices):
        call = f"one_f_one_b(microbatches = 8, slices = {count})"
        state = schedule_spec(checked(FILE.replace("RANKS", str(ranks)).replace("SCHEDULE", call), "net.par"))
        stage = state.plan.stages[0]
        live, parts = ranks + count - 1, -(-(ranks + count - 1) // count)
        found = memory_report(state, state.plan.ranks[0]).activations
        keys, grown = stage.shared["F"], stage.shared["B"]
        # The last backward that holds all that is live adds its working set, and the gradients of keys and values.
        assert found <= live * stage.saved + (parts + 1) * keys + grown + stage.peaks["BW"]
        assert found >= live * stage.saved + (parts - 1) * keys
        kept[count] = live * (stage.saved + keys / count)
        whole = (stage.saved + keys / count) * count
    saved = kept[slices] / kept[1]
    assert saved == pytest.approx((ranks + slices - 1) / (ranks * slices), rel=0.02)
    assert whole == pytest.approx(kept[1] / ranks, rel=0.02)
