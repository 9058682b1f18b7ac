"""`partita verify`: passes what is right, and names the value, line and layout of what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import evolve

import partita
from partita.cli.main import main
from partita.compiler import pipeline
from partita.compiler.codegen import assemble as assembling
from partita.compiler.passes.resized import as_declared
from partita.compiler.pipeline import compile_spec
from partita.compiler.text.graph import graph_text
from partita.dsl.diagnostic import Diagnostic
from partita.runtime.verification import experiment
from partita.runtime.verification.execution import Execution, verify_execution
from partita.runtime.verification.experiment import Inconclusive, proxy
from partita.runtime.verification.figures import Figure, error_of
from tests.files import SPECS, checked
from tests.marks import soak


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "overrides", "ranks"),
    [
        ("tiny.par", (), 2),
        ("llama.par", ("layout=zero1",), 8),
        *soak(("mlp.par", (), 2), ("llama.par", (), 8), ("gpt.par", (), 12)),
    ],
)
def test_the_examples_pass(name: str, overrides: tuple[str, ...], ranks: int):
    found = partita.verify(SPECS / name, *overrides)
    assert found.passed, "\n\n".join(d.render() for d in found.diagnostics)
    assert found.execution.ranks == ranks
    assert found.execution.largest < 1e-11
    assert all(validation.passed for validation in found.validations)


FILE = """axis batch = 8, seq = 6, embed = 8, ffn = 12
block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ zeros()
  param down: [ffn, embed] ~ normal(0.001)
  let h = tanh(dot(x, up, over = embed) * 1.25)
  return x + dropout(dot(h, down, over = ffn), rate = 0.1)
}
model m(x: [batch, seq, embed], wanted: [batch, seq, embed]) {
  param w: [embed] ~ ones()
  let y = x * w
  repeat 4 as layer { let y = mlp(y) }
  loss mse(y, wanted)
  metric size = sqrt(mean(y * y))
}
mesh cluster(pipe = 2, data = 2, tensor = 2)
layout parts on cluster {
  shard batch -> data
  shard ffn -> tensor
  stage layer -> pipe
}
schedule s = one_f_one_b(microbatches = 4)
train { data = random() optimizer = adamw(lr = 1e-3) steps = 1 }
"""


def execution(text: str = FILE, *overrides: str) -> Execution:
    spec = checked(text, "part.par", overrides)
    return verify_execution(spec)


@pytest.mark.soak
def test_all_is_compared():
    found = execution()
    assert found.passed, found.diagnostics[0].render()
    # Three of the four iterations: one more than stages.
    parameters = 1 + 3 * 2
    # Two steps: loss, metric, norm, every gradient, and the parameters after it; loss and metric of an evaluation.
    assert found.compared == 2 * (3 + 2 * parameters) + 2
    assert found.mesh == (("pipe", 2), ("data", 2), ("tensor", 2))
    assert found.microbatches == 4


def tampered(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Let partitioned programs be emitted with a piece of their source changed."""

    def assemble(*arguments, **options):
        program = assembling.assemble(*arguments, **options)
        if program.mesh.ranks == 1:
            return program
        assert old in program.source or not program.schedule.training
        return evolve(program, source=program.source.replace(old, new))

    monkeypatch.setattr(pipeline, "assemble", assemble)


def the(found: Execution) -> Diagnostic:
    (diagnostic,) = found.diagnostics
    assert diagnostic.code == "E0702"
    assert diagnostic.help is not None
    return diagnostic


@pytest.mark.soak
def test_a_wrong_constant_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch):
    tampered(monkeypatch, " * 1.25", " * 1.2500001")
    diagnostic = the(execution())
    assert "first value that differs" in diagnostic.message
    assert "`m.layer.0.mlp." in diagnostic.message
    assert diagnostic.span.line == 5
    assert "laid out as batch/data ffn/tensor" in diagnostic.notes[0]
    assert any("gradient of `m" in note or "loss" in note for note in diagnostic.notes[1:])


