"""Typical mistakes, one in a file that is otherwise right: what is said, where, and that following it helps."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partita.dsl.advice import foreign
from partita.dsl.check.arguments import REQUIRED
from partita.dsl.check.language_model import language_model, no_output
from partita.dsl.config.builtins import (
    CHOICES,
    DEVICES,
    INITIAL,
    LEARNING_RATES,
    LINKS,
    MEASURES,
    MESH,
    OPTIMIZERS,
    SCHEDULES,
    TRAIN,
)
from partita.dsl.config.builtins import DATA as SOURCES
from partita.dsl.functions.rules import OPERATORS
from partita.dsl.functions.signatures import FUNCTIONS
from partita.dsl.load import load_text
from partita.dsl.syntax.lexer import DECLARATIONS
from partita.dsl.syntax.unexpected import STATEMENTS
from partita.dsl.types import DTYPES
from tests.dsl.advice import corrected, followed

FILE = """\
axis batch = 16, seq = 32
axis embed = 32, heads = 4, key = 8, ffn = 4 * embed, vocab = 256

block attention(x: [batch, seq, embed]) {
  param wq, wk, wv: [embed, heads, key] ~ normal(0.02)
  param wo: [heads, key, embed] ~ normal(0.02)
  let h = rms_norm(x, over = embed)
  let q = rope(dot(h, wq, over = embed), over = seq, pairs = key)
  let k = rope(dot(h, wk, over = embed), over = seq, pairs = key)
  let v = dot(h, wv, over = embed)
  let a = attend(q, k, v, over = seq, along = key, causal = true)
  return x + dot(a, wo, over = [heads, key])
}

block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.02)
  param down: [ffn, embed] ~ normal(0.02)
  let h = gelu(dot(rms_norm(x, over = embed), up, over = embed))
  return x + dot(h, down, over = ffn)
}

model gpt(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.02)
  let x = embedding(tokens, wte, over = vocab)
  repeat 4 as layer {
    let x = mlp(attention(x))
  }
  let logits = dot(rms_norm(x, over = embed), wte, over = embed)
  loss cross_entropy(logits, targets, over = vocab)
  metric accuracy = accuracy(logits, targets, over = vocab)
}

mesh cluster(data = 2, pipe = 2) {
  device = h100
  link = [data -> ib400, pipe -> nvlink4]
}

layout split on cluster {
  shard batch -> data
  shard state -> data
  stage layer -> pipe
}

schedule fast = one_f_one_b(microbatches = 4)

train {
  data = stdlib(holdout = 5%)
  optimizer = adamw(lr = cosine(peak = 3e-3, warmup = 20, total = 200), weight_decay = 0.1)
  precision = f32
  clip = 1.0
  steps = 200
  eval = every(50, batches = 10)
  checkpoint = every(100, dir = "runs/a")
}

