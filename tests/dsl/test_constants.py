"""Constants: a named number means in every place what the number itself would mean there."""

from __future__ import annotations

from pathlib import Path
from string import Template

import pytest

from partita.compiler.passes.build import build
from partita.compiler.text.graph import graph_text
from partita.dsl.load import load, load_text
from partita.dsl.spec import Spec
from partita.dsl.syntax.format import format_text

CONSTANTS = """\
const drop = 10%, std = 0.02, layers = 2
const keep = 1 - drop, last = size(vocab) - 1, rows = batch / 2, room = 80GiB, rate = 1e-3, held = 5%
"""
NUMBERS = {"drop": "10%", "std": "0.02", "layers": "2", "keep": "90%", "last": "(size(vocab) - 1)", "rows": "4"}
NUMBERS |= {"room": "80GiB", "rate": "1e-3", "held": "5%"}
FILE = Template("""\
axis batch = 8, embed = 4 * $layers, vocab = 16, half = $rows
block f(x: [batch, embed]) {
  param b: [embed] ~ normal($std / $keep)
  return dropout(x * $keep + b, $drop)
}
model m(x: [batch, embed], ids: i64[batch]) {
  param w: [vocab, embed] ~ normal($std)
  let h = x + embedding(minimum(ids + $layers, $last), w, over = vocab) / sqrt($layers)
  repeat $layers as layer {
    let h = f(h)
  }
  loss mean(slice(h, batch -> half, start = $rows)) * $std
}
mesh k(pipe = $layers, data = 1) {
  link = link(bandwidth = 100GB/s * $keep, latency = $layers * 1us)
}
layout l on k {
  stage layer -> pipe [1, $layers - 1]
}
layout placed on k {
  place m.w -> pipe[$layers - 2 .. $layers - 1]
}
schedule s = gpipe(microbatches = $rows)
train {
  layout = l
  data = stdlib(holdout = $held)
  optimizer = adamw(lr = $rate, weight_decay = 10 * $std, betas = [0.9, 1 - $std])
  steps = 10 * $layers
  eval = every($layers, batches = $rows)
}
expect {
  peak_memory <= $room * 90%
  bubble <= 8 * $drop
}
""")
NAMED = CONSTANTS + FILE.substitute({name: name for name in NUMBERS})


def loaded(text: str, *overrides: str) -> Spec:
    found, diagnostics = load_text(text, overrides=overrides)
    assert found is not None, [each.render() for each in diagnostics]
    assert "constant" not in "".join(each.message for each in diagnostics)
    return found


def test_a_constant_is_its_number() -> None:
    named, written = loaded(NAMED), loaded(FILE.substitute(NUMBERS))
    texts = [graph_text(build(each.model, "f32"), places=False) for each in (named, written) if each.model]
    assert len(texts) == 2
    assert texts[0] == texts[1]
    for part in ("axes", "meshes", "layout", "schedule", "train", "expect"):
        assert getattr(named, part) == getattr(written, part), part
    placed = [loaded(text, "layout=placed").layout for text in (NAMED, FILE.substitute(NUMBERS))]
    assert placed[0] == placed[1]


def test_it_follows_the_axes_that_it_is_computed_from() -> None:
    found = loaded(NAMED, "batch=16")
    assert found.axes["half"].size == 8
    assert found.schedule is not None
    assert found.schedule.call.arguments["microbatches"] == 8


@pytest.mark.parametrize("written", ["drop=0", "drop=0.5", "drop=50%", "drop=keep - 40%", "drop=size(embed) / 100"])
def test_the_command_line_overrides_it(written: str) -> None:
    text = "const drop = 10%, keep = 90%\naxis batch = 4, embed = 50\n"
    text += "model m(x: [batch, embed]) { param w: [embed] ~ ones() loss mean(dropout(x * w, drop)) + 0 * keep }\n"
    found, diagnostics = load_text(text, overrides=[written])
    assert found is not None, diagnostics