@pytest.mark.soak
def test_a_wrong_value_of_one_rank_alone_is_found(monkeypatch: pytest.MonkeyPatch):
    tampered(monkeypatch, "= torch.tanh(", "= (1.0 + 1e-6 * (c.coordinates['data'] == 1)) * torch.tanh(")
    diagnostic = the(execution())
    assert "`m.layer.0.mlp.h`" in diagnostic.message
    assert diagnostic.span.line == 5


@pytest.mark.soak
def test_a_wrong_update_is_found_at_its_parameter(monkeypatch: pytest.MonkeyPatch):
    tampered(monkeypatch, ", c.update, 0.9, ", ", c.update, 0.90001, ")
    diagnostic = the(execution())
    assert "`m.w` after two updates differs" in diagnostic.message
    assert diagnostic.span.line == 9


def test_a_lost_reduction_is_found(monkeypatch: pytest.MonkeyPatch):
    """The sum over `tensor` behind the second product, done by nobody."""
    tampered(monkeypatch, "c.all_reduce('tensor', (", "c.all_gather('tensor', (")
    assert not execution().passed


def test_a_program_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    tampered(monkeypatch, "torch.tanh(", "torch.tahn(")
    diagnostic = the(execution())
    assert "fails where the single-device program runs" in diagnostic.message
    assert "tahn" in diagnostic.notes[0]
    assert diagnostic.span.line == 16


@pytest.mark.soak
def test_what_is_not_finite_on_random_values_begins_as_declared():
    assert execution(FILE.replace("let y = x * w", "let y = x * w + log(w)")).passed


@pytest.mark.soak
def test_a_mean_over_few_elements_is_of_more_of_them():
    """Of as few as make a proxy there is often nothing to take the mean of."""
    rare = "let some = cast(abs(x) > 3.0, f32) loss sum(some * (y - wanted) * (y - wanted)) / sum(some)"
    large = FILE.replace("batch = 8, seq = 6", "batch = 64, seq = 48")
    assert execution(large.replace("loss mse(y, wanted)", rare)).passed


@pytest.mark.soak
def test_a_metric_may_be_no_number():
    found = execution(FILE.replace("sqrt(mean(y * y))", "log(mean(y) - mean(abs(y)))"))
    assert found.passed, found.diagnostics[0].render()


def undecided(text: str = FILE) -> Diagnostic:
    with pytest.raises(Inconclusive) as raised:
        execution(text)
    assert raised.value.diagnostic.code == "W0702"
    return raised.value.diagnostic


@pytest.mark.soak
def test_what_is_never_finite_is_not_decided():
    diagnostic = undecided(FILE.replace("let y = x * w", "let y = log(x) * w"))
    assert "no finite loss" in diagnostic.message
    assert diagnostic.span.line == 12


@pytest.mark.soak
def test_what_is_not_finite_once_it_is_updated_is_not_decided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experiment, "UPDATE", 1e200)
    undecided()


CHAOS = FILE.replace(
    "  loss mse(y, wanted)",
    f"  let z = sigmoid(y) {'let z = z * (1.0 - z) * 3.99 ' * 40}\n  loss mse(z, wanted)",
)


@pytest.mark.soak
def test_what_rounding_alone_changes_is_not_decided():
    """The logistic map doubles every difference: after forty iterations the last digits are the first ones."""
    assert "rounding errors grow" in undecided(CHAOS).message


@pytest.mark.soak
def test_chaos_in_a_metric_hides_nothing_else(monkeypatch: pytest.MonkeyPatch):
    text = CHAOS.replace("  loss mse(z, wanted)", "  loss mse(y, wanted)\n  metric chaos = mean(z)")
    found = execution(text)
    assert found.passed
    assert all("chaos" in what for what in found.blurred)
    tampered(monkeypatch, " * 1.25", " * 1.2500001")
    assert not execution(text).passed


