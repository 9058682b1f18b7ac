"""Second and third derivatives by `grad`, of every function of the language, against torch's autograd in f64."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.dsl.diagnostic import Refused
from partita.dsl.functions.signatures import FUNCTIONS
from tests.reference.compare import checked, computed, meant, wrong
from tests.reference.programs import UNARY, Program

FILE = """axis batch = 4, seq = 5, embed = 6, wide = 3, heads = 2, key = 3, experts = 3, chosen = 2, vocab = 7
axis keys = 6, half = 3, rest = 3, height = 2, width = 3, kh = 2, kw = 2, up = 1, across = 2, filters = 2
model m(given: [batch, seq, embed], ids: i64[batch, seq]) {
  param scale, bias: [embed] ~ normal(0.4)
  param other: [seq, embed] ~ normal(0.4)
  param u: [embed, wide] ~ normal(0.4)
  param table: [vocab, embed] ~ normal(0.4)
  param kernel: [kh, kw, seq, filters] ~ normal(0.4)
  param matrices: [experts, embed, wide] ~ normal(0.4)
  let h = given * scale + bias
  let y = EXPRESSION
  let g = grad(sin(y), h)
  let gg = grad(g * g * other, h)
  let parts = sum(other) + sum(u) + sum(kernel) + sum(matrices)
  let looked = mean(embedding(ids, table, over = vocab))
  loss mean(g * g) + 0.1 * mean(gg * gg) + 0.01 * mean(h * other) + 0.01 * parts + looked
}
mesh line(data = 2)
layout cut on line { shard batch -> data }
train { layout = cut schedule = gpipe(microbatches = MICROBATCHES)
  data = random() optimizer = sgd(lr = 0.01) steps = 1 precision = f64 }
