"""A run that goes on from a checkpoint is the run that was never interrupted, or says why not."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from attrs import evolve
from rich.console import Console

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.runtime import locks
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.checkpoints import Checkpoints
from partita.runtime.checkpoint.settings import settings_of
from partita.runtime.checkpoint.store import Store
from partita.runtime.progress import Display
from partita.runtime.training import VirtualRun
from tests.commands import computed
from tests.marks import soak
from tests.runtime.checkpoint.runs import (
    ONE_RANK,
    TEXT,
    plan_of,
    same,
    saved_every,
    tensors,
    trained,
    without_checkpoints,
)


@pytest.mark.parametrize("layout", ["zero3", *soak("zero1", "plain")])
@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw(lr = cosine(peak = 0.01, warmup = 2, total = 12))",
        "adamw_8bit(lr = 0.01, block_size = 16, min_size = 32)",
        *soak("sgd(lr = linear(peak = 0.05, total = 12), momentum = 0.9)", "sgd(lr = 0.05)"),
    ],
)
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(layout: str, optimizer: str, tmp_path: Path):
    plan = plan_of(f"layout={layout}", f"train.optimizer={optimizer}")
    undisturbed = trained(without_checkpoints(plan), tmp_path)
    trained(evolve(plan, spec=evolve(plan.spec, train=evolve(plan.train, steps=4))), tmp_path)
    resumed = trained(plan, tmp_path)
    assert resumed.found is not None
    assert resumed.found.step == 4
    assert resumed.steps == {step: undisturbed.steps[step] for step in (5, 6)}
    assert resumed.evaluations == {6: undisturbed.evaluations[6]}
    same(tensors(resumed.run), tensors(undisturbed.run))
    assert resumed.said == []


@pytest.mark.soak
def test_saving_changes_nothing(tmp_path: Path):
    plan = plan_of()
    saved, alone = trained(plan, tmp_path), trained(without_checkpoints(plan), tmp_path)
    assert saved.steps == alone.steps
    assert saved.found is None
    same(tensors(saved.run), tensors(alone.run))


def test_the_last_step_is_saved_and_the_newest_are_kept(tmp_path: Path):
    trained(saved_every(plan_of("train.steps=7"), 2, keep=2), tmp_path)
    assert steps_in(tmp_path / "checkpoints") == [6, 7]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "lock",
        "step-00000006",
        "step-00000007",
    ]


@pytest.mark.soak
def test_leftovers_of_a_run_that_died_are_removed(tmp_path: Path):
    trained(plan_of("train.steps=2"), tmp_path)
    directory = tmp_path / "checkpoints"
    shutil.copytree(directory / "step-00000002", directory / "step-00000004.partial-abc123")
    shutil.copytree(directory / "step-00000002", directory / "step-00000001.removed")
    (directory / "step-00000003.partial-1").symlink_to(tmp_path)
    (directory / "mine").mkdir()
    resumed = trained(plan_of("train.steps=4"), tmp_path)
    assert resumed.found is not None
    assert resumed.found.step == 2
    assert sorted(path.name for path in directory.iterdir()) == ["lock", "mine", "step-00000002", "step-00000004"]
    assert (tmp_path / "checkpoints").exists()  # what the link led to is untouched


@pytest.mark.soak
def test_other_settings_are_said_and_allowed(tmp_path: Path):
    trained(plan_of("train.steps=2"), tmp_path)
    resumed = trained(plan_of("train.optimizer.lr=0.5", "batch=16", "train.seed=6", "train.eval=every(1)"), tmp_path)
    assert resumed.found is not None
    assert resumed.codes == ["W0804"]
    notes = "\n".join(resumed.said[0].notes)
    assert "input tokens was i64[batch=8, seq=4], and is i64[batch=16, seq=4]" in notes
    assert "lr = constant(value = 0.5)" in notes
    assert "seed was 5, and is 6" in notes
    assert "eval" not in notes


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("overrides", "replaced", "note"),
    [
        (["ffn=32"], ("", ""), "m.layer.0.mlp.up was f32[embed=8, ffn=16], and is f32[embed=8, ffn=32]"),
        (["train.precision=f64"], ("", ""), "m.wte was f32[vocab=6, embed=8], and is f64[vocab=6, embed=8]"),
        ([], ("repeat 4", "repeat 5"), "m.layer.4.mlp.up: f32[embed=8, ffn=16] is only in the file"),
        ([], ("repeat 4", "repeat 3"), "m.layer.3.mlp.up: f32[embed=8, ffn=16] is only in the checkpoint"),
        ([], ("silu", "gelu"), "+ return x + dropout(dot(gelu("),
        ([], ("rate = 0.25", "rate = 0.5"), "rate = 0.5)"),
        ([], ("normal(0.1)", "normal(0.2)"), "+ sample eps: [batch, embed] ~ normal(0.2)"),
        (
            ["train.optimizer=sgd(lr = 0.1, momentum = 0.9)"],
            ("", ""),
            "the optimizer was adamw (mean, square), and is sgd (momentum)",
        ),
    ],
)
def test_another_model_is_refused_with_the_difference(
    overrides: list[str], replaced: tuple[str, str], note: str, tmp_path: Path
):
    trained(plan_of("train.steps=2", *ONE_RANK), tmp_path)
    other = plan_of(*overrides, *ONE_RANK, text=TEXT.replace(*replaced))
    with pytest.raises(Refused) as refused:
        trained(other, tmp_path)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E0804"
    assert any(note in each for each in diagnostic.notes), diagnostic.notes


@pytest.mark.soak
def test_what_numbers_do_not_depend_on_is_no_difference(tmp_path: Path):
    trained(plan_of("train.steps=2"), tmp_path)
    text = TEXT.replace("block mlp", "# renamed\nblock mlp").replace("logits", "result")
    other = plan_of("layout=plain", "train.steps=3", "schedule=gpipe", text=text)
    resumed = trained(other, tmp_path)
    assert resumed.found is not None
    assert resumed.said == []


def test_a_directory_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert locks.TIMEOUT_SECONDS >= 5  # as long as a run may take to end
    monkeypatch.setattr("partita.runtime.locks.TIMEOUT_SECONDS", 0.2)
    other = Store(tmp_path / "checkpoints")
    other.lock()
    with pytest.raises(Refused) as refused:
        trained(plan_of(*ONE_RANK), tmp_path)
    assert refused.value.diagnostics[0].code == "E0803"
    other.close()
    trained(plan_of(*ONE_RANK), tmp_path)


def test_one_rank_refuses_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever is not rank 0 learns of it, and does not wait for ever."""
    monkeypatch.setattr("partita.runtime.locks.TIMEOUT_SECONDS", 0.0)
    other = Store(tmp_path / "checkpoints")
    other.lock()
    plan = plan_of()
    run = VirtualRun(plan)
    settings = settings_of(plan.spec, tmp_path, tmp_path)
    assert settings is not None
    refusals = []

    def ask(each: Checkpoints):
        try:
            yield from each.resume()
        except Refused as refused:
            refusals.append(refused)

    run.cluster.run([ask(Checkpoints(rank, settings, refusals.append)) for rank in run.ranks])
    assert len(refusals) == 8
    other.close()


