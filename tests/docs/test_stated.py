"""What the reference states of optimizers is what they do."""

from __future__ import annotations

import re
import tomllib

from partita.compiler.passes.update import CLIP_EPSILON
from partita.compiler.pipeline import compile_spec
from tests.docs.pages import PAGES, ROOT
from tests.files import checked

PAGE = "".join((ROOT / "docs" / "reference" / f"{name}.md").read_text() for name in ("layouts", "training"))

# A parameter for each function that reads one in a way of its own, by the function's name.
FILE = """axis batch = 4, seq = 4, embed = 4, ffn = 6, vocab = 8, experts = 3, chosen = 2, kernel = 3, out = 5
axis places = 4
model m(x: [batch, seq, embed], ids: i64[batch, seq]) {
  param dot_: [embed, ffn] ~ normal(0.1)
  param routed_dot_: [experts, embed, ffn] ~ normal(0.1)
  param conv_: [kernel, embed, out] ~ normal(0.1)
  param embedding_: [vocab, embed] ~ normal(0.1)
  param gather_: [batch, vocab, embed] ~ normal(0.1)
  param rms_norm_: [embed] ~ ones()
  param multiply_: [seq, embed] ~ ones()
  let y = rms_norm(x, over = embed, scale = rms_norm_) * multiply_
  let _, chosen_ = top_k(sum(expand(y, [experts]), over = embed), experts -> chosen)
  let a = dot(y, dot_, over = embed)
  let b = routed_dot(y, routed_dot_, chosen_, over = embed, along = experts)
  let c = conv(y, conv_, [seq] -> [places], over = embed, padding = 1)
  let d = embedding(ids, embedding_, over = vocab)
  let e = gather(gather_, ids, along = vocab)
  loss mean(a) + mean(b) + mean(c) + mean(d) + mean(e)
}
train { data = random()  optimizer = each  steps = 1 }
optimizer each {
  update matrices -> lion(lr = 0.1)
  update all -> sgd(lr = 0.1, weight_decay = 0.1)
}
"""


def named(sentence: str) -> set[str]:
    """The functions that a sentence of the page names."""
    (found,) = re.findall(sentence, PAGE)
    return set(re.findall(r"`(\w+)`", found))


def test_weight_decay_and_matrices_are_of_what_the_page_names():
    state = compile_spec(checked(FILE, "read.par"))
    read = {parameter.name.removeprefix("m.").removesuffix("_"): parameter for parameter in state.forward.parameters}
    decaying = {name for name, parameter in read.items() if parameter.decays}
    assert named(r"`weight_decay` applies to parameters that ([^;]*) reads; `decay = all`") == decaying
    matrices = {name for name, parameter in read.items() if state.rules[parameter.name].call.name == "lion"}
    assert named(r"\| `matrices` \| parameters of two axes or more that (.*) reads;") == matrices


def test_clipping_is_by_the_number_that_the_page_names():
    assert re.findall(r"multiplied by `clip / \(norm \+ (\S+)\)`", PAGE) == [f"{CLIP_EPSILON:.0e}".replace("e-0", "e-")]


def test_what_is_stored_of_frozen_parameters_only_param_splits():
    (splitting,) = re.findall(r"which have neither gradients nor state, only `(\w+)` splits", PAGE)
    frozen = FILE.replace("optimizer each {", "optimizer each {\n  freeze dot_")
    for rule in ("state", "grad", "param"):
        layout = f"mesh two(data = 2) {{ device = cpu }}\nlayout split on two {{ shard {rule} -> data }}\n"
        state = compile_spec(checked(frozen + layout, "frozen.par"))
        (found,) = [each for each in state.sharded.graph.parameters if each.name == "m.dot_"]
        parts = found.master.elements // found.value.type.elements
        assert parts == (2 if rule == splitting else 1), rule


def test_extras_that_are_named_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for page in PAGES:
        named = re.findall(r"pip install '(?:partita|\.)\[([\w,]+)\]'", page.read_text(encoding="utf-8"))
        assert {each for names in named for each in names.split(",")} <= set(extras), page.name
