"""Two of one name are one error, however they differ, and nothing in its wake."""

from __future__ import annotations

import pytest

from partita.dsl.load import load_text

FILE = """\
axis batch = 8, embed = 6, vocab = 16
block f(x: [batch, embed]) {
  param a: [embed] ~ ones()
  return x * a
}
model m(x: [batch, embed], ids: i64[batch]) {
  param w: [embed] ~ ones()
  let y = f(x)
  loss mean(y * w)
}
mesh k(data = 2, pipe = 1)
layout l on k {
  shard batch -> data
}
schedule s = gpipe(microbatches = 2)
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
expect { bubble <= 10% }
"""

CASES = [
    ("  param w", "  param w: [vocab] ~ ones()\n  param w", "E0217"),
    ("  param w: [embed] ~ ones()", "  param w: [embed] ~ ones()\n  param w: [vocab] ~ ones()", "E0217"),
    ("param w: [embed]", "param w, w: [embed]", "E0217"),
    ("  param w", "  sample w: [vocab] ~ normal(1.0)\n  param w", "E0217"),
    ("  param a", "  param a: [vocab] ~ ones()\n  param a", "E0217"),
    ("ids: i64", "x: i64", "E0217"),
    ("(x: [batch, embed], ids: i64[batch])", "(x: i64[batch], x: [batch, embed])", "E0217"),
    ("block f(x: [batch, embed])", "block f(x: [batch, embed], x: [vocab])", "E0217"),
    ("axis batch = 8", "axis batch = 8, batch = 7", "E0301"),
    ("axis batch = 8", "axis batch = 7, batch = 8", "E0301"),
    ("axis batch = 8", "axis vocab = 3, batch = 8", "E0301"),
    ("block f(", "block f(x: [vocab]) { param a: [vocab] ~ ones() return x * a }\nblock f(", "E0301"),
    ("model m(", "model m(x: [batch]) { param a: [embed] ~ ones() loss mean(x) + mean(a) }\nmodel m(", "E0301"),
    ("mesh k(", "mesh k(tensor = 2)\nmesh k(", "E0301"),
    ("mesh k(data = 2", "mesh k(data = 3, data = 2", "E0301"),
    ("layout l", "layout l on k { shard embed -> tensor }\nlayout l", "E0301"),
    ("schedule s", "schedule s = gpipe(microbatches = 3)\nschedule s", "E0301"),
    ("train {", "train { data = random() optimizer = sgd(lr = 0.1) steps = 2 }\ntrain {", "E0301"),
    ("let y = f(x)", "let y = f(x) metric e = mean(x) metric e = mean(y)", "E0222"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "code"), CASES)
def test_two_of_one_name(before: str, after: str, code: str) -> None:
    assert before in FILE
    found, diagnostics = load_text(FILE.replace(before, after, 1))
    assert found is None
    assert [each.code for each in diagnostics if each.severity == "error"] == [code], diagnostics


def test_a_let_may_be_bound_again() -> None:
    text = FILE.replace("let y = f(x)", "let y = f(x)  let y = y * 2  let y, z = pair(y)  let y = z")
    text = text.replace("model m", "block pair(x: [batch, embed]) {\n  return x, x\n}\nmodel m")
    assert load_text(text)[0] is not None


@pytest.mark.parametrize("name", ["step", "skipped", "bad", "rows", "rewound_to", "learning_rates", "slow_ranks"])
def test_a_metric_hides_nothing_that_is_recorded(name: str) -> None:
    text = f"axis n = 4 model m(x: [n]) {{ param w: [n] ~ ones() loss mean(x * w) metric {name} = max(x) }}"
    (diagnostic,) = load_text(f"{text} train {{ data = random() optimizer = sgd(lr = 0.1) steps = 1 }}", "m.par")[1]
    assert (diagnostic.code, diagnostic.help) == ("E0222", f"`metric my_{name} = …`")
