"""Means of weights (`ema`) are states: saved, resumed from, loaded under any layout, exported and imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import checked
from tests.marks import soak
from tests.runtime.checkpoint.runs import TEXT, plan_of, same, tensors, trained

MEANS = "optimizer some { freeze gain  update all -> adamw(lr = 0.01) }" + TEXT
for old, new in (
    ("  clip = 1.0\n", "  clip = 1.0  ema = 0.9\n"),
    ("batches = 1)", "batches = 1, weights = ema)"),
    ("adamw(lr = cosine(peak = 0.01, warmup = 2, total = 12), weight_decay = 0.1)", "some"),
    ("pipe = 2, tensor = 2)", "pipe = 2, tensor = 1)"),
    ("repeat 4", "repeat 2"),
):
    assert old in MEANS
    MEANS = MEANS.replace(old, new)


def partita(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["checkpoint", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.soak
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path: Path):
    undisturbed = trained(plan_of("train.checkpoint=none", text=MEANS), tmp_path)
    assert undisturbed.run.means().keys() == undisturbed.run.parameters().keys() - {"m.gain"}
    trained(plan_of("train.steps=4", text=MEANS), tmp_path)
    resumed = trained(plan_of(text=MEANS), tmp_path)
    assert resumed.found is not None
    assert resumed.evaluations == {6: undisturbed.evaluations[6]}
    same(tensors(resumed.run), tensors(undisturbed.run))


@pytest.mark.soak
def test_means_are_the_same_under_another_layout(tmp_path: Path):
    saved = trained(plan_of("train.steps=2", text=MEANS), tmp_path)
    for other in (("layout=zero1",), ("layout=plain", "cluster.data=1", "cluster.pipe=1")):
        loaded = trained(plan_of("train.steps=2", *other, text=MEANS), tmp_path)
        assert loaded.steps == {}
        same(loaded.run.means(), saved.run.means())


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero1", *soak("zero3")])
def test_evaluation_reads_the_means(layout: str, tmp_path: Path):
    run = trained(plan_of(f"layout={layout}", "train.checkpoint=none", text=MEANS), tmp_path)
    plain = trained(
        plan_of(f"layout={layout}", "train.checkpoint=none", "train.eval=every(3, batches = 1)", text=MEANS), tmp_path
    )
    same(plain.run.means(), run.run.means())
    assert plain.evaluations[6] != run.evaluations[6]
    plain.run.set_parameters(plain.run.means())
    batch = {name: torch.zeros(8, 4, dtype=torch.int64) for name in ("tokens", "targets")}
    assert plain.run.evaluate(batch)[0] == run.run.evaluate(batch)[0]


def test_export_of_the_means_and_import_of_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(MEANS)
    saved = trained(plan_of("train.steps=2", text=MEANS), tmp_path).run
    partita(capsys, "export", ".", "-o", "means.safetensors", "--weights", "ema")
    same(load_file("means.safetensors"), {**saved.parameters(), **saved.means()})
    # Imported without states: means begin as the parameters.
    partita(capsys, "import", "new/checkpoints", "means.safetensors", "m.par", "--step", "2")
    new = trained(plan_of("train.steps=2", text=MEANS), tmp_path / "new")
    same(new.run.means(), saved.means())
    same(new.run.parameters(), {**saved.parameters(), **saved.means()})
    # With states: as they are.
    partita(capsys, "export", ".", "-o", "all.safetensors", "--states")
    partita(capsys, "import", "again/checkpoints", "all.safetensors", "m.par", "--step", "2")
    same(tensors(trained(plan_of("train.steps=2", text=MEANS), tmp_path / "again").run), tensors(saved))


def test_a_run_without_a_mean_has_none_to_export_and_cannot_begin_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    none = ("train.ema=none", "train.eval=none")
    trained(plan_of("train.steps=2", *none, text=MEANS), tmp_path)
    assert main(["checkpoint", "export", ".", "-o", "means.safetensors", "--weights", "ema"]) == 1
    assert "error[E0816]" in capsys.readouterr().err
    assert not Path("means.safetensors").exists()
    with pytest.raises(Refused) as refused:
        trained(plan_of(text=MEANS), tmp_path)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E0804"
    assert "the optimizer was some (mean, square), and is some (ema, mean, square)" in diagnostic.notes


def test_back_at_the_beginning_means_are_the_initial_values():
    run = VirtualRun(plan_of(text=MEANS))
    initial = run.parameters()
    same(run.means(), {name: initial[name] for name in run.means()})
    batch = {name: torch.zeros(8, 4, dtype=torch.int64) for name in ("tokens", "targets")}
    run.step(1, batch, 0.1)
    assert not torch.equal(run.means()["m.wte"], initial["m.wte"])
    for rank in run.ranks:
        rank.restart()
    same(run.means(), {name: initial[name] for name in run.means()})


def test_an_evaluation_need_not_read_every_parameter():
    text = """axis batch = 4, width = 4
model m(x: [batch, width]) {
  param gain, noise: [width] ~ ones()
  loss mean(where(training(), x * noise, x) * gain)
}
train { data = random()  optimizer = sgd(lr = 0.1)  ema = 0.9  steps = 2  eval = every(1, batches = 1, weights = ema) }
"""
    run = VirtualRun(prepare(checked(text, "m.par")))
    assert run.means().keys() == {"m.gain", "m.noise"}
