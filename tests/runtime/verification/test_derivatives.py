"""`verify` holds the gradients of the single device against differences of its loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve

from partita.cli.main import main
from partita.compiler import pipeline
from partita.compiler.graph import Graph
from partita.compiler.ops.pointwise import Constant
from partita.compiler.passes.differentiate import differentiate
from partita.runtime.verification import derivatives
from partita.runtime.verification.derivatives import Derivatives, compare_derivatives
from partita.runtime.verification.experiment import experiments
from tests.files import ROOT, SPECS, checked

FILES = ROOT / "tests" / "planted" / "files"
TIED = (FILES / "tied_and_stopped.par").read_text(encoding="utf-8")

MODEL = """axis batch = 8, embed = 6, ffn = 10, seq = 4
model m(x: [batch, embed], wanted: [batch, embed]) {
  param w: [embed, ffn] ~ normal(0.4)
  param v: [ffn, embed] ~ normal(0.4)
  param b: [ffn] ~ zeros()
  let h = dot(x, w, over = embed)
  let y = dot(VALUE, v, over = ffn)
  loss mse(y, wanted)
}
train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }
"""


def compared(text: str) -> Derivatives:
    return compare_derivatives(next(experiments(checked(text, "part.par"), allow_python=True)).point, "help")


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[Graph], Graph]) -> None:
    """Every graph is differentiated with a mistake."""
    monkeypatch.setattr(pipeline, "differentiate", lambda graph: change(differentiate(graph)))


def without_contribution(name: str, number: int) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        found = [each for each in graph.gradients if each.parameter == name]
        return evolve(graph, gradients=tuple(each for each in graph.gradients if each is not found[number]))

    return change


def test_gradients_are_derivatives_of_a_loss_with_what_has_no_gradient():
    found = compared(TIED)
    assert (found.parameters, found.reason, found.diagnostics) == (8, None, ())
    assert found.error is not None
    assert found.error < 1e-8


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["siamese.w1", "siamese.w2", "siamese.gain"])
def test_a_lost_contribution_is_found(name: str, number: int, monkeypatch: pytest.MonkeyPatch):
    planted(monkeypatch, without_contribution(name, number))
    (found,) = compared(TIED).diagnostics
    assert found.code == "E0707"
    assert found.message == f"the gradient of `{name}` is not the derivative of the loss"
    assert found.span.text == name.removeprefix("siamese.")


def test_gradients_of_twice_the_loss_are_found(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path):
    monkeypatch.setattr("partita.compiler.passes.differentiate.Constant", lambda _, dtype: Constant(2.0, dtype))
    (found,) = compared(TIED).diagnostics
    assert "so for 7 more of 8: " in found.notes[0]
    assert "slopes differ by 50%" in found.notes[1]
    (tmp_path / "tied.par").write_text(TIED, encoding="utf-8")
    assert main(["verify", str(tmp_path / "tied.par")]) == 1
    output = capsys.readouterr()
    assert "error[E0707]" in output.err
    assert "execution    equal" in output.out
    assert "derivatives  wrong    gradients of 8 parameters, with differences of the loss" in output.out


@pytest.mark.few(2)
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
    ],
)
def test_what_is_smooth_almost_everywhere_is_compared(value: str):
    found = compared(MODEL.replace("VALUE", value))
    assert (found.reason, found.diagnostics) == (None, ()), value
    assert found.error is not None
    assert found.error <= derivatives.TOLERANCE


@pytest.mark.parametrize("value", ["relu(b + h * 0)", "maximum(h, h * 1) + relu(0 * h) + b", "abs(h - h) + b + h * b"])
def test_a_bend_at_the_very_point_is_no_wrong_gradient(value: str, monkeypatch: pytest.MonkeyPatch):
    text = MODEL.replace("VALUE", value)
    # As declared: `b` is zero.
    monkeypatch.setattr("partita.runtime.verification.experiment.of_order_one", lambda call: call)
    assert not compared(text).diagnostics


@pytest.mark.soak
def test_what_gradients_are_not_meant_to_be_derivatives_of_is_not_compared():
    scanned = """axis batch = 4, seq = 3, embed = 6
model m(x: [batch, seq, embed], wanted: [batch, embed]) {
  param w: [embed] ~ normal(0.4)
  let s = zeros([batch, embed])
  scan seq { let s = tanh(s * w + x + STOPPED) }
  loss mse(s, wanted)
}
train { data = random()  optimizer = sgd(lr = 0.1)  steps = 1 }
"""
    assert compared(scanned.replace("STOPPED", "stop_gradient(s)")).reason == "a `scan` contains `stop_gradient`"
    assert compared(scanned.replace("STOPPED", "s")).reason is None
    eight = TIED.replace("precision = f64", "precision = fp8")
    assert compared(eight).reason == "products round to eight bits"


@pytest.mark.soak
def test_the_proxy_of_a_mixture_is_compared():
    found = compared((SPECS / "zoo" / "mixtral.par").read_text(encoding="utf-8"))
    assert (found.reason, found.diagnostics) == (None, ())