@pytest.mark.soak
def test_a_loss_that_depends_on_no_parameter_is_verified():
    """Its gradients are rounding noise, of no scale."""
    assert execution(FILE.replace("loss mse(y, wanted)", "loss mean(softmax(y, over = embed)) + mean(wanted)")).passed


@pytest.mark.soak
def test_ids_out_of_range_are_the_same_in_every_layout():
    """They count as zeros, and there is a count of them: a run ends by it."""
    text = FILE.replace("wanted: [batch, seq, embed])", "wanted: [batch, seq, embed], ids: i64[batch])")
    text = text.replace("let y = x * w", "let y = x * w + embedding(ids + 1, v, over = ffn)")
    text = text.replace("  param w: [embed]", "  param v: [ffn, embed] ~ ones()\n  param w: [embed]")
    assert execution(text.replace("ids + 1", "ids + 1000")).passed
    assert execution(text.replace("ids + 1", "ids * ids - 1")).passed


@pytest.mark.soak
def test_sizes_shrink_with_what_was_computed_of_them(monkeypatch: pytest.MonkeyPatch):
    text = FILE.replace(
        "let y = x * w", "let y = x * w + embedding(iota(embed) + size(ffn) - size(embed), v, over = ffn)"
    )
    text = text.replace("  param w: [embed]", "  param v: [ffn] ~ ones()\n  param w: [embed]")
    assert execution(text).passed
    spec = checked(text, "part.par", ["ffn=1_200", "embed=800", "train.steps=2"])
    small = proxy(spec, as_declared, True)
    assert "guarded" not in graph_text(compile_spec(small).placed).replace("guarded=False", "")


def test_errors_are_relative_to_the_scale_of_a_tensor():
    import torch

    def figure(*values: float, unit: float = 1.0) -> Figure:
        return Figure(torch.tensor(values, dtype=torch.float64), unit)

    assert error_of(figure(1.0, 100.0), figure(1.0, 101.0)) == pytest.approx(1 / 101)
    # Rounding noise of a gradient that is zero is small beside the norm of all.
    assert error_of(figure(1e-17), figure(-1e-17, unit=1.0)) < 1e-12
    assert error_of(figure(float("nan")), figure(1.0)) == float("inf")
    assert error_of(figure(float("inf"), 1.0), figure(float("-inf"), 1.0)) == float("inf")
    # A metric may be no number, and must be none in both then.
    assert error_of(figure(float("nan"), 2.0), figure(float("nan"), 2.5)) == pytest.approx(0.2)
    assert error_of(figure(1.0, 2.0), figure(1.0)) == float("inf")
    assert error_of(None, figure(1.0)) == float("inf")


def test_the_command(capsys: pytest.CaptureFixture):
    assert main(["verify", str(SPECS / "mlp.par"), "pair.data=4"]) == 0
    out = capsys.readouterr().out
    assert "translation" in out
    assert "data 3" in out
    assert "verified in" in out


