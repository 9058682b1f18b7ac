"""Programs that once failed, kept: each is cut, scheduled and recomputed, and equals the whole one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import partita
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


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "ranks", "rules", "schedule"), CASES)
def test_equals_the_whole(model: str, ranks: int, rules: str, schedule: str, tmp_path):
    text = HEAD + model + TAIL.format(ranks=ranks, rules=rules, schedule=schedule)
    check(SimpleNamespace(text=text, single=WHOLE), 1, tmp_path)


# ---------------------------------------------------------------- whole files, verified

TRAINED = "train {{ data = random() optimizer = {optimizer} steps = 2 precision = {precision} }}"

# Sums for a metric are in f32 in mixed precision, and with them what is computed of them at the end.
METRIC = """axis batch = 8, seq = 4
model m(x: [batch, seq]) {
  param w: [seq] ~ ones()
  let y = x * w
  loss mean(y * y)
  metric spread = sum(where(mean(y, over = batch) > 0.5, 2 * sqrt(mean(y * y, over = batch)) + w, w))
}
mesh ranks(data = 2)
layout split on ranks { shard seq -> data }
schedule s = gpipe(microbatches = 4)
"""

# A rule for a sparse table alone: `pod` splits what is looked up, but not the table.
TABLE = """axis batch = 4, tables = 2, rows = 8, embed = 4
model m(id: i64[batch, tables], click: [batch]) {
  param table: [tables, rows, embed] ~ uniform(0.5)
  param w: [tables, embed] ~ xavier()
  loss binary_cross_entropy(sum(embedding(id, table, over = rows) + w, over = [tables, embed]), click)
}
mesh ranks(pod = 2, data = 2)
layout split on ranks {
  shard batch, rows -> data
  shard SPLIT -> pod
  shard m.table: rows -> data
}
"""

# A flat gradient is added up before a later reader of the parameter gathers it: then neither is flat.
FLAT = """axis batch = 4, seq = 6, embed = 12, vocab = 5
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.5)
  let logits = dot(embedding(tokens, wte, over = vocab), wte, over = embed)
  loss cross_entropy(logits, targets, over = vocab) + 0.001 * sum(wte * wte)
}
mesh ranks(data = 2, expert = 2)
layout split on ranks {
  shard batch, embed -> data
  shard seq -> expert
  shard param -> expert
}
"""

# A parameter is gathered for what only the gradient of an activation needs, once a gradient of it has been added up.
LATER = """axis batch = 4, a = 4, b = 4
model m(x: [batch, a]) {
  param w: [a, b] ~ normal(1.0)
  param u: [a] ~ ones()
  let y = relu(dot(tanh(x * u), w, over = a))
  let z = relu(dot(x, w, over = a))
  loss mean(y) + mean(z)
}
mesh ranks(data = 2)
layout split on ranks { shard batch, a -> data }
"""
FILES = {
    "a_parameter_gathered_later": LATER + TRAINED.format(optimizer="sgd(lr = 0.1)", precision="f32"),
    "a_metric_of_sums_in_bf16": METRIC + TRAINED.format(optimizer="sgd(lr = 0.1)", precision="bf16"),
    "a_table_split_less_than_its_rows": TABLE.replace("SPLIT", "embed")
    + TRAINED.format(optimizer="adagrad(lr = 0.1)", precision="f32"),
    "tables_split_less_than_their_rows": TABLE.replace("SPLIT", "tables")
    + TRAINED.format(optimizer="adagrad(lr = 0.1)", precision="f32"),
    "a_flat_gradient_of_a_gathered_parameter": FLAT + TRAINED.format(optimizer="adamw(lr = 0.1)", precision="f32"),
}


@pytest.mark.parametrize("name", FILES)
def test_is_verified(name: str, tmp_path: Path):
    file = tmp_path / f"{name}.par"
    file.write_text(FILES[name])
    found = partita.verify(file)
    assert found.passed, found


# Masters that are whole along `data` are updated in parts, views of them; one call updates several, and the views are
# gathered.
VIEWS = """axis batch = 8, embed = 8, ffn = 4
model m(x: [batch, embed]) {
  repeat 2 as layer {
    param up, down: [embed, ffn] ~ xavier()
    let x = x + dot(dot(x, up, over = embed), down, over = ffn)
  }
  loss mean(x * x)
}
mesh ranks(data = 2, context = 2)
layout split on ranks {
  shard batch -> data
  shard param -> context
  shard grad -> data
}
"""


def test_views_that_one_call_updates_are_gathered(tmp_path: Path):
    file = tmp_path / "views.par"
    file.write_text(VIEWS + TRAINED.format(optimizer="adamw(lr = 0.01)", precision="f64"))
    split, whole = (partita.train(file, f"ranks.data={n}", f"ranks.context={n}") for n in (2, 1))
    assert [step["loss"] for step in split] == pytest.approx([step["loss"] for step in whole], rel=1e-12)
