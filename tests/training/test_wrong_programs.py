"""What the compiler refuses: the code, the place, and that the message names what is meant."""

from __future__ import annotations

import pytest

from partita.compiler.pipeline import compile_spec
from partita.dsl.diagnostic import Refused
from partita.dsl.load import load_text
from tests.files import checked

MODEL = """axis batch = 8, seq = 4, embed = 4, ffn = 3
model m(x: [batch, embed]) {{
  param w: [embed, ffn] ~ normal(1.0)
  {before}
  repeat {turns} as layer {{
    param v: [embed] ~ ones()
    {inside}
  }}
  loss {loss}
}}
mesh line({mesh})
layout cut on line {{
  {rules}
}}
schedule s = {schedule}
train {{ model = m layout = cut schedule = s data = random() optimizer = sgd(lr = 0.1) steps = 1 }}
"""

USUAL = {
    "before": "let h = x * 1.0",
    "turns": 4,
    "inside": "let h = h * v",
    "loss": "mean(h * h) + 0.1 * mean(w * w)",
    "mesh": "pipe = 2",
    "rules": "stage layer -> pipe",
    "schedule": "one_f_one_b(microbatches = 4)",
}


def refused(**changes) -> tuple:
    text = MODEL.format(**{**USUAL, **changes})
    try:
        compile_spec(checked(text, "m.par"))
    except Refused as error:
        return error.diagnostics
    return ()


def test_the_usual_compiles():
    assert refused() == ()


CASES = [
    ("E0412", "`pipe`", {"rules": "stage layer -> pipe\n  shard batch -> pipe"}),
    ("E0402", "`data` of 2", {"mesh": "pipe = 2, data = 2"}),
    ("E0402", "`pipe` of 2", {"rules": ""}),
    ("E0403", "8 stages", {"mesh": "pipe = 8"}),
    ("E0404", "counts", {"rules": "stage layer -> pipe [1, 1]"}),
    ("E0404", "counts", {"rules": "stage layer -> pipe [1, 1, 2]"}),
    ("E0404", "`interleaved_1f1b` is for 2 stages on each rank, and layout", {
        "mesh": "data = 2", "rules": "shard batch -> data",
        "schedule": "interleaved_1f1b(microbatches = 2, chunks = 2)"}),
    ("E0404", "stage 1 of 2 is empty", {"rules": "place w -> pipe[0]"}),
    ("E0404", "no stage 7", {"rules": "stage layer -> pipe\n  place w -> pipe[7]"}),
    ("E0406", "3 microbatches", {"schedule": "gpipe(microbatches = 3)"}),
    ("E0407", "`sqrt(mean(h * h))`", {"loss": "sqrt(mean(h * h)) + mean(w)"}),
    ("E0407", "`exp(mean(h))`", {"loss": "exp(mean(h)) + mean(w)"}),
    ("E0407", "`mean(h) * mean(h)`", {"loss": "mean(h) * mean(h) + mean(w)"}),
    ("E0407", "softmax(h, over = batch)", {"inside": "let h = softmax(h, over = batch) * v"}),
    ("E0409", "is not a block or repeat of the model", {"rules": "stage layer -> pipe\n  recompute v.layer"}),
    ("E0409", "is not a block, repeat, parameter or", {"rules": "stage layer -> pipe\n  place v.layer -> pipe[0]"}),
]  # fmt: skip


def test_nothing_can_be_recomputed_where_there_are_neither_repeats_nor_blocks():
    text = """axis batch = 4
model m(x: [batch]) { param w: [batch] ~ ones()  loss mean(x * w) }
mesh ranks(data = 1)
layout cut on ranks { recompute all }
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 }
"""
    with pytest.raises(Refused) as refusal:
        compile_spec(checked(text, "m.par"))
    (found,) = refusal.value.diagnostics
    assert found.code == "E0409"
    assert "the model has neither repeats nor blocks" in found.message
    assert (found.span.line, found.span.column) == (4, 33)


@pytest.mark.parametrize(("code", "text", "changes"), CASES)
def test_is_refused(code: str, text: str, changes: dict):
    found = refused(**changes)
    assert [d.code for d in found] == [code], [d.render() for d in found]
    assert text in found[0].message
    assert found[0].span is not None, "a diagnostic has a place"
    assert found[0].help is not None, "a diagnostic proposes a fix"


def test_one_microbatch_lifts_the_rule():
    assert refused(loss="sqrt(mean(h * h)) + mean(w)", schedule="gpipe(microbatches = 1)") == ()


def test_a_sum_over_inputs_alone_is_no_part():
    """The number of positive inputs is computed over the whole batch first."""
    assert refused(loss="sum(h) / sum(cast(x > 0.0, f32)) + mean(w)") == ()


def test_backwards():
    """A value cannot flow to an earlier stage."""
    changes = {"before": "let g = x * mean(w)  let h = g", "rules": "place g -> pipe[1]\n  place layer -> pipe[0]"}
    text = MODEL.format(**{**USUAL, **changes})
    spec, diagnostics = load_text(text, "m.par")
    assert spec is not None, "\n\n".join(d.render() for d in diagnostics)
    with pytest.raises(Refused) as refused_:
        compile_spec(spec)
    assert [d.code for d in refused_.value.diagnostics] == ["E0405"]