def test_a_terminal_shows_how_far_the_run_is():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=110, color_system=None, legacy_windows=False)
    with Display("m", 8, console=console) as display:
        display.resumed(6, "resumed from there")
    assert "step 6/8  resumed from there" in output.getvalue()
    assert re.search(r"━ +6/8 ", output.getvalue())


# ---------------------------------------------------------------- the command


def partita(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    output = capsys.readouterr()
    return status, output.out, output.err


@pytest.mark.soak
def test_metrics_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.par").write_text(TEXT)
    run = ["run", "m.par", "--transport", "virtual", "train.checkpoint=every(4)"]
    assert partita(capsys, *run, "--run-dir", "whole")[0] == 0
    assert partita(capsys, *run, "--run-dir", "parts", "train.steps=4")[0] == 0
    # As a run that was killed in step 6 leaves it: two steps that the checkpoint does not have.
    with open("parts/metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    status, out, _ = partita(capsys, *run, "--run-dir", "parts")
    assert status == 0
    assert "step 4/6  resumed from parts/checkpoints/step-00000004" in out
    whole = computed(tmp_path / "whole")
    parts = [each for each in computed(tmp_path / "parts") if not (each["step"] == 4 and "eval_loss" in each)]
    assert parts == whole
    status, _, err = partita(capsys, *run, "--run-dir", "parts")
    assert status == 0
    assert "warning[W0810]: the run is already finished: its last checkpoint is of step 6 of 6" in err
    assert len(computed(tmp_path / "parts")) == len(whole) + 1


@pytest.mark.soak
@pytest.mark.parametrize("where", ["", "parts", "some parts", "."])
def test_a_finished_run_says_how_to_go_on_and_how_to_begin_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("m.par").write_text(TEXT)
    run = ["run", "m.par", "--transport", "virtual", "train.checkpoint=every(4)", *(["--run-dir", where] * bool(where))]
    assert partita(capsys, *run)[0] == 0
    _, _, err = partita(capsys, *run)
    found = re.search(r"to go on: `(.*)`; to begin anew: `(.*)`", err)
    assert found is not None, err
    status, out, err = partita(capsys, *run, *shlex.split(found[1]))
    assert (status, "W0810" in err, "step 7/12" in out) == (0, False, True), out
    status, out, err = partita(capsys, *run, *shlex.split(found[2]))
    assert (status, "W0810" in err, "step 1/6" in out) == (0, False, True), out


@pytest.mark.soak
def test_a_finished_run_says_how_to_begin_anew_beside_a_directory_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(TEXT)
    run = ["run", "m.par", "--transport", "virtual", 'train.checkpoint=every(4, dir = "my saves")']
    assert partita(capsys, *run)[0] == 0
    _, _, err = partita(capsys, *run)
    found = re.search(r"to begin anew: `(.*)`", err)
    assert found is not None, err
    assert subprocess.run(shlex.split(found[1])).returncode == 0
    assert "step 1/6" in partita(capsys, *run)[1]


def test_an_override_of_a_constant_is_another_model_by_the_same_text(tmp_path: Path):
    text = TEXT.replace("axis batch = 8", "const rate = 0.25\n\naxis batch = 8", 1).replace(
        "rate = 0.25)", "rate = rate)"
    )
    trained(plan_of("train.steps=2", *ONE_RANK, text=text), tmp_path)
    with pytest.raises(Refused) as refused:
        trained(plan_of("train.steps=4", "rate=0.5", *ONE_RANK, text=text), tmp_path)
    assert refused.value.diagnostics[0].notes == (
        "the model's operations differ",
        "the text is the same: an override gives a constant another value",
    )


def test_another_model_is_a_diagnostic_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.par").write_text(TEXT)
    run = ["run", "m.par", *ONE_RANK, "train.steps=2"]
    assert partita(capsys, *run, "--transport", "virtual")[0] == 0
    for transport in (["--transport", "virtual"], []):  # the second: by the supervisor, before it starts a rank
        status, _, err = partita(capsys, *run, "ffn=32", *transport)
        assert status == 1
        assert err.count("error[E0804]: runs/m/checkpoints/step-00000002 is of another model") == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["/tmp/x", "../x", "a/../../x", "out/x", "a\0b", "."])
def test_checkpoints_stay_under_the_folder_of_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    monkeypatch.chdir(folder)
    (folder / "m.par").write_text(TEXT.replace("every(2)\n}", f'every(2, dir = "{name}")\n}}'))
    status, _, err = partita(capsys, "run", "m.par", "--transport", "virtual", *ONE_RANK)
    assert status == 1
    assert "E0801" in err or "\0" in name
    assert not (tmp_path / "x").exists()


def test_a_directory_under_the_folder_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "specs").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs" / "m.par").write_text(TEXT.replace("every(2)\n}", 'every(2, dir = "runs/of m")\n}'))
    assert partita(capsys, "run", "specs/m.par", "--transport", "virtual", *ONE_RANK)[0] == 0
    assert steps_in(tmp_path / "specs" / "runs" / "of m") == [2, 4, 6]
