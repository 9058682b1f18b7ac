"""Documents of packed rows that see each other (W0203): what is warned of leaks, and what the help says ends that.

A model that keeps documents apart has the same loss where several share a row as where each has a row of its own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from partita.dsl.diagnostic import Diagnostic
from partita.dsl.load import load_text
from partita.runtime.data.binding import bind
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import checked

FILE = """\
axis batch = 2, seq = 32, keys = seq, embed = 6, key = 4, kw = 3, vocab = 256
block layer(x: [batch, seq, embed]) {
  param a, b: [embed] ~ normal(1.0)
  param w, u: [embed, key] ~ normal(1.0)
  param kernel: [kw, embed] ~ normal(1.0)
  param mixing: [kw, embed, key] ~ normal(1.0)
  BEFORE
  let y = EXPRESSION
  return y + 0 * (sum(a + b) + sum(w) + sum(u) + sum(kernel) + sum(mixing))
}
model lm(tokens: i64[batch, seq], targets: i64[batch, seq]INPUTS) {
  param table: [vocab, embed] ~ normal(1.0)
  let x = embedding(tokens, table, over = vocab)
  let y = 0 * x
  repeat 1 as once {
    let y = layer(xARGUMENTS)
  }
  loss cross_entropy(dot(x + y, table, over = embed), targets, over = vocab, ignore = -1)
}
train {
  data = jsonl("documents.jsonl", pack = true)
  optimizer = sgd(lr = 0.0)
  precision = f64
  steps = 1
  eval = every(1, batches = all, data = jsonl("documents.jsonl", pack = true))
}
"""
MARKS = {name: f", {name}: i64[batch, seq]" for name in ("segments", "positions")}
SCORES = "dot(dot(x, w, over = embed), rename(dot(x, u, over = embed), seq -> keys), over = key)"
# What leaks, by one operation: statements before, and an expression.
LEAKS = {
    "attend": (
        "",
        "attend(dot(x, w, over = embed), dot(x, u, over = embed), x, over = seq, along = key, causal = true)",
    ),
    "attend to others": (
        "let k = rename(x, seq -> keys)",
        "attend(dot(x, w, over = embed), dot(k, u, over = embed), k, over = keys, along = key)",
    ),
    "softmax": ("", f"dot(softmax({SCORES}, over = keys), rename(x, seq -> keys), over = keys)"),
    "linear_scan of a number": ("", "linear_scan(0.9, x, over = seq)"),
    "linear_scan of features": ("", "linear_scan(sigmoid(a), x, over = seq)"),
    "linear_scan of all": ("", "linear_scan(sigmoid(x), b * x, over = seq)"),
    "linear_scan backward": ("", "linear_scan(0.9, x, over = seq, backward = true)"),
    "named arguments": ("", "linear_scan(over = seq, a = sigmoid(a), b = x) + 0 * x"),
    "cumsum": ("", "cumsum(x, over = seq)"),
    "cumsum of integers": (
        "",
        "expand(sin(cast(cumsum(cast(sum(x, over = embed) > 0, i64), over = seq), f32)), embed)",
    ),
    "shift": ("", "shift(x * a, over = seq, by = 2)"),
    "shift back": ("", "shift(x, over = seq, by = -2)"),  # no target follows the last position
    "conv": ("", "conv(x, kernel, seq -> seq, groups = embed, padding = [[2, 0]])"),
    "conv of channels": (
        "",
        "expand(sum(conv(x, mixing, seq -> seq, over = embed, padding = 2, dilation = 2), over = key), embed)",
    ),
    "patches": ("", "max(patches(x, seq -> seq, size = kw, padding = 1, fill = -9), over = kw)"),
    "scan": ("let h = zeros([batch, embed])  scan seq { let h = tanh(a * h + x) }", "h"),
    "scan backward": ("let h = zeros([batch, embed])  scan seq backward { let h = tanh(a * h + x) }", "h"),
    "scan of two": (
        "let h = zeros([batch, embed])  let c = h  scan seq { let c = 0.5 * c + x  let h = tanh(a * h + c) }",
        "h + c",
    ),
}


def text_of(before: str, expression: str) -> str:
    found = FILE.replace("BEFORE", before).replace("EXPRESSION", expression)
    return found.replace("INPUTS", "").replace("ARGUMENTS", "")


def leaks(text: str) -> list[Diagnostic]:
    found, diagnostics = load_text(text, "m.par")
    assert found is not None, [each.render() for each in diagnostics]
    return [each for each in diagnostics if each.code == "W0203"]


def helped(text: str, found: Diagnostic) -> str:
    """The text after doing what the help says."""
    assert found.span is not None
    assert found.help is not None
    taking, _, help = found.help.rpartition("pass it to blocks, and ")
    start, end = found.span.start, found.span.end
    if bound := re.fullmatch(r"bind `(.*)` before it, and (.*)", help):
        text, start, end = text[:start] + bound[1] + "  " + text[start:], start + len(bound[1]) + 2, end + len(bound[1])
        help = bound[2]
    if inside := re.fullmatch(r"begin its body by `(.*)`", help):
        start = text.index("{", start) + 1
        text = text[:start] + f" {inside[1]} " + text[start:]
    elif argument := re.fullmatch(r"write `(.*)` in this call", help):
        text = text[: end - 1] + f", {argument[1]}" + text[end - 1 :]
    else:
        written = re.fullmatch(r"write `(.*)`", help)
        assert written, help
        text = text[:start] + written[1] + text[end:]
    for name in re.findall(r"`(\w+): i64\[batch, seq\]`", taking):
        text = text.replace("targets: i64[batch, seq]", f"targets: i64[batch, seq]{MARKS[name]}")
        text = text.replace("x: [batch, seq, embed]", f"x: [batch, seq, embed]{MARKS[name]}").replace(
            "layer(x)", f"layer(x, {name})"
        )
    return text


def loss(folder: Path, text: str, length: int) -> float:
    spec = checked(text, "m.par", (f"seq={length}",))
    plan = prepare(spec)
    data = bind(plan.program, plan.train, folder)
    told: list[float] = []

    class Observer:
        def resumed(self, found: object) -> None: ...
        def step(self, result: object) -> None: ...
        def slow(self, step: int, ranks: object) -> None: ...
        def evaluation(self, step: int, loss: float, metrics: dict[str, float]) -> None:
            told.append(loss)

    VirtualRun(plan.evaluating(data.rows)).train(data.dataset, [Observer()])  # type: ignore[list-item]
    return told[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "expression"), LEAKS.values(), ids=LEAKS)
def test_what_is_warned_of_leaks_and_the_help_ends_that(before: str, expression: str, tmp_path: Path):
    random = np.random.default_rng(2)
    # Rows of 32 have two or three of them, and of rows of 16 each has its own.
    documents = ["".join(chr(each) for each in random.integers(97, 123, size)) for size in random.integers(9, 17, 12)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    text = text_of(before, expression)
    (found,) = leaks(text)
    assert loss(tmp_path, text, 32) != pytest.approx(loss(tmp_path, text, 16), rel=1e-6)
    mended = helped(text, found)
    assert leaks(mended) == []
    assert loss(tmp_path, mended, 32) == pytest.approx(loss(tmp_path, mended, 16), rel=1e-9), mended