@pytest.mark.soak
def test_the_command_as_json(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    assert main(["verify", str(SPECS / "mlp.par"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["diagnostics"] == []
    assert {
        "name",
        "ranks",
        "actions",
        "messages",
        "peak_memory",
        "certificate",
        "execution",
        "gpu",
        "seconds",
    } <= found.keys()
    tampered(monkeypatch, "torch.relu(", "torch.tanh(")
    assert main(["verify", str(SPECS / "mlp.par"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"]
    (diagnostic,) = found["diagnostics"]
    assert (diagnostic["code"], diagnostic["line"]) == ("E0702", 10)


def test_the_command_names_the_culprit(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    tampered(monkeypatch, "torch.relu(", "torch.tanh(")
    assert main(["verify", str(SPECS / "mlp.par")]) == 1
    captured = capsys.readouterr()
    assert "error[E0702]: `classifier.h` is the first value that differs" in captured.err
    assert "mlp.par:10" in captured.err
    assert "wrong in" in captured.out


def test_the_command_on_a_wrong_file(capsys: pytest.CaptureFixture):
    assert main(["verify", str(SPECS / "mlp.par"), "pixels=0"]) == 1
    assert "E0310" in capsys.readouterr().err


@pytest.mark.soak
def test_a_file_without_a_small_copy_is_certified_all_the_same(capsys: pytest.CaptureFixture, tmp_path: Path):
    file = tmp_path / "part.par"
    file.write_text(FILE.replace("let y = x * w", "let y = log(x) * w"), encoding="utf-8")
    assert main(["verify", str(file)]) == 4
    captured = capsys.readouterr()
    assert "warning[W0702]: on random data, model `m` has no finite loss and gradient" in captured.err
    assert "translation  valid" in captured.out
    assert "execution    not decided" in captured.out
    found = partita.verify(file)
    assert all(each.passed for each in found.validations)
    assert not found.passed
    assert found.outcome == "not decided"
    assert not found.diagnostics
    assert found.as_json()["execution"] is None
    assert [each["code"] for each in found.as_json()["diagnostics"]] == ["W0702"]
    assert found.as_json()["certificate"]["passed"]
    right, wrong = found.validations[0], evolve(found.validations[0], problems=(Diagnostic("E0701", "wrong"),))
    assert not evolve(found, validations=(right, wrong)).as_json()["certificate"]["passed"]


@pytest.mark.soak
def test_what_is_larger_than_its_device_is_named(capsys: pytest.CaptureFixture, tmp_path: Path):
    file = tmp_path / "part.par"
    mesh = "mesh cluster(pipe = 2, data = 2, tensor = 2)"
    device = "device = device(flops = 1TFLOP/s, memory = 1KiB, bandwidth = 1GB/s)"
    file.write_text(FILE.replace(mesh, f"{mesh} {{ {device} }}"), encoding="utf-8")
    assert main(["verify", str(file)]) == 1
    captured = capsys.readouterr()
    assert "error[E0704]: rank" in captured.err
    assert "part.par:15" in captured.err
    assert "memory       exceeded" in captured.out
    found = partita.verify(file)
    assert not found.passed
    assert found.execution.passed
    assert found.as_json()["memory"] == 1024 < max(found.as_json()["peak_memory"])
    assert len(found.peak_memory) == found.ranks == 8


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("none.par", None, "E0001"),
        ("no_train.par", "axis batch = 8\nmodel m(x: [batch]) { param w: [] ~ ones()  loss mean(x * w) }", "E0410"),
        ("no_model.par", "axis batch = 8", "E0410"),
        ("wrong.par", "axis batch", "E0103"),
        ("zero.par", FILE.replace("pipe = 2,", "pipe = 8,"), "E0403"),
    ],
)
@pytest.mark.parametrize("json", [False, True])
def test_a_file_that_cannot_be_verified_is_refused(
    name: str, text: str | None, code: str, json: bool, capsys: pytest.CaptureFixture, tmp_path: Path
):
    file = tmp_path / name
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert main(["verify", str(file), *["--json"] * json]) == 1
    captured = capsys.readouterr()
    assert f"error[{code}]" in captured.err
    assert captured.out == ""


@pytest.mark.soak
def test_the_command_writes_to_a_file(capsys: pytest.CaptureFixture, tmp_path: Path):
    out = tmp_path / "found.json"
    assert main(["verify", str(SPECS / "mlp.par"), "--json", "-o", str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text(encoding="utf-8"))["passed"]
    assert main(["verify", str(SPECS / "mlp.par"), "-o", str(tmp_path / "no" / "where")]) == 2


@pytest.mark.soak
def test_with_gpu_a_rank_of_each_stage_runs_on_one_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    file = SPECS / "mlp.par"
    assert main(["verify", str(file), "--gpu", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["gpu"]
    assert rank["passed"]
    assert rank["kernels"] > 0
    assert 0 < rank["peak_memory"] <= rank["bound"]
    assert sum(rank["waits"].values()) == 1