"""
SQUARE = "expand(h, keys) * 0.2 + cast(expand(iota(keys), embed) == iota(embed), f32)"
IMAGE = "split(h * h, embed -> [height, width])"
EXPRESSIONS = {name: text.format("h") for name, text in UNARY.items() if name != "stop_gradient"} | {
    "add": "h + other",
    "subtract": "other - h",
    "multiply": "h * h * other",
    "divide": "other / (h * h + 1)",
    "maximum": "maximum(h, other) * h",
    "minimum": "minimum(h, other) * h",
    "where": "where(h > other, h * h, h)",
    "power": "power(h * h + 0.5, tanh(h))",
    "cast": "cast(cast(h, f64), f32) * h",
    "expand": "expand(h * h, wide)",
    "sum": "sum(h * other, over = embed) * sum(tanh(h), over = [seq, embed])",
    "mean": "mean(h * h, over = [seq, embed])",
    "max": "max(h * other, over = embed) * h",
    "min": "min(h * other, over = seq) * h",
    "softmax": "softmax(h, over = embed)",
    "log_softmax": "log_softmax(h, over = [seq, embed])",
    "logsumexp": "logsumexp(h, over = embed)",
    "layer_norm": "layer_norm(h, over = embed, scale = scale, shift = bias)",
    "rms_norm": "rms_norm(h, over = [seq, embed], scale = scale)",
    "mse": "mse(h, other)",
    "binary_cross_entropy": "binary_cross_entropy(h, sigmoid(other))",
    "dot": "dot(dot(h, u, over = embed), u, over = wide)",
    "cross_entropy": "cross_entropy(dot(h, table, over = embed), ids, over = vocab, ignore = 3)",
    "token_nll": "token_nll(dot(h, table, over = embed), ids, over = vocab) * h",
    "smoothed": "cross_entropy(dot(h, table, over = embed), ids, over = vocab, ignore = 3, smoothing = 10%)",
    "padded": "embedding(ids, table, over = vocab, padding = 2) * h",
    "embedding": "embedding(ids, table, over = vocab) * h",
    "gather": "gather(h * h, iota(keys), along = embed)",
    "sum_by": "sum_by(h * h, ids, seq -> vocab)",
    "mean_by": "mean_by(h * h, ids, seq -> vocab)",
    "max_by": "max_by(h * h * other, ids, seq -> vocab)",
    "softmax_by": "softmax_by(h, minimum(ids, 2), seq -> wide)",
    "one_hot": "dot(one_hot(ids, vocab), table, over = vocab) * h",
    "dropout": "dropout(h * h, 0.5)",
    "rope": "rope(h * h, over = seq, pairs = embed) * h",
    "cumsum": "cumsum(h * h, over = seq)",
    "linear_scan": "linear_scan(sigmoid(h), h * other, over = seq)",
    "linear_scan backward": "linear_scan(tanh(mean(h, over = embed)), h, over = seq, backward = true)",
    "delta_rule": "delta_rule(h, softmax(other, over = embed), mean(h * other, over = embed), 0.7, sigmoid(h), "
    "over = seq, along = embed)",
    "delta_rule plain": "delta_rule(h, softmax(h, over = embed), sum(h, over = embed), 1, over = seq, along = embed)",
    "inverse": f"inverse({SQUARE}, over = [keys, embed])",
    "flip": "flip(h * h, over = seq) * other",
    "roll": "roll(h * h, over = embed, by = -2) * h",
    "atan2": "atan2(h * h + 1, other)",
    "logaddexp": "logaddexp(h * 3, other)",
    "shift": "shift(h * h, over = seq, by = 2) * h",
    "rename": "rename(h * h, embed -> keys)",
    "split": "split(h * h, embed -> [heads, key])",
    "merge": "merge(split(h * h, embed -> [heads, key]), [key, heads] -> embed) * h",
    "slice": "slice(h * h, embed -> half, start = 2)",
    "concat": "concat(slice(h, embed -> half, start = 3), slice(h, embed -> rest), [half, rest] -> embed) * h",
    "patches": f"patches({IMAGE}, [height, width] -> [up, across], size = [kh, kw])",
    "conv": f"conv({IMAGE}, kernel, [height, width] -> [up, across], over = seq)",
    "mean of windows": f"max(patches({IMAGE}, [height, width] -> [up, across], size = [kh, kw]), over = kh)",
    "routed_dot": "routed_dot(h * h, matrices, arg_max(dot(h, u, over = embed), over = wide), over = embed, "
    "along = experts)",
}


# Those that give no floats, or no gradient; and those that a test below takes.
OTHERS = {
    *("accuracy", "arg_max", "floor", "iota", "load", "round", "sign", "stop_gradient", "top_k", "training", "dropped"),
    *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "zeros", "zeros_like", "grad"),
    *("logical_and", "logical_or", "logical_not", "attend", "dispatch", "combine"),
    *("floor_divide", "remainder"),
}


def test_every_function_is_differentiated_twice():
    assert set(FUNCTIONS) <= OTHERS.union(EXPRESSIONS)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_derivatives_are_those_of_torch(name: str, tmp_path: Path):
    whole = "sum(h)" in EXPRESSIONS[name] or name in ("mse", "binary_cross_entropy", "cross_entropy", "smoothed")
    text = FILE.replace("EXPRESSION", EXPRESSIONS[name]).replace("MICROBATCHES", "1" if whole else "2")
    spec, diagnostics = checked(Program(text, (), (), 7), tmp_path)
    assert spec is not None, diagnostics
    expected, found = meant(spec, tmp_path), computed(spec, tmp_path)
    assert any("gradient" in what for what in expected)
    for what, figure in expected.items():
        error = float((found[what].double() - figure.value).abs().max()) / max(1.0, float(figure.value.abs().max()))
        assert error < 1e-8, (what, error)


ATTENDED = "attend(h, h, h, over = seq, along = embed, causal = true)"
SCANNED = """h
  let s = mean(h, over = seq)
  scan seq { let s = tanh(s + h * h) }
  let y = s"""


@pytest.mark.parametrize(("name", "expression"), [("attend", ATTENDED), ("scan", SCANNED)])
def test_what_has_no_second_derivative_is_refused_by_name(name: str, expression: str, tmp_path: Path):
    """And the first derivative of it is there."""
    twice = FILE.replace("EXPRESSION", expression).replace("MICROBATCHES", "1")
    once = twice.replace("grad(g * g * other, h)", "h").replace("loss mean(g * g)", "loss mean(stop_gradient(g) * h)")
    spec, _ = checked(Program(once, (), (), 7), tmp_path)
    assert spec is not None
    assert not wrong(computed(spec, tmp_path), meant(spec, tmp_path))
    spec, _ = checked(Program(twice, (), (), 7), tmp_path)
    assert spec is not None
    with pytest.raises(Refused, match=rf"error\[E0423\]: `{name}` has no second derivative(.|\n)*grad\(sin\(y\), h\)"):
        computed(spec, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "help"),
    [("y, other", "that very value"), ("y, cast(ids, f32)", "that very value"), ("h, y", "arguments swapped")],
)
def test_a_gradient_that_does_not_flow_is_refused(arguments: str, help: str, tmp_path: Path):
    text = FILE.replace("EXPRESSION", "h * h").replace("grad(sin(y), h)", f"grad({arguments})")
    text = text.replace("MICROBATCHES", "1").replace("grad(g * g * other, h)", "h")
    spec, diagnostics = checked(Program(text, (), (), 7), tmp_path)
    assert spec is not None, diagnostics
    with pytest.raises(Refused, match=f"no gradient flows from the first value to the second(.|\n)*{help}"):
        computed(spec, tmp_path)
