"""What people bring along from other frameworks and languages gets the help that leads on, and never a wrong one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import partita.dsl.functions.rules  # noqa: F401  (it fills the table of functions)
from partita.dsl.advice import foreign
from partita.dsl.advice.report import nearest
from partita.dsl.config.builtins import (
    CHECKPOINT,
    CHOICES,
    DATA,
    EVALUATION,
    INITIAL,
    LEARNING_RATES,
    OPTIMIZERS,
    SAMPLED,
    SCHEDULES,
    TRAIN,
    Keyword,
)
from partita.dsl.config.overrides import OVERRIDDEN
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.functions.signatures import FUNCTIONS
from partita.dsl.load import load_text
from partita.dsl.syntax.lexer import language
from partita.dsl.types import DTYPES
from tests.dsl.advice import followed

FILE = """\
axis batch = 8, seq = 8, embed = 6, heads = 2, vocab = 16, ffn = 12
block mlp(x: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.02)
  return sum(dot(x, up, over = embed), over = ffn)
}
model m(x: [batch, embed], ids: i64[batch]) {
  param w: [embed] ~ ones()
  repeat 4 as layer {
    param v: [embed] ~ ones()
    let x = x * v
  }
  BODY
  loss mean(x * w) + mean(mlp(x))
}
mesh k(data = 2, pipe = 2)
layout l on k {
  shard batch -> data
  stage layer -> pipe
}
schedule fast = one_f_one_b(microbatches = 4)
train {
  data = random()
  optimizer = adamw(lr = cosine(peak = 1e-3, total = 10), weight_decay = 0.1)
  steps = 1
  clip = 1.0
}
"""


def place(diagnostic: Diagnostic) -> tuple[str, str, int]:
    return diagnostic.code, diagnostic.message, diagnostic.span.start if diagnostic.span else 0


def helps(text: str, *overrides: str) -> list[str]:
    """The help of each error of a file."""
    found, diagnostics = load_text(text, "m.par", overrides=overrides)
    assert found is None, text
    for each in diagnostics:
        new = followed(each)
        left = load_text(new, "m.par", overrides=overrides)[1] if new is not None else ()
        assert place(each) not in map(place, left), each.render()
    return [each.help or "" for each in diagnostics if each.severity == "error"]


def help_in(body: str) -> str:
    """The help of the first error of a statement in the model."""
    return helps(FILE.replace("BODY", body))[0]


def changed(before: str, after: str) -> str:
    """The help of the first error of the file with a part of it written otherwise."""
    assert before in FILE
    return helps(FILE.replace("BODY", "").replace(before, after))[0]


# ---------------------------------------------------------------- overrides


@pytest.mark.few(25)
@pytest.mark.parametrize(
    ("override", "help"),
    [
        ("lr=1e-3", "did you mean `train.optimizer.lr`?"),
        ("learning_rate=1e-3", "did you mean `train.optimizer.lr`?"),
        ("train.lr=1e-3", "did you mean `train.optimizer.lr`?"),
        ("train.optimizer.learning_rate=1e-3", "did you mean `lr`?"),
        ("steps=3", "did you mean `train.steps`?"),
        ("max_iters=3", "did you mean `train.steps`?"),
        ("train.step=3", "did you mean `train.steps`?"),
        ("pipe=4", "did you mean `k.pipe`?"),
        ("mesh.pipe=4", "did you mean `k.pipe`?"),
        ("pp=4", "did you mean `k.pipe`?"),
        ("dp=4", "did you mean `k.data`?"),
        ("pipeline_model_parallel_size=2", "did you mean `k.pipe`?"),
        ("k.pp=4", "did you mean `pipe`?"),
        ("tp=4", "that is a mesh axis: `mesh … (tensor = 2)`"),
        ("data=2", "did you mean `k.data` or `train.data`?"),
        ("grad_clip=1", "did you mean `train.clip`?"),
        ("train.max_grad_norm=1", "did you mean `train.clip`?"),
        ("peak=1", "did you mean `train.optimizer.lr.peak`?"),
        ("weight_decay=0", "did you mean `train.optimizer.weight_decay`?"),
        ("wd=0", "did you mean `train.optimizer.weight_decay`?"),
        ("microbatches=2", "did you mean `fast.microbatches`?"),
        ("gradient_accumulation_steps=2", "did you mean `fast.microbatches`?"),
        ("batch_size=4", "did you mean `batch`?"),
        ("train.batch_size=4", "did you mean `batch`?"),
        ("seq_len=4", "did you mean `seq`?"),
        ("block_size=4", "did you mean `seq`?"),
        ("hidden_size=4", "did you mean `embed`?"),
        ("d_model=4", "did you mean `embed`?"),
        ("vocab_size=4", "did you mean `vocab`?"),
        ("num_attention_heads=4", "did you mean `heads`?"),
        ("intermediate_size=4", "did you mean `ffn`?"),
        ("n_layers=4", "the number of layers is that of a `repeat` in the model"),
        ("epochs=4", "training length is given in steps: `train.steps`"),
        ("world_size=8", "the number of ranks is the product of the mesh's axes"),
        ("micro_batch_size=8", "the schedule's `microbatches`"),
        ("dtype=bf16", "did you mean `train.precision`?"),
        ("train=3", "such as `train.data`"),
        ("k=3", "such as `k.data`, `k.pipe`"),
        ("fast=3", "such as `fast.microbatches`"),
        ("train.optimizer.lr=.5", "numbers start with a digit: `0.5`"),
        ("batch=8,16", "expected the end of input"),
        ("train.checkpoint=every(2, dir=/tmp/ck)", 'write `"/tmp/ck"`, in double quotes'),
        ("train.data=text(~/a/*.txt)", 'write `"~/a/*.txt"`, in double quotes'),
        ("schedule=1f1b", "its name is `one_f_one_b`"),
        ("train.schedule=1F1B(microbatches=2)", "its name is `one_f_one_b`"),
        ("schedule=fast(microbatches=8)", "instead: `fast.microbatches=8`"),
        ("train.schedule=fast(8)", "instead: `fast.microbatches=8`"),
        ("schedule=fast()", "instead: `schedule=fast`"),
        ("layout=l(2)", "write `l`"),
    ],
)
def test_an_override_of_what_is_called_otherwise(override: str, help: str) -> None:
    (found,) = helps(FILE.replace("BODY", ""), override)
    assert help in found


@pytest.mark.parametrize(
    "name", ["foo", "bar", "xyzzy", "a", "x", "verbose", "fairscale", "n", "i", "gpt", "local_rank"]
)
def test_what_is_nowhere_near_is_not_guessed(name: str) -> None:
    assert helps(FILE.replace("BODY", ""), f"{name}=1") == [OVERRIDDEN]


def test_an_override_of_a_schedule_where_there_is_none() -> None:
    text = FILE.replace("BODY", "").replace("schedule fast = one_f_one_b(microbatches = 4)\n", "")
    assert helps(text, "schedule.microbatches=2") == ["`schedule=one_f_one_b(microbatches=…)` chooses one"]
    assert load_text(text, overrides=["schedule=one_f_one_b(microbatches=2)"])[0] is not None


ENDS = ("data", "optimizer", "steps", "clip", "seed", "microbatches", "lr", "peak", "total", "weight_decay", "pipe")


@given(st.sampled_from(ENDS))
def test_what_is_suggested_can_be_overridden(end: str) -> None:
    """Every full name that is suggested is one: it is not refused for being unknown."""
    (help,) = helps(FILE.replace("BODY", ""), f"{end}=1")
    for name in re.findall(r"`([^`]+)`", help):
        _, diagnostics = load_text(FILE.replace("BODY", ""), overrides=[f"{name}=1"])
        assert not {"E0315", "E0303", "E0209", "E0313"} & {each.code for each in diagnostics}, name


def test_the_axes_of_a_mesh_are_listed_and_nothing_else() -> None:
    assert helps(FILE.replace("BODY", ""), "k.foo=3") == ["its axes: `data` and `pipe`"]
    assert changed("stage layer -> pipe", "stage layer -> foo") == "its axes: `data` and `pipe`"
    assert changed("shard batch -> data", "shard batch -> tp") == "its axes: `data` and `pipe`"
    assert changed("shard batch -> data", "shard batch -> dp") == "did you mean `data`?"


# ---------------------------------------------------------------- functions


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("statement", "help"),
    [
        ("let y = lookup(x, ids)", "`embedding(ids, table, over = axis)` looks up rows of a table"),
        ("let y = take_along_dim(x, ids)", "`gather(x, ids, along = axis)`"),
        ("let y = argmax(x)", "`arg_max(x, over = axis)`"),
        ("let y = cumprod(x)", "`exp(cumsum(log(x), over = axis))`"),
        ("let y = pad(x)", "`concat(x, zeros([…]), [axis, more] -> longer)`"),
        ("let y = scatter_add(x, ids)", "`sum_by(x, ids, edges -> nodes)`"),
        ("let y = GRU(x)", "`scan seq { … }`"),
        ("let y = matmul(x, w)", "a product is `dot(a, b, over = axis)`"),
        ("let y = Linear(x)", "a product is `dot(a, b, over = axis)`"),
        ("let y = ReLU(x)", "did you mean `relu`?"),
        ("let y = all_reduce(x)", "communication is implicit"),
        ("let y = x.view(embed)", "`split(x, axis -> [slow, fast])`"),
        ("let y = torch.sum(x)", "did you mean `sum`?"),
        ("let y = softmax(x, axis = embed)", "`over = …`"),
        ("let y = softmax(x, dim = embed)", "did you mean `over`?"),
        ("let y = softmax(x, -1)", "axes are given by name, not by position"),
        ("let y = sum(x, over = 1)", "axes are given by name, not by position"),
        ("let y = max(x, w)", "`maximum(a, b)` and `minimum(a, b)`"),
        ("let y = dropout(x, p = 0.1)", "did you mean `rate`?"),
        ("let y = cast(x, float32)", "did you mean `f32`?"),
        ("let y = cast(x, half)", "did you mean `bf16`?"),
    ],
)
def test_a_function_of_another_framework(statement: str, help: str) -> None:
    assert help in help_in(statement)


@pytest.mark.few(85)
@pytest.mark.parametrize("name", sorted(foreign.FUNCTIONS))
def test_no_function_of_ours_is_passed_off_as_another(name: str) -> None:
    """No guess by letters, such as `greater` for `gather`."""
    assert name not in FUNCTIONS
    if name in language().words:
        return  # an axis, or another word of the grammar
    assert help_in(f"let y = {name}(x)") == foreign.FUNCTIONS[name]


def test_every_function_that_is_named_exists() -> None:
    helps = (*foreign.FUNCTIONS.values(), *foreign.SIGNS.values(), *foreign.MEMBERS.values())
    known = {*FUNCTIONS, "size", *INITIAL, *SAMPLED, *OPTIMIZERS}
    named = {name for help in helps for text in re.findall(r"`([^`]+)`", help) for name in re.findall(r"(\w+)\(", text)}
    assert {"embedding", "dot", "attend"} <= named
    assert named - known == set()


ARGUMENTS = {
    setting.name
    for table in (SCHEDULES, OPTIMIZERS, LEARNING_RATES, DATA, INITIAL, SAMPLED, EVALUATION, CHECKPOINT)
    for signature in table.values()
    for setting in signature.settings
}
SLOTS = {slot.name for function in FUNCTIONS.values() for slot in function.slots}
# As the specs and the pages call them.
AXES = {"batch", "seq", "embed", "width", "hidden", "features", "ffn", "vocab", "heads", "groups", "kv_heads", "key"}


def test_every_setting_that_is_meant_exists() -> None:
    ours = {name for names in foreign.SETTINGS.values() for name in names}
    tables = {name for table in (SCHEDULES, OPTIMIZERS, LEARNING_RATES, DATA, INITIAL) for name in table}
    words = {
        word
        for signature in DATA.values()
        for setting in signature.settings
        if isinstance(setting.kind, Keyword)
        for word in setting.kind.choices
    }
    known = words | {*TRAIN.names, *CHOICES, *ARGUMENTS, *SLOTS, *AXES, *DTYPES, *tables, "param", "grad", "state"}
    assert ours - known - {"data", "tensor", "pipe", "context"} == set()


# ---------------------------------------------------------------- ways to write


@pytest.mark.few(18)
@pytest.mark.parametrize(
    ("statement", "help"),
    [
        ("x = x * w", "values are named with `let`: `let x = …`"),
        ("y, z = x * w", "values are named with `let`: `let y, z = …`"),
        ("x += w", "values are named with `let`: `let x = x + …`"),
        ("self.w = x", "parameters are declared with `param`"),
        ("u: [embed] ~ ones()", "a parameter is declared with `param`: `param u: "),
        ("for i in range(4) { }", "`repeat 4 as layer { … }`"),
        ("repeat 3 { let x = x * w }", "`repeat 4 as layer { … }`"),
        ("return x", "a model ends with `loss …`"),
        ("def f(x):", "a part of a model is a block"),
        ("let y = x if true else w", "`where(condition, a, b)`"),
        ("let y = x ** 2", "`x * x`"),
        ("let y = x @ w", "`dot(a, b, over = axis)`"),
        ("let y = 0 < x < 1", "`a < b and b < c`"),
        ("let y = x > 0 && x < 1", "joined by `and`"),
        ("let y = !(x > 0)", "inverted by `not`"),
        ("let y = x * .5", "numbers start with a digit"),
        ("let y = x[0]", "`gather(x, 0, along = axis)`"),
        ("let y = x % 2", "`x - n * floor(x / n)`"),
        ("let y = x.T", "axes are matched by name"),
        ("let y = x.shape", "`size(axis)`"),
        ("let y: [batch] = x", "`let y = …`"),
        ("let y = relu(x);", "statements need no separator"),
        ("let y = mean(x, over = (batch, embed))", "brackets"),
        ("let y = True", "did you mean `true`?"),
        ("let y = None", "omit an argument"),
        ("param b: [embed] = zeros()", "write `~`"),
        ("param b: [embed]", "follows `~`"),
        ("param b: [embed] ~ zeros", "write `zeros()`"),
        ("param b[embed] ~ zeros()", "insert `:`"),
        ("param b: [embed, 3] ~ zeros()", "declare `axis name = 3`"),
        ("param b: [embed] ~ normal(std = 0.02)", "did you mean `deviation`?"),
        ("loss = mean(x)", "it takes no `=`"),
        ("// a comment", "comments start with `#`"),
        ("repaet 3 as layer { }", "did you mean `repeat`?"),
        ("let y = x × w", "a product is `a * b`"),
        ("let größe = x", "names consist of the letters a to z and A to Z, digits and `_`"),
    ],
)
def test_a_statement_written_as_elsewhere(statement: str, help: str) -> None:
    assert help in help_in(statement)


@pytest.mark.few(19)
@pytest.mark.parametrize(
    ("before", "after", "help"),
    [
        ("axis batch", "axes batch", "did you mean `axis`?"),
        ("axis batch", "import torch\naxis batch", '`import "file.par"`'),
        ("axis batch", "from torch import nn\naxis batch", '`import "file.par"`'),
        ("block mlp", "def mlp", "a part of a model is a block"),
        ("model m(x: [batch, embed]", "model m(x", "`x: [batch, embed]`"),
        ("model m(x: [batch, embed]", "model m(x: [8, embed]", "declare `axis name = 8`"),
        ("model m(x: [batch, embed]", "model m(x: float32[batch, embed]", "did you mean `f32`?"),
        ("mesh k(data = 2, pipe = 2)", "mesh k(2, 2)", "the axes of a mesh have names"),
        ("mesh k(data = 2, pipe = 2)", "mesh k(data: 2, pipe: 2)", "write `=`"),
        ("shard batch -> data", "shard batch = data", "write `->`"),
        ("shard batch -> data", "batch -> data", "a rule begins with a keyword"),
        ("shard batch -> data", "shard batch -> (data, pipe)", "`-> data, tensor`"),
        ("shard batch -> data", "shard params -> data", "did you mean `param`?"),
        ("shard batch -> data", "shard optimizer_state -> data", "did you mean `state`?"),
        ("shard batch -> data", "replicate w", "is replicated"),
        ("one_f_one_b(microbatches = 4)", "1f1b(microbatches = 4)", "`one_f_one_b`"),
        ("steps = 1", "steps = 1 schedule = 1f1b(microbatches = 4)", "`one_f_one_b`"),
        ("one_f_one_b(microbatches = 4)", "gpipe", "`gpipe(microbatches = 8)`"),
        ("one_f_one_b(microbatches = 4)", "interleaved(microbatches = 4)", "did you mean `interleaved_1f1b`?"),
        ("shard batch -> data", "shard batch -> data,", "remove the comma"),
        ("layout l on k {", "layout l(k) {", "`layout l on … {`"),
        ("axis batch = 8", "batch = 8\naxis other = 8", "`axis batch = …`"),
        ("axis batch = 8", "let batch = 8\naxis other = 8", "`axis batch = …`"),
        ("train {", "train = {", "settings are written in braces"),
        ("train {", "train(steps = 3) {", "settings are written in braces"),
        ("ids: i64[batch]) {", "ids: i64[batch]):", "a body is written in braces"),
        ("ids: i64[batch]) {", "ids: i64[batch]) -> [batch] {", "a body is written in braces"),
        ("model m(x: [batch, embed], ids: i64[batch]) {", "model m {", "`model m(x: [batch, embed]) {`"),
        ("repeat 4 as layer", "repeat layer 4", "`repeat 4 as layer { … }`"),
        ("param w: [embed]", "param w: embed", "axes are written in brackets: `[embed]`"),
        ("param w: [embed]", "param w", "a parameter has a type"),
        ("adamw(lr", "torch.optim.AdamW(lr", "did you mean `adamw`?"),
        ("steps = 1", "steps: 1", "write `=`"),
        ("steps = 1", "steps = 1, seed = 3", "entries are not separated by commas"),
        ("steps = 1", "epochs = 1", "`train.steps`"),
        ("steps = 1", "steps = 1 batch_size = 3", "the batch is an axis"),
        ("steps = 1", "steps = 1 lr = 3", "the learning rate is the optimizer's"),
        ("steps = 1", "steps = 1 scheduler = 3", "the learning rate schedule is"),
        ("steps = 1", "steps = 1 precision = fp16", "did you mean `bf16`?"),
        ("data = random()", 'data = "corpus.txt"', 'write `text("corpus.txt")`'),
        ("adamw(lr =", "adam(lr =", "did you mean `adamw`?"),
        ("weight_decay = 0.1", "betas = (0.9, 0.95)", "brackets"),
        ("weight_decay = 0.1", "beta1 = 0.9", "did you mean `betas`?"),
    ],
)  # fmt: skip
def test_a_declaration_written_as_elsewhere(before: str, after: str, help: str) -> None:
    assert help in changed(before, after)


@pytest.mark.soak
@given(st.text(max_size=300), st.data())
def test_any_text_around_an_unexpected_place(text: str, data: st.DataObject) -> None:
    """Looking something up never fails, whatever stands there."""
    position = data.draw(st.integers(0, len(text)))
    wanted = data.draw(st.sets(st.sampled_from(["LET", "PLUS", "EQUAL", "TILDE", "NAME", "RBRACE", "COLON"])))
    found = foreign.written_here(text, position, wanted)
    assert found is None or "\\" not in found


@given(st.text(max_size=12), st.lists(st.text(max_size=12), max_size=8))
def test_the_nearest_of_any_words(word: str, words: list[str]) -> None:
    found = nearest(word, words)
    assert found is None or found in words
    assert word not in words or not word or found is not None


@pytest.mark.parametrize(
    ("word", "words"),
    [("sin", ["min"]), ("pad", ["add"]), ("gather", ["greater"]), ("foo", ["floor"]), ("", ["a"]), ("tan", ["tanh2x"])],
)
def test_words_that_are_not_near(word: str, words: list[str]) -> None:
    assert nearest(word, words) is None
