"""Explicit placement: an encoder and a decoder on stages of their own compute what one device computes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from partita.compiler.pipeline import compile_run
from tests.files import checked
from tests.training.test_partition import check

TEXT = """
axis batch = 8, source = 5, target = 4
axis embed = 4, heads = 2, key = 2, vocab = 6

block attention(q: [batch, target, embed], m: [batch, source, embed], keep: bool[batch, source]) {{
  param wq, wk, wv: [embed, heads, key] ~ normal(0.5)
  param wo: [heads, key, embed] ~ normal(0.5)
  let k = dot(m, wk, over = embed)
  let v = dot(m, wv, over = embed)
  let a = attend(dot(q, wq, over = embed), k, v, over = source, along = key, mask = keep)
  return dot(a, wo, over = [heads, key])
}}
block encoder(x: [batch, source, embed]) {{
  repeat 3 as deep {{
    param w: [embed] ~ uniform(1.0)
    let x = tanh(x * w) + x
  }}
  return x
}}
block decoder(y: [batch, target, embed], m: [batch, source, embed], keep: bool[batch, source]) {{
  repeat 2 as step {{
    let y = y + attention(y, m, keep)
  }}
  return y
}}
model translate(words: i64[batch, source], tokens: i64[batch, target], targets: i64[batch, target]) {{
  param table: [vocab, embed] ~ normal(0.5)
  param position: [target, embed] ~ normal(0.5)
  let keep = (words > 1)
  let m = encoder(embedding(words, table, over = vocab))
  let y = decoder(embedding(tokens, table, over = vocab) + position, m, keep)
  loss cross_entropy(dot(y, table, over = embed), targets, over = vocab, weights = cast(targets > 0, f32) + 0.5)
  metric accuracy = accuracy(dot(y, table, over = embed), targets, over = vocab)
}}
mesh line(pipe = {ranks})
layout cut on line {{
  {rules}
}}
layout whole on line {{ }}
schedule s = one_f_one_b(microbatches = 4)
train {{ model = translate layout = cut schedule = s data = random() optimizer = sgd(lr = 0.05) steps = 2
  precision = f64 eval = every(1, batches = 1) clip = 0.5 }}
"""

WHOLE = ("line.pipe=1", "layout=whole", "schedule=gpipe(microbatches=1)")

CASES = [
    (2, "place encoder -> pipe[0]\n  place decoder -> pipe[1]"),
    (3, "place encoder -> pipe[0..1]\n  place decoder -> pipe[2]"),
    (4, "place encoder -> pipe[0..2]\n  place decoder, position -> pipe[3]"),
    (4, "place encoder -> pipe[0..1]\n  place decoder -> pipe[2..3]\n  recompute attention"),
    (4, "stage deep, step -> pipe"),
    (5, "stage deep, step -> pipe [1, 1, 1, 1, 1]\n  recompute all"),
    (2, "stage step -> pipe\n  place encoder -> pipe[0]"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "rules"), CASES)
def test_place(ranks: int, rules: str, tmp_path):
    text = TEXT.format(ranks=ranks, rules=rules)
    check(SimpleNamespace(text=text, single=WHOLE), 3, tmp_path)


ZIGZAG = """
axis batch = 4, seq = 8, embed = 4, vocab = 12
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.5)
  param wpe: [seq, embed] ~ normal(0.5)
  let x = embedding(tokens, wte, over = vocab) + wpe
  repeat 8 as layer {
    param w: [embed] ~ ones()
    let x = x * w
  }
  loss cross_entropy(dot(x, wte, over = embed), targets, over = vocab)
}
mesh ranks(pipe = 3, tensor = 2)
layout l on ranks { shard seq -> tensor by zigzag stage layer -> pipe }
train { data = random() optimizer = sgd(lr = 0.1) steps = 3 eval = every(2, batches = 10) }
"""


def test_evaluation_has_the_stages_of_training_in_zigzag_order_too() -> None:
    """What the order adds to the graph costs as much in an evaluation of many batches as in a step."""
    training, evaluation = compile_run(checked(ZIGZAG, "zigzag.par"))
    assert evaluation is not None
    assert [each.parameters for each in evaluation.plan.stages] == [each.parameters for each in training.plan.stages]