@pytest.mark.parametrize(
    ("override", "code", "text"),
    [
        ("drp=0", "E0315", "did you mean `drop`?"),
        ("drop=none", "E0202", "unknown axis or constant `none`"),
        ("drop=true", "E0306", "expected a number"),
        ("drop=drop", "E0311", "constant `drop` depends on itself"),
        ("drop=150%", "E0214", "the rate of `dropout`"),
        ("drop.rate=3", "E0315", "there is no `drop.rate` to override"),
    ],
)
def test_wrong_overrides(override: str, code: str, text: str) -> None:
    file = "const drop = 10%\naxis batch = 4\nmodel m(x: [batch]) {\n  param w: [batch] ~ ones()\n"
    file += "  loss mean(dropout(x * w, drop))\n}\n"
    found, diagnostics = load_text(file, overrides=[override])
    assert found is None
    assert [each.code for each in diagnostics] == [code]
    assert text in f"{diagnostics[0].message} {diagnostics[0].help}"


def test_what_a_body_binds_hides_it() -> None:
    text = (
        "const n = 2, s = 0.5, u = 3\naxis batch = 4\n"
        "model m(x: [batch], u: [batch]) {\n  param w: [] ~ ones()\n"
        "  repeat n as layer { let s = s * 2 }\n"  # carried, as any number bound before is
        "  let n = x * w\n  loss mean(n * u) * s\n}\n"
    )
    found, diagnostics = load_text(text)
    assert found is not None, diagnostics
    assert [each.message for each in diagnostics] == ["constant `u` is not used"]
    assert found.model is not None
    assert "multiply" in graph_text(build(found.model, "f32"))


def test_an_unused_one_is_said(tmp_path: Path) -> None:
    text = "const a = 1, _b = 2, c = 3\nconst d = c\naxis batch = d\nmodel m(x: [batch]) { loss mean(x) }\n"
    _, diagnostics = load_text(text)
    assert [(each.code, each.message) for each in diagnostics] == [("W0201", "constant `a` is not used")]
    (tmp_path / "parts.par").write_text(text.split("axis")[0])
    (tmp_path / "main.par").write_text('import "parts.par"\naxis batch = 3 * c\nmodel m(x: [batch]) { loss mean(x) }\n')
    found, diagnostics = load(tmp_path / "main.par")
    assert diagnostics == ()
    assert found is not None
    assert found.axes["batch"].size == 9


def test_the_importing_file_chooses(tmp_path: Path) -> None:
    (tmp_path / "parts.par").write_text("const n = 2, width = n\naxis batch = n\n")
    (tmp_path / "main.par").write_text(
        'import "parts.par"\nconst n = 5\nmodel m(x: [batch]) { loss mean(x) * width }\n'
    )
    found, diagnostics = load(tmp_path / "main.par")
    assert diagnostics == ()
    assert found is not None
    assert found.axes["batch"].size == 5
    found, _ = load(tmp_path / "main.par", ["n=7"])
    assert found is not None
    assert found.axes["batch"].size == 7


@pytest.mark.parametrize(
    ("one", "other"), [("const n = 2", "axis n = 2"), ("axis n = 2", "const n = 2"), ("const n = 2", "const n = 3")]
)
def test_two_imports_may_not_disagree(tmp_path: Path, one: str, other: str) -> None:
    (tmp_path / "a.par").write_text(one)
    (tmp_path / "b.par").write_text(other)
    (tmp_path / "main.par").write_text('import "a.par"\nimport "b.par"\n')
    assert [each.code for each in load(tmp_path / "main.par")[1]] == ["E0012"]


def test_its_form() -> None:
    assert format_text("const   a=1 ,b =  2\nconst c=a*b\naxis d=c\n") == (
        "const a = 1, b = 2\nconst c = a * b\n\naxis d = c\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "axis const = 4\nmodel m(const: [const]) { let x = const * const  loss mean(x) - const(const) }\n"
        "block const(const: [const]) { return mean(const) }",
        "mesh const(const = 2)\nlayout const on const { shard const -> const }\naxis const = 2\n"
        "model const(x: [const]) { param const: [const] ~ ones() repeat 2 as r { let x = x + const } loss mean(x) }",
    ],
)
def test_the_word_is_a_name_elsewhere(text: str) -> None:
    found, diagnostics = load_text(text)
    assert found is not None, [each.render() for each in diagnostics]
    assert "const (" not in format_text(text)
    assert load_text(format_text(text))[0] is not None
