"""To single files and back: the same numbers under any names, and nothing else is taken."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from partita.cli.main import main
from tests.runtime.checkpoint.runs import ONE_RANK, TEXT, plan_of, same, tensors, trained


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """A run of two steps on eight ranks, the directory of its checkpoint, and that of its file."""
    directory = tmp_path_factory.mktemp("exchange")
    (directory / "m.par").write_text(TEXT)
    return trained(plan_of("train.steps=2"), directory).run, directory


@pytest.fixture
def folder(saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own with the checkpoint `checkpoints` and `m.par`, to be in."""
    shutil.copytree(saved[1], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def partita(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["checkpoint", *arguments])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_export_gives_whole_tensors_under_their_names(saved, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert partita(capsys, "export", ".", "-o", "m.safetensors", "--states")[0] == 0
    same(load_file("m.safetensors"), tensors(saved[0]))
    assert partita(capsys, "export", ".", "-o", "p.safetensors")[0] == 0
    same(load_file("p.safetensors"), saved[0].parameters())
    assert sorted(os.listdir()) == ["checkpoints", "m.par", "m.safetensors", "p.safetensors"]


@pytest.mark.soak
def test_there_and_back_is_the_same_run(saved, folder: Path, capsys: pytest.CaptureFixture[str]):
    """With states and under the same step, the run goes on as from the checkpoint itself, bit for bit."""
    assert partita(capsys, "export", ".", "-o", "m.safetensors", "--states")[0] == 0
    status, out, _ = partita(
        capsys, "import", "back/checkpoints", "m.safetensors", "m.par", "--step", "2", "layout=plain"
    )
    assert status == 0
    assert out.splitlines()[0] == "back/checkpoints/step-00000002: 30 tensors from m.safetensors"
    direct, back = trained(plan_of("train.steps=4"), folder), trained(plan_of("train.steps=4"), folder / "back")
    assert back.found is not None
    assert back.steps == direct.steps
    same(tensors(back.run), tensors(direct.run))


@pytest.mark.soak
def test_import_of_parameters_begins_a_run_with_them(saved, folder: Path, capsys: pytest.CaptureFixture[str]):
    own = {name: tensor.to(torch.bfloat16) for name, tensor in saved[0].parameters().items()}
    save_file({name: tensor.contiguous() for name, tensor in own.items()} | {"other": torch.ones(2)}, "p.safetensors")
    status, out, _ = partita(capsys, "import", "new/checkpoints", "p.safetensors", "m.par")
    assert status == 0
    assert "not used: other" in out.splitlines()
    run = trained(plan_of("train.steps=1", "train.checkpoint=every(5)", *ONE_RANK), folder / "new")
    assert run.found is not None
    assert run.found.step == 0
    assert list(run.steps) == [1]
    # Not a step more: what was imported, with states at zero.
    shutil.rmtree("new")
    assert partita(capsys, "import", "new/checkpoints", "p.safetensors", "m.par", "--step", "1")[0] == 0
    found = tensors(trained(plan_of("train.steps=1"), folder / "new").run)
    same({name: found[name] for name in own}, {name: tensor.float() for name, tensor in own.items()})
    assert all(not found[name].any() for name in found if "/" in name)


def change(name: str, tensor: torch.Tensor | None) -> None:
    found = load_file("p.safetensors")
    if tensor is None:
        del found[name]
    else:
        found[name] = tensor
    save_file(found, "p.safetensors")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("m.gain", None, "lacks 1 of 10 tensors\n  = m.gain"),
        ("m.gain", torch.zeros(9), "m.gain is F32[9], but m.gain: f32[embed=8] needs [8]"),
        ("m.wte", torch.zeros(8, 6), "m.wte is F32[8, 6], but m.wte: f32[vocab=6, embed=8] needs [6, 8]"),
        ("m.gain", torch.zeros(8, dtype=torch.int32), "m.gain is I32[8], but m.gain: f32[embed=8] needs [8]"),
        ("mean/m.gain", torch.zeros(8), "lacks 19 of 30 tensors\n  = mean/m.wte"),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, tensor: torch.Tensor | None, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert partita(capsys, "export", ".", "-o", "p.safetensors")[0] == 0
    change(name, tensor)
    status, _, err = partita(capsys, "import", "new", "p.safetensors", "m.par")
    assert status == 1
    assert "error[E0809]: " in err
    assert told in err
    assert not Path("new").exists()


def test_what_is_no_file_of_tensors_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("p.safetensors").write_bytes(b"\xff" * 1000)
    for name in ("p.safetensors", "missing.safetensors", "."):
        status, _, err = partita(capsys, "import", "new", name, "m.par")
        assert status == 1
        assert "error[E0808]" in err
    assert not Path("new").exists()


def test_nothing_is_imported_beside_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert partita(capsys, "export", ".", "-o", "p.safetensors")[0] == 0
    status, _, err = partita(capsys, "import", "checkpoints", "p.safetensors", "m.par", "--step", "9")
    assert status == 1
    assert "checkpoints already has checkpoints" in err
    assert sorted(os.listdir("checkpoints")) == ["lock", "step-00000002"]


def test_a_damaged_checkpoint_is_not_exported(folder: Path, capsys: pytest.CaptureFixture[str]):
    path = folder / "checkpoints" / "step-00000002" / "rank-3.safetensors"
    path.write_bytes(path.read_bytes()[:-8] + b"\1" * 8)
    status, _, err = partita(capsys, "export", ".", "-o", "p.safetensors")
    assert status == 1
    assert "E0808" in err
    assert "rank-3.safetensors: its SHA-256" in err
    assert not Path("p.safetensors").exists()


def test_an_export_that_fails_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("taken").mkdir()
    status, _, err = partita(capsys, "export", ".", "-o", "taken")
    assert status == 2
    assert "cannot write taken: Is a directory" in err
    assert partita(capsys, "export", ".", "-o", "missing/p.safetensors")[0] == 2
    assert sorted(os.listdir()) == ["checkpoints", "m.par", "taken"]


# ---------------------------------------------------------------- looking


def test_ls_and_show(folder: Path, capsys: pytest.CaptureFixture[str]):
    status, out, _ = partita(capsys, "ls", "checkpoints")
    assert status == 0
    assert out.splitlines()[1].split()[0] == "2"
    assert "data 2 × pipe 2 × tensor 2  zero3" in out
    (row,) = json.loads(partita(capsys, "ls", ".", "--json")[1])
    assert (row["step"], row["ranks"], row["problem"]) == (2, 8, None)
    status, out, _ = partita(capsys, "show", "checkpoints/step-00000002")
    assert status == 0
    assert "m.layer.0.mlp.up" in out
    assert "ffn/tensor" in out
    shown = json.loads(partita(capsys, "show", ".", "--json")[1])
    assert shown["data"] == {"step": 2, "files": []}
    assert shown["random"] == {"seed": 5}
    assert shown["sources"]["m.par"] == TEXT
    assert len(shown["files"]) == 8
    assert json.loads(partita(capsys, "verify", ".", "--json")[1])[0]["problems"] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ls", "missing"], "there is no checkpoint in missing"),
        (["show", ".", "--step", "3"], "checkpoints has no checkpoint of step 3\n  help: it has 2"),
        (["verify", "m.npz"], "there is no checkpoint in m.npz"),
    ],
)
def test_what_is_not_there(arguments: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    status, _, err = partita(capsys, *arguments)
    assert status == 1
    assert f"error[E0807]: {told}" in err


def test_a_strangers_manifest_does_not_steer_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]):
    from tests.runtime.checkpoint.test_damage import changed

    changed(folder / "checkpoints", 2, lambda m: m.update(layout="\x1b[2Jred", schedule="[bold]x"))
    for arguments in (["ls", "."], ["show", "."]):
        out = partita(capsys, *arguments)[1]
        assert "\x1b" not in out
        assert "red" in out
