"""`verify` holds the single device against an interpreter of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from partita.cli.main import main
from partita.compiler import pipeline
from partita.compiler.graph import Graph
from partita.compiler.ops.pointwise import Constant
from partita.compiler.passes.differentiate import differentiate
from partita.dsl.load import load
from partita.runtime.verification.experiment import experiments
from partita.runtime.verification.figures import TOLERANCE
from partita.runtime.verification.meaning import Meaning, compare_meaning
from tests.files import ROOT, SPECS, checked

FILES = ROOT / "tests" / "planted" / "files"
TIED = (FILES / "tied_and_stopped.par").read_text(encoding="utf-8")

MODEL = """axis batch = 8, embed = 6, ffn = 10, seq = 4, vocab = 20
model m(x: [batch, embed], wanted: [batch, embed], ids: i64[batch]) {
  param w: [embed, ffn] ~ normal(0.4)
  param v: [ffn, embed] ~ normal(0.4)
  param b: [ffn] ~ zeros()
  param table: [vocab, ffn] ~ normal(0.4)
  let h = dot(x, w, over = embed)
  let y = dot(VALUE + embedding(ids, table, over = vocab), v, over = ffn)
  loss mse(y, wanted)
}
adapters beside { lora w -> lora(rank = 2, alpha = 3, dropout = 30%)  lora v -> dora(rank = 2)  freeze all }
train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }
"""


def compared(text: str) -> Meaning:
    return compare_meaning(next(experiments(checked(text, "part.par"), allow_python=True)).point, "help")


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[Graph], Graph]) -> None:
    """Every graph is differentiated with a mistake."""
    monkeypatch.setattr(pipeline, "differentiate", lambda graph: change(differentiate(graph)))


def without_contribution(name: str, number: int) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        found = [each for each in graph.gradients if each.parameter == name]
        return evolve(graph, gradients=tuple(each for each in graph.gradients if each is not found[number]))

    return change


def test_a_model_with_what_has_no_gradient_is_what_it_means():
    found = compared(TIED)
    assert (found.compared, found.reason, found.diagnostics) == (9, None, ())
    assert found.error <= TOLERANCE


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["siamese.w1", "siamese.w2", "siamese.gain"])
def test_a_lost_contribution_is_found(name: str, number: int, monkeypatch: pytest.MonkeyPatch):
    planted(monkeypatch, without_contribution(name, number))
    (found,) = compared(TIED).diagnostics
    assert found.code == "E0707"
    assert found.message == f"the gradient of `{name}` on one device is not what the file means"
    assert found.span.text == name.removeprefix("siamese.")


def test_gradients_of_twice_the_loss_are_found(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path):
    monkeypatch.setattr("partita.compiler.passes.differentiate.Constant", lambda _, dtype: Constant(2.0, dtype))
    (found,) = compared(TIED).diagnostics
    assert found.notes[-1] == "and 5 more of 9"
    (tmp_path / "tied.par").write_text(TIED, encoding="utf-8")
    assert main(["verify", str(tmp_path / "tied.par")]) == 1
    output = capsys.readouterr()
    assert "error[E0707]" in output.err
    assert "execution    equal" in output.out
    assert "meaning      wrong    9 tensors of one device compared with the file's meaning" in output.out


@pytest.mark.parametrize(
    "value",
    [
        "gelu(h + b)",
        "h + stop_gradient(round(h) - h) + b",  # straight through
        "floor(h) + h + b",
        "sign(h) * h + b",
        "where(h > 0, h, 0.1 * h) + b",
        "maximum(h, b)",
        "dropout(relu(h), rate = 0.3) + b",
        "cast(h > 0, f32) * h + stop_gradient(b) + b",
        "relu(b + h * 0)",
        "maximum(h, h * 1) + relu(0 * h) + b",
        "abs(h - h) + b + h * b",
    ],
)
def test_what_is_smooth_or_not_is_compared(value: str, monkeypatch: pytest.MonkeyPatch):
    text = MODEL.replace("VALUE", value)
    # As declared: `b` is zero, at which some have a bend.
    monkeypatch.setattr("partita.runtime.verification.experiment.of_order_one", lambda call: call)
    found = compared(text)
    assert (found.reason, found.diagnostics) == (None, ()), value
    assert found.compared > 4
    assert found.error <= TOLERANCE


def test_products_with_adapters_are_compared():
    found = compared(MODEL.replace("VALUE", "gelu(h + b)").replace("steps", "adapters = beside  steps"))
    assert (found.reason, found.diagnostics) == (None, ())
    assert found.compared == 1 + 5  # the loss, and the gradients of both adapters


def test_ids_that_are_out_of_range_in_the_smaller_proxy_are_compared():
    text = MODEL.replace("VALUE", "h + b").replace("embedding(ids", "embedding(zeros_like(ids) + 19")
    text = text.replace("loss mse(y, wanted)", "loss mse(y, wanted) + cross_entropy(h, ids * 2, over = ffn)")
    assert (compared(text).reason, compared(text).diagnostics) == (None, ())


def test_the_accuracy_of_equal_logits_is_compared():
    text = MODEL.replace("VALUE", "h + b").replace("mse(y, wanted)", "mse(y, wanted)\n  metric right = RIGHT")
    found = compared(text.replace("RIGHT", "accuracy(h - h, remainder(ids, 3), over = ffn)"))
    assert (found.reason, found.diagnostics) == (None, ())


def test_a_scan_is_compared_and_products_of_eight_bits_are_not():
    scanned = """axis batch = 4, seq = 3, embed = 6
model m(x: [batch, seq, embed], wanted: [batch, embed]) {
  param w: [embed] ~ normal(0.4)
  let s = zeros([batch, embed])
  scan seq { let s = tanh(s * w + x + stop_gradient(s)) }
  loss mse(s, wanted)
}
train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }
"""
    assert (compared(scanned).compared, compared(scanned).diagnostics) == (2, ())
    eight = TIED.replace("precision = f64", "precision = fp8")
    assert compared(eight).reason == "products round to eight bits"


@pytest.mark.soak
@pytest.mark.parametrize("path", sorted(SPECS.rglob("*.par")), ids=lambda path: path.stem)
def test_every_file_that_ships_is_what_it_means(path: Path):
    spec, _ = load(path)
    if spec is None or spec.train is None:
        pytest.skip("it is there to be imported")
    found = compare_meaning(next(experiments(spec, allow_python=True)).point, "help")
    assert found.diagnostics == ()
    assert found.reason is None