expect {
  peak_memory <= 40GiB
  bubble <= 50%
}
"""


def test_the_file_is_right_without_a_mistake():
    assert load_text(FILE)[1] == ()


def said(before: str, after: str):
    """What is said of the file with the first occurrence of a part of it written otherwise."""
    assert before in FILE
    return load_text(FILE.replace(before, after, 1), "m.par")[1]


def check(before: str, after: str, code: str, underlined: str, help: str):
    """The first diagnostic, and that the file is right after following what it proposes."""
    first, *_ = said(before, after)
    shown = first.render()
    assert first.code == code, shown
    assert first.span is not None
    assert first.span.source.text[first.span.start : first.span.end] == underlined, shown
    assert help in (first.advice or ""), shown
    if followed(first) is not None:
        text, left = corrected(FILE.replace(before, after, 1))
        assert left == [], "\n\n".join([shown, *(each.render() for each in left), text])


# ---------------------------------------------------------------- signs and brackets


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dot(h, wq, over", "dot(h wq, over"),
        ("dot(h, wq, over", "dot(h, wq over"),
        ("over = seq, pairs", "over = seq pairs"),
        ("[embed, heads, key]", "[embed heads, key]"),
        ("[embed, heads, key]", "[embed heads key]"),
        ("over = [heads, key]", "over = [heads key]"),
        ("batch = 16, seq = 32", "batch = 16 seq = 32"),
        ("tokens: i64[batch, seq], targets", "tokens: i64[batch, seq] targets"),
        ("param wq, wk, wv", "param wq wk wv"),
        ("data = 2, pipe = 2", "data = 2 pipe = 2"),
        ("[data -> ib400, pipe -> nvlink4]", "[data -> ib400 pipe -> nvlink4]"),
        ("every(50, batches", "every(50 batches"),
        ("peak = 3e-3, warmup = 20, total = 200", "peak = 3e-3 warmup = 20 total = 200"),
        ("total = 200), weight_decay", "total = 200) weight_decay"),
        ("heads = 4, key = 8", "heads = 4\n  key = 8"),
    ],
)
def test_a_missing_comma(before: str, after: str):
    (first,) = said(before, after)
    if "\n" in after:  # an axis of its own is as likely
        return check(before, after, "E0103", "key", "`axis key = …`")
    # What follows the place is what was written without the comma.
    rest = next(after[i:] for i in range(len(after)) if after[:i] != before[:i]).lstrip(" ")
    shown = first.render()
    assert first.message.startswith("`,` expected before `"), shown
    assert first.span is not None
    assert first.span.source.text[first.span.start :].lstrip(" ").startswith(first.message.split("`")[3]), shown
    check(before, after, "E0103", "", "insert `,`")
    assert rest


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("before", "after", "code", "underlined", "help"),
    [
        ("over = seq, pairs", "over seq, pairs", "E0103", "", "insert `=`"),
        ("peak = 3e-3", "peak 3e-3", "E0103", "", "insert `=`"),
        ("steps = 200", "steps 200", "E0103", "", "insert `=`"),
        ("layout split on cluster", "layout split cluster", "E0103", "cluster", "`layout split on … {`"),
        ("repeat 4 as layer", "repeat 4 layer", "E0103", "", "insert `as`"),
        ("shard state -> data", "shard state data", "E0103", "", "insert `->`"),
        ("tokens: i64", "tokens i64", "E0103", "", "insert `:`"),
        ("wo: [heads", "wo [heads", "E0103", "", "insert `:`"),
        ("[ffn, embed] ~", "[ffn, embed]", "E0103", "", "insert `~`"),
        ("clip = 1.0", "clip: 1.0", "E0103", ":", "write `=`"),
        ("clip = 1.0", "clip := 1.0", "E0103", ":", "remove it"),
        ("let q = rope", "let q == rope", "E0103", "==", "write `=`"),
        ("let q = rope", "let q -> rope", "E0103", "->", "write `=`"),
        ("shard state -> data", "shard state = data", "E0103", "=", "write `->`"),
        ("x: [batch, seq, embed]) {", "x: [batch, seq, embed])", "E0103", "", "insert `{`"),
        ("model gpt(tokens", "model gpt tokens", "E0103", "", "insert `(`"),
        # signs too many
        ("[embed, heads, key]", "[embed, heads, key,]", "E0103", ",", "remove it"),
        ("total = 200)", "total = 200,)", "E0103", ",", "remove it"),
        ("batch = 16, seq = 32", "batch = 16,, seq = 32", "E0103", ",", "remove it"),
        ("dot(h, wk,", "dot(h,, wk,", "E0103", ",", "remove it"),
        ("steps = 200", "steps = 200,", "E0103", ",", "remove it: entries are not separated by commas"),
        ("up, over = embed))", "up, over = embed)))", "E0105", ")", "remove it"),
        ("repeat 4 as layer {", "repeat 4 as layer: {", "E0103", ":", "remove it"),
        # brackets
        ("up, over = embed))", "up, over = embed)", "E0105", "(", "insert `)` before `return` at m.par:19:3"),
        ("[embed, heads, key]", "[embed, heads, key", "E0105", "[", "insert `]` before `~` at m.par:5:40"),
        ("over = [heads, key])", "over = [heads, key)", "E0105", ")", "insert `]`"),
        ("over = [heads, key])", "over = [heads, key]]", "E0105", "]", "write `)`"),
        ("down, over = ffn)\n}", "down, over = ffn)\n", "E0105", "{", "insert `}` before `model` at m.par:22:1"),
        ("down, over = ffn)\n}", "down, over = ffn\n}", "E0105", "(", "insert `)` before `}` at m.par:20:1"),
        ("  bubble <= 50%\n}", "  bubble <= 50%\n", "E0105", "{", "insert `}` at the end"),
        ("attention(x))\n  }", "attention(x))\n", "E0105", "{", None),
        ("over = vocab)\n}", "over = vocab)\n}}", "E0105", "}", "remove it"),
        ('"runs/a"', '"runs/a', "E0102", '"runs/a)', 'end it with `"`'),
    ],
)
def test_signs(before: str, after: str, code: str, underlined: str, help: str | None):
    check(before, after, code, underlined, help or "")


def test_an_unclosed_brace_is_the_one_that_another_seems_to_close():
    first, *_ = said("attention(x))\n  }", "attention(x))\n")
    assert first.span is not None
    assert first.span.place == "m.par:25:21"  # that of the `repeat`, not of the model


# ---------------------------------------------------------------- words and signs of other languages

H = "let h = rms_norm(x, over = embed)"


@pytest.mark.few(13)
@pytest.mark.parametrize(
    ("statement", "code", "underlined", "help"),
    [
        ("if training() { let h = x }", "E0103", "if", "`where(training(), a, b)`"),
        ("let h = x if true else x", "E0103", "if", "`where(condition, a, b)` chooses elementwise"),
        ("let h = relu(x if true else x)", "E0103", "if", "`where(condition, a, b)` chooses elementwise"),
        ("let h = x } else { let h = x", "E0103", "else", "`where(condition, a, b)` chooses elementwise"),
        ("match x { }", "E0103", "match", "`where(condition, a, b)` chooses elementwise"),
        ("for i in range(3) { let h = x }", "E0103", "for", "`repeat 4 as layer { … }` repeats statements"),
        ("while true { let h = x }", "E0103", "while", "`repeat 4 as layer { … }` repeats statements"),
        ("let h = [x for i in range(3)]", "E0103", "for", "`repeat 4 as layer { … }` repeats statements"),
        ("def f(x): return x", "E0103", "def", "a part of a model is a block"),
        ("let f = lambda y: y", "E0103", "lambda", "a function is a `block`, with a name"),
        ("print(x)", "E0103", "print", "`metric name = …`"),
        ("assert true", "E0103", "assert", "`expect { … }`"),
        ("var h = x", "E0103", "var", "`let y = …`"),
        ("let h = x is None", "E0103", "is", "compared by `==`"),
        ("relu(x)", "E0103", "relu", "a statement begins with a keyword: `let y = …` names a result"),
        ("x.relu()", "E0103", "x", "a statement begins with a keyword: `let y = …` names a result"),
        ("let (h, g) = x", "E0103", "(", "several names are separated by commas: `let a, b = …`"),
        ("h += x", "E0103", "h", "`let h = h + …`"),
        ("let h += x", "E0103", "+", "`let h = h + …`"),
        ("let h = x ** 2", "E0103", "*", "`power(x, p)`"),
        ("let h = x // 2", "E0103", "/", "sizes divide exactly by `/`"),
        ("// doc\n  let h = x", "E0103", "/", "comments start with `#`"),
        ('"""doc"""\n  let h = x', "E0103", '""', "comments start with `#`"),
        ("let h = x % 2", "E0101", "%", "`x - n * floor(x / n)`"),
        ("let h = x @ wq", "E0101", "@", "`dot(a, b, over = axis)`"),
        ("let h = x;", "E0101", ";", "remove it"),
        ("let h = ~x", "E0103", "~", "inverted by `not`"),
        ("let h = x[0]", "E0230", "x[0]", "`gather(x, 0, along = axis)`"),
        ("let h = relu(x[:, 0])", "E0103", ":", "`gather(x, 0, along = axis)`"),
        ("let h = x.shape[0]", "E0103", "[", "`size(axis)`"),
        ("let h = x.size(0)", "E0103", "x.size", "`size(axis)`"),
        ("let h = x.shape", "E0201", "x.shape", "`size(axis)`"),
        ('let h = f"a{x}"', "E0103", '"a{x}"', "strings are plain"),
        ("let h = None", "E0201", "None", "omit an argument"),
        ("let h = x * 1.e-3", "E0103", ".", "a digit follows the point"),
        # functions of modules, and methods
        ("let h = nn.Linear(x, embed)", "E0103", "nn.Linear", "a product is `dot(a, b, over = axis)`"),
        ("let h = torch.relu(x)", "E0103", "torch.relu", "did you mean `relu`?"),
        ("let h = F.gelu(x)", "E0103", "F.gelu", "did you mean `gelu`?"),
        ("let h = jax.nn.silu(x)", "E0103", "jax.nn.silu", "did you mean `silu`?"),
        ("let h = x.relu()", "E0103", "x.relu", "`relu(x)`: a function takes what it works on as an argument"),
        ("let h = x.mean(dim = -1)", "E0103", "x.mean", "`mean(x, …)`: a function takes"),
        ("let h = self.norm1(x)", "E0103", "self.norm1", "functions are called without a path: `norm1(…)`"),
        # types
        ("param b: Tensor ~ zeros()\n  let h = x", "E0103", "~", "the axes of a tensor follow in brackets"),
        ("param b: (embed) ~ zeros()\n  let h = x", "E0103", "(", "axes are written in brackets: `[embed]`"),
        ("param b: [2 * embed] ~ zeros()\n  let h = x", "E0103", "2", "declare `axis name = 2 * embed`"),
        ("param b = zeros()\n  let h = x", "E0103", "=", "a parameter has a type: `param b: [embed] ~ …`"),
    ],
)
def test_a_statement_of_another_language(statement: str, code: str, underlined: str, help: str):
    check(H, statement, code, underlined, help)


@pytest.mark.few(16)
@pytest.mark.parametrize("word", sorted(foreign.WORDS))
def test_every_word_of_another_language_is_known(word: str):
    diagnostics = said(H, f"{word} x")
    assert [(each.message, each.help) for each in diagnostics] == [(f"there is no `{word}`", foreign.WORDS[word])]


# ---------------------------------------------------------------- how bodies end


@pytest.mark.parametrize(
    ("before", "after", "message", "underlined", "help"),
    [
        (
            "return x + dot(h",
            "return x\n  let y = dot(h",
            "`let` after `return`",
            "let",
            "a block ends with its `return`",
        ),
        ("return x + dot(h", "return x\n  return dot(h", "a second `return`", "return", "`return a, b`"),
        ("return x + dot(h", "let y = x + dot(h", "this block returns nothing", "}", "insert `return y`"),
        ("return x + dot(h, down, over = ffn)", "loss mean(x)", "this block returns nothing", "}", "that of a model"),
        ("return x + dot(h, down, over = ffn)", "", "this block returns nothing", "}", "insert `return h`"),
        ("loss cross", "return cross", "`return` in a model", "return", "a model ends with `loss …`"),
        ("let x = mlp(att", "return mlp(att", "`return` within a `repeat`", "return", "`let x = …`"),
        (
            "  loss cross_entropy(logits, targets, over = vocab)\n",
            "",
            "model `gpt` has no `loss`",
            "gpt",
            "end it with",
        ),
    ],
)
def test_how_a_body_ends(before: str, after: str, message: str, underlined: str, help: str):
    (first, *_) = said(before, after)
    assert first.message == message, first.render()
    assert first.span is not None
    assert first.span.source.text[first.span.start : first.span.end] == underlined, first.render()
    assert help in (first.advice or ""), first.render()
    if followed(first) is not None and after:
        assert corrected(FILE.replace(before, after, 1))[1] == []


# ---------------------------------------------------------------- arguments


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("before", "after", "help"),
    [
        ("rms_norm(x, over = embed)", "rms_norm(x)", "write `rms_norm(x, over = embed)`"),
        ("dot(h, wq, over = embed)", "dot(h, wq)", "write `dot(h, wq, over = embed)`"),
        ("dot(a, wo, over = [heads, key])", "dot(a, wo)", "write `dot(a, wo, over = [heads, key])`"),
        (", over = vocab)\n  repeat", ")\n  repeat", "write `embedding(tokens, wte, over = vocab)`"),
        ("targets, over = vocab)\n  m", "targets)\n  m", "write `cross_entropy(logits, targets, over = vocab)`"),
        ("targets, over = vocab)\n}", "targets)\n}", "write `accuracy(logits, targets, over = vocab)`"),
        (", over = seq, pairs = key)", ")", "write `rope(dot(h, wq, over = embed), over = seq, pairs = key)`"),
        (", over = seq, pairs = key)", ", pairs = key)", "pairs = key, over = seq)`"),
        (
            "over = seq, along = key, causal",
            "causal",
            "write `attend(q, k, v, causal = true, over = seq, along = key)`",
        ),
        (H, "let h = softmax(x)", "write `softmax(x, over = embed)`"),
        (H, "let h = x * 0 + gather(x, iota(embed))", "write `gather(x, iota(embed), along = batch)`"),
        (H, "let h = mean(x) * x + cumsum(x)", "write `cumsum(x, over = seq)`"),
        # What is not known is not guessed; and much is shown in part.
        (H, "let h = dropout(x)", "`dropout(x, rate)`"),
        (H, "let h = attend(x)", "`attend(q, k, v, over, along, …)`"),
    ],
)
def test_a_missing_argument(before: str, after: str, help: str):
    first, *_ = said(before, after)
    assert first.code == "E0210", first.render()
    assert help in (first.advice or ""), first.render()
    if followed(first) is not None and before is not H:
        assert corrected(FILE.replace(before, after, 1))[0] != FILE.replace(before, after, 1)
        assert corrected(FILE.replace(before, after, 1))[1] == []


def test_a_long_call_is_not_written_out():
    logits = f"logits + 0 * ({'1 + ' * 30} 1)"
    before = "cross_entropy(logits, targets, over = vocab)"
    (found,) = said(before, f"cross_entropy({logits}, targets)")
    assert found.help == "add `over = vocab`"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("before", "after", "code", "underlined", "help"),
    [
        (H, "let h = rms_norm(x, over = -1)", "E0212", "-1", "write `embed`: axes are given by name"),
        (H, "let h = softmax(x, -1)", "E0212", "-1", "write `embed`: axes are given by name"),
        (H, "let h = softmax(x, dim = 2)", "E0209", "dim", "did you mean `over`?"),
        (H, "let h = rms_norm(x, over = [2])", "E0212", "2", "write `embed`: axes are given by name"),
        (H, 'let h = rms_norm(x, over = "embed")', "E0212", '"embed"', "write `embed`, without quotes"),
        ("over = [heads, key])", 'over = ["heads", key])', "E0212", '"heads"', "write `heads`, without quotes"),
        (H, 'let h = cast(x, "f32")', "E0207", '"f32"', "write `f32`, without quotes"),
        (H, "let h = cast(x, 'f32')", "E0101", "'f32'", 'write `"f32"`, in double quotes'),
        ("causal = true", "causal = True", "E0212", "True", "write `true`"),
        ("causal = true", 'causal = "true"', "E0212", '"true"', "write `true`"),
        ("causal = true", "causal = 1", "E0212", "1", "write `true`"),
        ("causal = true", "causal = no", "E0212", "no", "write `false`"),
        ("x: [batch, seq, embed]", 'x: ["batch", seq, embed]', "E0103", '"batch"', "write `batch`, without quotes"),
        ("stage layer", 'stage "layer"', "E0103", '"layer"', "write `layer`, without quotes"),
        ("schedule fast =", 'schedule "fast" =', "E0103", '"fast"', "write `fast`, without quotes"),
        (H, "let h = x * (1 / sqrt(embed))", "E0201", "embed", "write `size(embed)`"),
        ("over = [heads, key]", "over = heads, key", "E0211", "heads, key", "a list is `over = [heads, key]`"),
        ("mlp(attention(x))", "attention(x).mlp()", "E0103", ".mlp", "and write `mlp(a)`"),
        ("shard batch -> data", "shard data -> batch", "E0202", "data -> batch", "write `batch -> data`"),
        ("shard state -> data", "shard data -> state", "E0202", "data -> state", "write `state -> data`"),
    ],
)
def test_an_argument_of_another_kind(before: str, after: str, code: str, underlined: str, help: str):
    check(before, after, code, underlined, help)


# ---------------------------------------------------------------- values

ADAM = "adamw(lr = cosine(peak = 3e-3, warmup = 20, total = 200), weight_decay = 0.1)"
OPTIMIZER = f"train {{\n  data = stdlib(holdout = 5%)\n  optimizer = {ADAM}"
OWN = "optimizer own { update all -> adamw(lr = 0.1) }\ntrain {\n  data = stdlib()\n  optimizer = own(lr = 0.1)"
COSINE = "cosine(peak = 3e-3, warmup = 20, total = 200)"
EVERY = 'every(100, dir = "runs/a")'
FAST = "one_f_one_b(microbatches = 4)"
INTERLEAVED = "interleaved_1f1b(microbatches = 8)"
WARMUP, WITHOUT_TOTAL = "warmup = 20, total = 200", "cosine(peak = 3e-3, warmup = 20)"
DEVICE = "device = h100"
F32 = "precision = f32"
DATA = "stdlib(holdout = 5%)"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("before", "after", "code", "underlined", "help"),
    [
        # units
        ("holdout = 5%", "holdout = 0.05", "E0307", "0.05", "write `5%`"),
        ("holdout = 5%", "holdout = 5", "E0307", "5", "write `5%`"),
        ("holdout = 5%", "holdout = 5 %", "E0107", "5 %", "write `5%`"),
        (COSINE, "1%", "E0307", "1%", "write `0.01`"),
        ("weight_decay = 0.1", "weight_decay = 10%", "E0307", "10%", "write `0.1`"),
        (DEVICE, "device = device(989, 80GB, 3TB/s)", "E0307", "989", "write `989TFLOP/s`"),
        (DEVICE, "device = device(989e12, 80GB, 3TB/s)", "E0307", "989e12", "write `989TFLOP/s`"),
        (DEVICE, "device = device(989TFLOPS, 80GB, 3TB/s)", "E0107", "989TFLOPS", "write `989TFLOP/s`"),
        (DEVICE, "device = device(989TFLOP/s, 80, 3TB/s)", "E0307", "80", "write `80GiB`"),
        (DEVICE, "device = device(989TFLOP/s, 80e9, 3TB/s)", "E0307", "80e9", "write `80GB`"),
        (DEVICE, "device = device(989TFLOP/s, 80 GiB, 3TB/s)", "E0107", "80 GiB", "write `80GiB`"),
        (DEVICE, "device = device(989TFLOP/s, 80GB/s, 3TB/s)", "E0307", "80GB/s", "write `80GB`"),
        (DEVICE, "device = device(989TFLOP/s, 80gb, 3TB/s)", "E0107", "80gb", "write `80GB`"),
        (DEVICE, "device = device(989TFLOP/s, 80GB, 3350)", "E0307", "3350", "write `3350GB/s`"),
        (DEVICE, "device = device(989TFLOP/s, 80GB, 3TB)", "E0307", "3TB", "write `3TB/s`"),
        ("-> nvlink4", "-> link(450GB/s, 5)", "E0307", "5", "write `5us`"),
        ("-> nvlink4", "-> link(450GB/s, 5e-6)", "E0307", "5e-6", "write `5us`"),
        ("-> nvlink4", "-> link(450GB/s, 5usec)", "E0107", "5usec", "write `5us`"),
        ("-> nvlink4", "-> link(450GB/s, 5µs)", "E0101", "5µs", "microseconds are written `us`"),
        ("-> nvlink4", "-> link(400Gbps, 5us)", "E0107", "400Gbps", "write `50GB/s`"),
        ("peak_memory <= 40GiB", "peak_memory <= 40", "E0307", "40", "write `40GiB`"),
        ("bubble <= 50%", "bubble <= 0.5", "E0307", "0.5", "write `50%`"),
        ("bubble <= 50%", "step_time <= 2", "E0307", "2", "write `2s`"),
        ("bubble <= 50%", "step_time <= 0.5", "E0307", "0.5", "write `500ms`"),
        ("vocab = 256", "vocab = 50k", "E0107", "50k", "write `50_000`"),
        ("vocab = 256", "vocab = 1.5M", "E0107", "1.5M", "write `1_500_000`"),
        ("vocab = 256", "vocab = 2KB", "E0307", "2KB", "write `2_000`"),
        ("ffn = 4 * embed", "ffn = 4embed", "E0107", "4embed", "write `4 * embed`"),
        ("steps = 200", "steps = 200s", "E0307", "200s", "write `200`"),
        # quotes
        ("batch = 16", 'batch = "16"', "E0306", '"16"', "write `16`, without quotes"),
        ("steps = 200", 'steps = "200"', "E0306", '"200"', "write `200`, without quotes"),
        ("repeat 4", 'repeat "4"', "E0306", '"4"', "write `4`, without quotes"),
        ("pipe = 2", 'pipe = "2"', "E0306", '"2"', "write `2`, without quotes"),
        (F32, 'precision = "bf16"', "E0306", '"bf16"', "write `bf16`, without quotes"),
        (F32, 'layout = "split"', "E0306", '"split"', "write `split`, without quotes"),
        (F32, "layout = split(2)", "E0302", "split(2)", "write `split`, and change it where it is declared"),
        (F32, "schedule = fast(8)", "E0302", "fast(8)", "write `fast`, and change it where it is declared"),
        ("train {", "schedule other = fast(8)\ntrain {\n schedule = fast", "E0302", "fast", "write `one_f_one_b`"),
        (OPTIMIZER, OWN, "E0302", "own(lr = 0.1)", "write `own`, and change it where it is declared"),
        (DEVICE, 'device = "h100"', "E0306", '"h100"', "write `h100`, without quotes"),
        ("-> nvlink4", '-> "nvlink4"', "E0306", '"nvlink4"', "write `nvlink4`, without quotes"),
        (DATA, '"stdlib"', "E0306", '"stdlib"', "write `stdlib()`, without quotes"),
        (ADAM, '"adamw"', "E0306", '"adamw"', "write `adamw(lr = 1e-3)`, without quotes"),
        (COSINE, '"3e-4"', "E0306", '"3e-4"', "write `3e-4`, without quotes"),
        (COSINE, '"cosine"', "E0306", '"cosine"', "write `cosine(peak = 1e-3, total = 1_000)`, without quotes"),
        ("batches = 10", 'batches = "all"', "E0306", '"all"', "write `all`, without quotes"),
        ('dir = "runs/a"', "dir = runs/a", "E0306", "runs/a", 'write `"runs/a"`, in double quotes'),
        ('dir = "runs/a"', "dir = /tmp/ck", "E0103", "/tmp/ck", 'write `"/tmp/ck"`, in double quotes'),
        ('dir = "runs/a"', "dir = ./a-b.c/d", "E0103", "./a-b.c/d", 'write `"./a-b.c/d"`, in double quotes'),
        ('dir = "runs/a"', "dir = ../a", "E0103", "../a", 'write `"../a"`, in double quotes'),
        ('dir = "runs/a"', "dir = ~/runs/a", "E0103", "~/runs/a", 'write `"~/runs/a"`, in double quotes'),
        ('dir = "runs/a"', "dir = /data/2024/x", "E0103", "/data/2024/x", 'write `"/data/2024/x"`, in double quotes'),
        (DATA, "text(a/b-c/*.txt)", "E0103", "a/b-c/*.txt", 'write `"a/b-c/*.txt"`, in double quotes'),
        ("~ normal(0.02)\n  param wo", '~ "normal"\n  param wo', "E0306", '"normal"', "write `normal(0.02)`"),
        # calls
        ("eval = every(50, batches = 10)", "eval = 20", "E0306", "20", "write `every(20)`"),
        (EVERY, "100", "E0306", "100", "write `every(100)`"),
        (EVERY, '"runs/a"', "E0306", '"runs/a"', "such as `checkpoint = every(100)`"),
        (EVERY, "every(steps = 100)", "E0209", "steps", "did you mean `interval`?"),
        (DATA, "stdlib", "E0306", "stdlib", "write `stdlib()`"),
        (DATA, '"a/*.jsonl"', "E0306", '"a/*.jsonl"', 'write `jsonl("a/*.jsonl")`'),
        (DATA, '"a.parquet"', "E0306", '"a.parquet"', 'write `parquet("a.parquet")`'),
        (DATA, '"a.bin"', "E0306", '"a.bin"', 'write `tokens("a.bin")`'),
        (DATA, '"a.npz"', "E0306", '"a.npz"', 'write `arrays("a.npz")`'),
        (DATA, '"a/*.md"', "E0306", '"a/*.md"', 'write `text("a/*.md")`'),
        (ADAM, "adamw", "E0306", "adamw", "write `adamw(lr = 1e-3)`"),
        (ADAM, "adamw()", "E0210", "adamw()", "write `adamw(lr = 1e-3)`"),
        ("weight_decay = 0.1", "betas = 0.9", "E0306", "0.9", "such as `[0.9, 0.95]`"),
        ("peak = 3e-3", "lr = 3e-3", "E0209", "lr", "did you mean `peak`?"),
        (WARMUP, "warmup = 20, total = 4", "E0308", "4", "`total` is at least 20, most often `train.steps`"),
        (WARMUP, "warmup = 20", "E0210", WITHOUT_TOTAL, "write `cosine(peak = 3e-3, warmup = 20, total = 1_000)`"),
        (FAST, "one_f_one_b(8, 2)", "E0306", "2", "there are `batch`, `embed`"),
        ("return x + dot(a", "return x += dot(a", "E0103", "=", "a value is returned as it is: `return x + y`"),
        (FAST, INTERLEAVED, "E0210", INTERLEAVED, f"write `{INTERLEAVED[:-1]}, chunks = 2)`"),
        (FAST, "interleaved_1f1b", "E0103", "train", f"a schedule is called: `{INTERLEAVED[:-1]}, chunks = 2)`"),
        (F32, 'schedule = "1f1b"', "E0306", '"1f1b"', "declared: `fast`"),
        ("axis embed = 32, ", "const embed = 32\naxis ", "E0202", "embed", "declare it as one: `axis embed = 32`"),
        ("~ normal(0.02)\n  param wo", "~ 0.02\n  param wo", "E0306", "0.02", "write `normal(0.02)`"),
        ("~ normal(0.02)\n  param wo", "~ 0\n  param wo", "E0306", "0", "write `zeros()`"),
        ("~ normal(0.02)\n  param wo", "~ normal\n  param wo", "E0306", "normal", "write `normal(0.02)`"),
        ("~ normal(0.02)\n  param wo", "~ normal(0, 1)\n  param wo", "E0209", "normal(0, 1)", "write `normal(1)`"),
        ("~ normal(0.02)\n  param wo", "~ uniform(-1, 1)\n  param wo", "E0209", "uniform(-1, 1)", "write `uniform(1)`"),
        ("bubble <= 50%", "bytes <= 4GiB", "E0210", "bytes", "write `bytes(data)`"),
        # left out
        ("clip = 1.0", "clip = None", "E0306", "None", "write `none`, or leave it out"),
        ("clip = 1.0", "clip = 0", "E0306", "0", "write `none`, or leave it out"),
        ("eval = every(50, batches = 10)", "eval = false", "E0306", "false", "write `none`, or leave it out"),
        (F32, "compile = True", "E0306", "True", "write `true`"),
        # lists
        ("[data -> ib400, pipe -> nvlink4]", "[data = ib400, pipe = nvlink4]", "E0103", "=", "write `->`"),
        ("[data -> ib400, pipe -> nvlink4]", "{data: ib400}", "E0103", "{", "`[a -> b]`"),
        ("[data -> ib400, pipe -> nvlink4]", "data -> ib400", "E0103", "->", "`[data -> ib400]`"),
        ("bubble <= 50%", "mfu => 1%", "E0103", "=", "it is written `>=`"),
        ("bubble <= 50%", "bubble = 50%", "E0103", "=", "a claim compares"),
        ("let x = mlp(attention(x))", "let y = mlp(attention(x))", "E0408", "y", "write `x`, which is carried"),
        ("let x = mlp(attention(x))", "let a = attention(x)\n    let y = mlp(a) + x", "E0408", "y", "write `x`"),
        ("repeat 4", "repeat layers", "E0201", "layers", "declare it: `const layers = 4`"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind(before: str, after: str, code: str, underlined: str, help: str):
    check(before, after, code, underlined, help)


# ---------------------------------------------------------------- arguments in another order

VARIED = """\
axis batch = 2, seq = 4, embed = 4, vocab = 8, experts = 4, chosen = 2, slots = 3, out = 6
axis height = 6, width = 6, kh = 3, kw = 3, rows = 4, columns = 4
block joined(x: [batch, seq, embed], ids: i64[batch, seq]) {
  return x + expand(cast(ids, f32), embed)
}
model m(x: [batch, seq, embed], ids: i64[batch, seq], image: [batch, height, width, embed]) {
  param table: [vocab, embed] ~ normal(0.02)
  param kernel: [kh, kw, embed, out] ~ normal(0.02)
  param gate: [embed, experts] ~ normal(0.02)
  param up: [experts, embed, out] ~ normal(0.02)
  let logits = dot(x, table, over = embed)
  let w, e = top_k(softmax(dot(x, gate, over = embed), over = experts), experts -> chosen)
  let sent = dispatch(x, e, over = seq, into = [experts, slots])
  let y = CALL
  loss mean(logits) + mean(image) * mean(x) * mean(kernel) + mean(w) + mean(sent) * mean(up) + mean(cast(ids, f32))
}
"""
CALLS = (
    "where(x > 0, x, 0)",
    "cast(x, bf16)",
    "dropout(x, 0.1)",
    "embedding(ids, table, over = vocab)",
    "gather(x, iota(chosen), along = seq)",
    "one_hot(ids, vocab)",
    "arg_max(x, embed)",
    "cumsum(x, seq)",
    "inverse(x, [seq, embed])",
    "flip(x, seq)",
    "roll(x, seq)",
    "logsumexp(x, embed)",
    "softmax(x, embed)",
    "log_softmax(x, embed)",
    "layer_norm(x, embed)",
    "rms_norm(x, embed)",
    "cross_entropy(logits, ids, over = vocab)",
    "token_nll(logits, ids, over = vocab)",
    "accuracy(logits, ids, over = vocab)",
    "shift(x, seq)",
    "expand(x, vocab)",
    "patches(image, [kh, kw], [height, width] -> [rows, columns])",
    "conv(image, kernel, [height, width] -> [rows, columns], over = embed)",
    "routed_dot(x, up, e, over = embed, along = experts)",
    "dispatch(x, e, over = seq, into = [experts, slots])",
    "combine(sent, e, w, over = seq, from = [experts, slots])",
    "rope(x, seq, pairs = embed)",
    "dropped(e, seq, into = [experts, slots])",
    "load(e, seq, into = experts)",
    "sum_by(x, ids, seq -> vocab)",
    "mean_by(x, ids, seq -> vocab)",
    "max_by(x, ids, seq -> vocab)",
    "softmax_by(x, ids, seq -> vocab)",
    "joined(x, ids)",
)
# In either order they type-check, or say something else.
SYMMETRIC = {*OPERATORS.values(), "maximum", "minimum", "power", "dot", "attend", "binary_cross_entropy", "mse"}
SYMMETRIC |= {"grad", "floor_divide", "remainder", "atan2", "logaddexp", "linear_scan", "delta_rule", "top_k"}


def test_every_function_of_two_arguments_is_swapped_below():
    needed = {
        each.name
        for each in FUNCTIONS.values()
        if sum(slot.default is REQUIRED for slot in each.slots) > 1 or each.arrows[0]
    }
    assert {call.partition("(")[0] for call in CALLS} >= needed - SYMMETRIC - {
        "rename",
        "split",
        "merge",
        "concat",
        "slice",
    }


@pytest.mark.few(4)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.partition("(")[0])
def test_swapped_arguments_are_put_in_order(call: str):
    text = VARIED.replace("CALL", call)
    name, _, rest = call.partition("(")
    first, second = _first_two(rest)
    wrong = VARIED.replace("CALL", f"{name}({second}, {first}{rest[len(first) + 2 + len(second) :]}")
    assert not any(each.severity == "error" for each in load_text(text)[1])
    (found,) = (each for each in load_text(wrong)[1] if each.severity == "error")
    assert found.help == f"arguments swapped? write `{call}`"
    assert corrected(wrong)[0] == text


def _first_two(arguments: str) -> tuple[str, str]:
    """The texts of the first two of some arguments."""
    depth, ends = 0, list[int]()
    for position, character in enumerate(arguments):
        if depth == 0 and character in ",)":
            ends.append(position)
        depth += (character in "([") - (character in ")]")
    return arguments[: ends[0]], arguments[ends[0] + 2 : ends[1]]


@pytest.mark.parametrize(
    ("call", "help"),
    [
        (
            "embedding(table = ids, ids = table, over = vocab)",
            "write `embedding(table = table, ids = ids, over = vocab)`",
        ),
        ("where(x, x * 2, x > 0)", "such as `where(x > 0, x, x * 2)`"),
        ("joined(ids = x, x = ids)", "write `joined(ids = ids, x = x)`"),
        (
            "routed_dot(e, x, up, over = embed, along = experts)",
            "write `routed_dot(x, up, e, over = embed, along = experts)`",
        ),
    ],
)
def test_arguments_in_any_order(call: str, help: str):
    (found,) = (each for each in load_text(VARIED.replace("CALL", call))[1] if each.severity == "error")
    assert found.help == f"arguments swapped? {help}"


@pytest.mark.parametrize(
    "call", ["embedding(x, table, over = vocab)", "dropout(x, x)", "cross_entropy(ids, ids, over = vocab)"]
)
def test_arguments_that_fit_in_no_order_are_not_swapped(call: str):
    (found,) = (each for each in load_text(VARIED.replace("CALL", call))[1] if each.severity == "error")
    assert "swapped" not in (found.help or "")


# ---------------------------------------------------------------- where an axis comes from


@pytest.mark.parametrize(
    ("before", "after", "code", "note", "help"),
    [
        # kept by a product, in a block that is called two blocks on
        (
            "over = [heads, key])",
            "over = heads)",
            "E0204",
            "`key` is kept by `dot(a, wo, over = heads)`: both operands have it, and it is not summed over   (m.par:12",
            "sum over `key` there as well: `over = [heads, key]`",
        ),
        # in the value that a repeat carries
        (
            "let x = mlp(attention(x))",
            "let y = dot(expand(x, ffn), expand(wte, ffn), over = vocab)\n    let x = x",
            "E0203",
            None,
            "axes they share: embed, ffn",
        ),
        (
            "let x = mlp(attention(x))",
            "param w: [embed, ffn] ~ ones()\n    let h = dot(x, w, over = embed)\n    let x = dot(h, w, over = [])",
            "E0220",
            "`ffn` is kept by `dot(h, w, over = [])`: both operands have it",
            "sum over `ffn` there as well: `over = ffn`",
        ),
        # in the logits
        (
            "wte, over = embed)\n  loss",
            "expand(wte, key), over = embed)\n  loss",
            "E0204",
            "`key` comes from `dot(rms_norm(x, over = embed), expand(wte, key), over = e…`   (m.par:28:16)",
            "expected [batch, seq, key]",
        ),
        # gone, in a block and outside
        (
            "return x + dot(h, down, over = ffn)",
            "return mean(x + dot(h, down, over = ffn), over = seq)",
            "E0220",
            "`seq` ends in `mean(x + dot(h, down, over = ffn), over = seq)`   (m.par:19:10)",
            "give the new value another name",
        ),
        (
            "let logits = dot(rms_norm(x, over = embed)",
            "let pooled = max(x, over = embed)\n  let logits = dot(rms_norm(pooled, over = embed)",
            "E0203",
            "`embed` ends in `max(x, over = embed)`   (m.par:28:16)",
            "axes of `pooled`: batch, seq",
        ),
    ],
)
def test_where_an_axis_comes_from_or_ends(before: str, after: str, code: str, note: str | None, help: str):
    first, *_ = said(before, after)
    assert first.code == code, first.render()
    assert help in (first.advice or ""), first.render()
    assert note is None or any(each.startswith(note) for each in first.notes), first.render()


def test_an_axis_is_followed_through_blocks_that_call_others_twice():
    calls = "\n".join(f"block b{i}(x: [batch]) {{ return b{i - 1}(b{i - 1}(x)) }}" for i in range(1, 18))
    text = f"axis batch = 2, key = 2\nblock b0(x: [batch]) {{ return sum(expand(x, key), over = key) }}\n{calls}\n"
    text += "model m(x: [batch]) {\n  param w: [key] ~ ones()\n  loss mean(dot(b17(x), w, over = key))\n}\n"
    (found,) = load_text(text)[1]
    assert "`key` ends in `sum(expand(x, key), over = key)`   (<text>:2:31)" in found.notes, found.render()
    (found,) = load_text(text.replace("return sum(expand(x, key), over = key)", "return relu(x)"))[1]
    assert not any("key` ends" in note for note in found.notes)


@pytest.mark.parametrize("text", [".", "axis a = 2 ."])
def test_a_dot_at_the_end(text: str):
    (found,) = load_text(text)[1]
    assert (found.code, found.message) == ("E0103", "unexpected `.`")


def test_a_repeat_that_carries_nothing_is_said_once():
    assert [each.code for each in said("let x = mlp(", "let y = mlp(")] == ["E0408"]


def test_a_parameter_with_an_axis_twice_has_a_second_one_of_that_size():
    (found,) = said("param up: [embed, ffn]", "param up: [embed, embed]")
    assert found.code == "E0216"
    axis, new, product = re.findall(r"`([^`]+)`", found.help or "")
    text = FILE.replace("param up: [embed, ffn]", f"param up: [embed, {new}]")
    text = text.replace("axis batch", f"{axis}\naxis batch").replace("down: [ffn, embed]", "down: [embed, ffn]")
    text = text.replace("  return x + dot(h, down, over = ffn)", f"  let y = h let h = {product}\n  return x + h")
    text = text.replace("  param down: [embed, ffn] ~ normal(0.02)\n", "").replace(", ffn = 4 * embed", "")
    assert load_text(text)[1] == ()


# ---------------------------------------------------------------- an output that is missing

LOGITS = "dot(rms_norm(x, over = embed), wte, over = embed)"


@pytest.mark.parametrize(
    ("statements", "help"),
    [
        (f"let logits = {LOGITS} loss cross_entropy(logits, targets, over = vocab)", "logits"),
        (f"let scores = {LOGITS} loss cross_entropy(scores, targets, over = vocab)", "scores"),
        (f"loss mean(cross_entropy({LOGITS}, targets, over = vocab))", LOGITS),
        (f"loss cross_entropy(targets = targets, logits = {LOGITS}, over = vocab)", LOGITS),
        (f"loss cross_entropy({LOGITS.replace('wte', 'wte # tied' + chr(10))}, targets, over = vocab)", LOGITS),
        (f"let logits = {LOGITS} loss mean(logits * logits)", "logits"),
    ],
)
def test_an_output_that_is_missing_is_what_the_loss_reads(statements: str, help: str):
    start, end = FILE.index("  let logits"), FILE.index("}\n\nmesh")
    written = f"{FILE[:start]}{statements}\n"
    found, _ = load_text(f"{written}{FILE[end:]}")
    assert found is not None
    assert found.model is not None
    assert no_output(found.model, "logits").diagnostics[0].help == f"in the model, `output logits = {help}`"
    again, _ = load_text(f"{written}output logits = {help}\n{FILE[end:]}")
    assert again is not None
    assert again.model is not None
    assert language_model(again.model, "batch").vocab.name == "vocab"


def test_an_output_that_is_missing_of_a_block_is_bound_first():
    block = f"block read(x: [batch, seq, embed]) {{ param wte: [vocab, embed] ~ zeros() return {LOGITS} }}\nmodel"
    loss = "loss cross_entropy(logits, targets, over = vocab)"
    text = FILE.replace("model", block, 1).replace(f"  let logits = {LOGITS}\n", "").replace("  metric", "#", 1)
    found, _ = load_text(text.replace(loss, loss.replace("logits", "read(x)")))
    assert found is not None
    assert found.model is not None
    help = "`let logits = read(x)` for the loss to read, and `output logits = logits`"
    assert no_output(found.model, "logits").diagnostics[0].help == help
    assert load_text(text.replace(loss, f"let logits = read(x) {loss} output logits = logits"))[0] is not None


# ---------------------------------------------------------------- what is allowed and rarely meant


def test_a_parameter_of_each_row_is_refused_or_doubted():
    wrong = FILE.replace("param up: [embed, ffn]", "param up: [batch, embed, ffn]")
    (found,) = load_text(wrong)[1]
    assert (found.code, found.span and found.span.text) == ("E0407", "up")
    assert found.help == "without that axis it is the same for all rows: `[embed, ffn]`"
    (found,) = load_text(wrong, overrides=["fast.microbatches=1"])[1]
    assert (found.code, found.span and found.span.text) == ("W0315", "up")


def test_scores_of_each_position_with_itself_are_doubted():
    attention = "attend(q, k, v, over = seq, along = key, causal = true)"
    scores = "dot(softmax(dot(q, k, over = key), over = seq), v, over = seq)"
    (found,) = said(attention, scores)
    assert (found.code, found.span and found.span.text) == ("W0316", "dot(q, k, over = key)")
    right = f"dot(softmax({scores[12:33]}".replace("dot(q, k", "dot(q, rename(k, seq -> keys)")
    right += ", over = keys), rename(v, seq -> keys), over = keys)"
    assert load_text(FILE.replace(attention, right).replace("seq = 32", "seq = 32, keys = seq"))[1] == ()


def test_a_softmax_of_a_softmax_is_doubted():
    twice = "cross_entropy(softmax(logits, over = vocab), targets, over = vocab)"
    (found,) = said("cross_entropy(logits, targets, over = vocab)", twice)
    assert (found.code, found.severity, found.span and found.span.start) == (
        "W0317",
        "warning",
        FILE.index("cross_ent"),
    )


# ---------------------------------------------------------------- misspelled names


def one_slip(word: str, position: int, kind: str) -> str:
    """A word with a letter that is missing, written twice, exchanged with its neighbour or another one."""
    before, letter, after = word[:position], word[position], word[position + 1 :]
    return {
        "missing": before + after,
        "twice": before + letter + letter + after,
        "exchanged": before + after[:1] + letter + after[1:],
        "another": before + ("q" if letter != "q" else "j") + after,
    }[kind]


# Each kind of name, and where one of it stands in the file.
NAMES = {
    "function": ([*FUNCTIONS, "size"], H, "let h = NAME(x, x, x, x)"),
    "dtype": (DTYPES, "tokens: i64", "tokens: NAME"),
    "cast": (DTYPES, H, "let h = cast(x, NAME)"),
    "schedule": (SCHEDULES, "one_f_one_b(micro", "NAME(micro"),
    "optimizer": (OPTIMIZERS, "adamw(lr", "NAME(lr"),
    "learning rate": (LEARNING_RATES, "cosine(peak", "NAME(peak"),
    "initial value": (INITIAL, "~ normal(0.02)\n  param wo", "~ NAME(0.02)\n  param wo"),
    "data": (SOURCES, DATA, "NAME()"),
    "device": (DEVICES, DEVICE, "device = NAME()"),
    "link": (LINKS, "-> nvlink4", "-> NAME()"),
    "entry of train": ([*TRAIN.names, *CHOICES], F32, "NAME = 1"),
    "entry of a mesh": (MESH, DEVICE, "NAME = 1"),
    "measure": (MEASURES, "bubble <=", "NAME <="),
    "argument": ([slot.name for slot in FUNCTIONS["attend"].slots], "causal = true", "NAME = 1"),
    "argument of an optimizer": (OPTIMIZERS["adamw"].names, "weight_decay =", "NAME ="),
    "declaration": (set(DECLARATIONS) - {"import", "train", "expect"}, "axis batch", "NAME batch"),
    "declaration of a table": (("train", "expect"), "train {", "NAME {"),
    "import": (("import",), "axis batch", 'NAME "a.par" axis batch'),
    "statement": (STATEMENTS - {"loss", "return", "metric"}, H, "NAME h = x"),
    "rule": (("shard", "stage", "place", "recompute", "offload", "overlap"), "shard batch", "NAME batch"),
    "axis": (("batch", "embed", "heads", "vocab"), H, "let h = rms_norm(x, over = NAME)"),
    "mesh axis": (("data", "pipe"), "stage layer -> pipe", "stage layer -> NAME"),
    "block": (("attention",), "mlp(attention(x))", "mlp(NAME(x))"),
    "repeat": (("layer",), "stage layer", "stage NAME"),
    "value": (("logits", "targets", "tokens"), "loss cross_entropy(logits", "loss cross_entropy(NAME"),
}


@pytest.mark.soak
@given(st.data())
def test_a_misspelled_name_is_recognized(data: st.DataObject):
    """If one letter is missing, doubled, exchanged or another, of a name of four letters or more."""
    kind = data.draw(st.sampled_from(sorted(NAMES)))
    names, before, after = NAMES[kind]
    word = data.draw(st.sampled_from(sorted(name for name in names if len(name) > 3)))
    slip = data.draw(st.sampled_from(["missing", "twice", "exchanged", "another"]))
    position = data.draw(st.integers(1, len(word) - 2))
    wrong = one_slip(word, position, slip)
    others = [*names, *foreign.SETTINGS, *foreign.FUNCTIONS, *foreign.WORDS]
    # What is as close to another name is not known to be this one; and a word may be one of another framework.
    assume(wrong not in others and not any(near(wrong, name) for name in names if name != word))
    helps = [each.help or "" for each in said(before, after.replace("NAME", wrong))]
    assert any(f"did you mean `{word}`?" in help for help in helps), (wrong, helps)


def near(a: str, b: str) -> bool:
    """Whether a few letters make one word the other, of about the same length."""
    return abs(len(a) - len(b)) <= 2 and SequenceMatcher(None, a, b).ratio() > 0.6


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("before", "after", "help"),
    [
        ("gelu(", "geloo(", "did you mean `gelu`?"),
        ("gelu(", "GELU(", "did you mean `gelu`?"),
        ("rms_norm(x, over = embed)\n", "rmsnrom(x, over = embed)\n", "did you mean `rms_norm`?"),
        ("attend(q", "atend(q", "did you mean `attend`?"),
        ("axis batch", "aixs batch", "did you mean `axis`?"),
        ("return x + dot(a", "retrun x + dot(a", "did you mean `return`?"),
        ("loss cross", "lsos cross", "did you mean `loss`?"),
        ("-> nvlink4", "-> nvlnk4", "did you mean `nvlink4`?"),
        ("steps = 200", "stesp = 200", "did you mean `steps`?"),
    ],
)
def test_a_slip(before: str, after: str, help: str):
    first, *_ = said(before, after)
    assert first.help == help, first.render()
    assert corrected(FILE.replace(before, after, 1))[1] == []
