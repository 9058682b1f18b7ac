"""Buffers, of floats and of integers, are saved, loaded under any layout, exported and imported as parameters are."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.runtime.rank import CompiledRun
from tests.files import ROOT
from tests.runtime.checkpoint.runs import plan_of, same, saved_every, tensors, trained

TEXT = (ROOT / "tests" / "planted" / "files" / "buffers.par").read_text()
ALONE = ("cluster.data=1", "cluster.pipe=1", "cluster.tensor=1", "layout=plain_")


def saving(steps: int, *overrides: str, text: str = TEXT) -> CompiledRun:
    return saved_every(plan_of(f"train.steps={steps}", "train.eval=none", *overrides, text=text), 2)


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path: Path):
    undisturbed = trained(plan_of("train.steps=4", "train.eval=none", text=TEXT), tmp_path)
    trained(saving(2), tmp_path)
    resumed = trained(saving(4), tmp_path)
    assert resumed.found is not None
    assert resumed.steps == {step: undisturbed.steps[step] for step in (3, 4)}
    same(tensors(resumed.run), tensors(undisturbed.run))


@pytest.mark.soak
def test_buffers_are_the_same_under_another_layout(tmp_path: Path):
    saved = trained(saving(2), tmp_path)
    for other in (("layout=plain_",), ALONE):
        same(trained(saving(2, *other), tmp_path).run.parameters(), saved.run.parameters())


@pytest.mark.soak
def test_buffers_are_exported_and_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = TEXT.replace("steps = 4", "steps = 2 checkpoint = every(2)")
    (tmp_path / "m.par").write_text(text)
    saved = trained(saving(2), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "export", ".", "-o", "m.safetensors", "--states"]) == 0
    found = load_file("m.safetensors")
    same(found, tensors(saved.run))
    assert not found["fit.layer.0.gate.seen"].is_floating_point()
    arguments = ["checkpoint", "import", "again/checkpoints", "m.safetensors", "m.par"]
    assert main([*arguments, "--step", "2", *ALONE]) == 0, capsys.readouterr().err
    again = trained(saving(2, *ALONE), tmp_path / "again")
    assert again.steps == {}
    same(again.run.parameters(), saved.run.parameters())


def test_another_update_is_another_model(tmp_path: Path):
    """Even one by a value that there was before."""
    trained(saving(2), tmp_path)
    for old, new in (("0.9 * scale", "0.8 * scale"), ("update last = level", "update last = last")):
        with pytest.raises(Refused) as refused:
            trained(saving(4, text=TEXT.replace(old, new)), tmp_path)
        (diagnostic,) = refused.value.diagnostics
        assert diagnostic.code == "E0804"
        assert any(new in note for note in diagnostic.notes)
