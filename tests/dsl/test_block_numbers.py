"""Blocks that take numbers: each call is checked with its own."""

from __future__ import annotations

import pytest

from partita.dsl import spec
from partita.dsl.load import load_text

FILE = """axis batch = 4, seq = 16, embed = 8, key = 4
const near = 3
block scaled(x: [batch, seq, embed], by: number, rate: number) {
  param w: [embed] ~ ones()
  return dropout(x * w * by, rate)
}
block attention(x: [batch, seq, embed], window: number) {
  param wq, wk, wv: [embed, key] ~ kaiming()
  let a = attend(dot(x, wq, over = embed), dot(x, wk, over = embed), dot(x, wv, over = embed),
                 over = seq, along = key, causal = true, window = window)
  repeat window as more { let x = x * 0.9 }
  return scaled(x + expand(mean(a, over = key), embed), 1 / window, rate = 0.1)
}
model m(x: [batch, seq, embed], y: [batch, seq, embed]) {
  let x = attention(x, window = near)
  let x = attention(x, 2 * near + size(key))
  loss mse(x, y)
}
"""


def test_each_call_has_its_own_numbers():
    found, diagnostics = load_text(FILE, "m.par")
    assert found is not None, diagnostics
    assert not diagnostics
    assert found.model is not None
    steps = list(spec.steps(found.model.body))
    windows = {each.options["window"] for each in spec.applications(found.model.body) if each.function == "attend"}
    assert windows == {3, 10}
    assert {each.count for each in steps if isinstance(each, spec.Repeat)} == {3, 10}
    factors = {
        each.operands[1].value
        for each in spec.applications(found.model.body)
        if each.function == "multiply" and isinstance(each.operands[1], spec.Literal)
    }
    assert factors == {0.9, 1 / 3, 0.1}
    scopes = [each.scope for each in found.model.body.steps if isinstance(each, spec.CallBlock)]
    assert scopes == ["attention", "attention_2"]


def test_the_word_stays_a_name():
    found, diagnostics = load_text(
        FILE.replace("window: number", "number: number").replace("window", "number"), "m.par"
    )
    assert found is None
    assert {each.code for each in diagnostics if each.severity == "error"} == {"E0209"}  # `attend(…, number = …)`
    text = FILE.replace("near", "number")
    assert load_text(text, "m.par")[0] is not None


DEEP = (
    "\n".join(f"block b{i}(x: [batch], n: number) {{ return b{i + 1}(x, n + 1) }}" for i in range(30))
    + "\nblock b30(x: [batch], n: number) { return x * n }\naxis batch = 4\n"
)


@pytest.mark.parametrize(
    ("before", "after", "code", "message"),
    [
        ("window = near", "window = x", "E0212", "`x` is a tensor where a number is needed"),
        (", window = near", "", "E0210", "`attention` needs argument `window`"),
        (
            "1 / window, rate = 0.1",
            "1 / window, rate = 1",
            "E0214",
            "the rate of `dropout` must be at least 0 and below 1",
        ),
        ("y: [batch, seq, embed])", "y: number)", "E0212", "`y` is a number, and inputs of models and ops are tensors"),
        ("window: number", "window: i64", "E0103", "unexpected `)`"),
        ("return scaled(", "return attention(x, window) + scaled(", "E0218", "block `attention` calls itself"),
        ("  let x = attention(x, window = near)", "  share one = attention", "E0228", "`attention` takes numbers"),
    ],
)
def test_what_is_said_of_what_is_wrong(before: str, after: str, code: str, message: str):
    assert before in FILE
    found, diagnostics = load_text(FILE.replace(before, after), "m.par")
    assert found is None
    assert (code, message) in [(each.code, each.message) for each in diagnostics]


def test_calls_are_not_nested_without_end():
    model = "model m(x: [batch]) { param w: [batch] ~ ones()  loss mean(b0(x, 1)) }"
    found, diagnostics = load_text(DEEP + model, "m.par")
    assert found is None
    assert "E0005" in [each.code for each in diagnostics]
    assert load_text(DEEP + model.replace("b0(x, 1)", "b10(x * w, 1)"), "m.par")[0]
