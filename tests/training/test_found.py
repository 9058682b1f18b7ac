"""Programs that once failed, kept: each is cut, scheduled and recomputed, and equals the whole one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.training.test_partition import check

HEAD = """axis batch = 6, seq = 4, embed = 4, heads = 2, key = 2
"""
TAIL = """
mesh line(pipe = {ranks})
layout cut on line {{
  {rules}
}}
layout whole on line {{ }}
schedule s = {schedule}
train {{ model = m layout = cut schedule = s data = random() optimizer = sgd(lr = 0.05) steps = 2 precision = f64
  eval = every(1, batches = 1) }}
"""
WHOLE = ("line.pipe=1", "layout=whole", "schedule=gpipe(microbatches=1)")

# A parameter as the bias of attention: the gradient's node has four results, of which one is accumulated.
BIAS = """model m(x: [batch, seq, embed]) {
  param w: [embed, heads, key] ~ normal(0.5)
  param bias: [heads, seq] ~ normal(0.5)
  param o: [heads, key, embed] ~ normal(0.5)
  repeat 4 as layer {
    let q = dot(x, w, over = embed)
    let x = x + dot(attend(q, q, q, over = seq, along = key, bias = bias), o, over = [heads, key])
  }
  loss mean(x * x)
}"""

# A number carried through a repeat: the idiom of auxiliary losses.
CARRIED = """block layer_of(h: [batch, embed]) {
  param w: [embed] ~ uniform(1.0)
  let h = tanh(h * w) + h
  return h, mean(h * h)
}
model m(x: [batch, embed]) {
  let h = x
  let aux = 0.0
  repeat 4 as layer {
    let h, a = layer_of(h)
    let aux = aux + a
  }
  loss mean(h * h) + 0.1 * aux
}"""

# Literals where tensors are usual, and metrics of integers, of whole values, and of shared sums.
LITERALS = """model m(x: [batch, embed], n: i64[batch]) {
  param w: [embed] ~ uniform(1.0)
  param table: [seq, embed] ~ normal(0.5)
  let h = x
  repeat 4 as layer {
    let h = h * w + where(h > 0.0, 0.1, 0.2) + embedding(n, table, over = seq)
  }
  let err = mse(h, x)
  loss err
  metric rmse = sqrt(err)
  metric logarithm = log(err)
  metric longest = max(n)
  metric shortest = min(n)
  metric positions = sum(iota(seq))
  metric chosen = mean(where(x > -1000.0, 0.1, 0.2) * 1.0)
}"""

# A recomputed scope through which the pipeline is cut.
THROUGH = """block inner(x: [batch, embed]) {
  let x = tanh(x)
  repeat 4 as sub {
    param w: [embed] ~ uniform(1.0)
    let x = tanh(x * w) + exp(x * 0.1)
  }
  return x * 0.5
}
model m(x: [batch, embed]) {
  param v: [embed] ~ uniform(1.0)
  let h = inner(x * v)
  loss mean(h * h)
}"""

CASES = [
    (BIAS, 2, "stage layer -> pipe", "one_f_one_b(microbatches = 3)"),
    (CARRIED, 2, "stage layer -> pipe", "interleaved_1f1b(microbatches = 2, chunks = 2)"),
    (CARRIED, 4, "stage layer -> pipe\n  recompute layer_of", "one_f_one_b(microbatches = 6)"),
    (LITERALS, 2, "stage layer -> pipe", "gpipe(microbatches = 3)"),
    (THROUGH, 2, "stage sub -> pipe\n  recompute inner", "one_f_one_b(microbatches = 3)"),
    (THROUGH, 1, "stage sub -> pipe\n  recompute inner", "looped_bfs(microbatches = 3, chunks = 2)"),
    (THROUGH, 4, "stage sub -> pipe\n  recompute all", "one_f_one_b(microbatches = 3)"),
]


@pytest.mark.parametrize(("model", "ranks", "rules", "schedule"), CASES)
def test_equals_the_whole(model: str, ranks: int, rules: str, schedule: str, tmp_path):
    text = HEAD + model + TAIL.format(ranks=ranks, rules=rules, schedule=schedule)
    check(SimpleNamespace(text=text, single=WHOLE), 1, tmp_path)
