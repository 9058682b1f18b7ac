"""`partita init`: a file that is right and runs as it is; nothing that is there is touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from partita.cli import extras
from partita.cli.init import starter_names
from partita.cli.main import main
from partita.dsl.load import load
from tests.files import SPECS
from tests.hub_server import hub


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["first", "first.par", "ein großer Name", "a.b", "first.txt"])
def test_a_file_that_is_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name]) == 0
    (path,) = Path().iterdir()
    assert path.name == name.removesuffix(".par") + ".par"
    assert path.name in capsys.readouterr().out
    spec, diagnostics = load(path)
    assert spec is not None
    assert diagnostics == ()
    text = path.read_text(encoding="utf-8")
    assert f"partita run     {path.name} " in text
    assert "start.par" not in text
    assert text == (SPECS / "start.par").read_text(encoding="utf-8").replace("start.par", path.name)
    assert main(["fmt", "--check", str(path)]) == 0


def test_it_runs_and_needs_no_data() -> None:
    assert main(["init", "first"]) == 0
    small = ["batch=8", "seq=8", "train.steps=2", "train.eval=none", "train.data=random()"]
    assert main(["run", "first.par", "--transport", "virtual", *small]) == 0
    assert Path("runs/first/metrics.jsonl").exists()
    spec, _ = load("first.par")
    assert spec is not None
    assert spec.train is not None
    assert spec.train.data.name == "stdlib"


def test_what_its_comments_say_works() -> None:
    """Four ranks by an override, a longer run, and another layout of the data."""
    assert main(["init", "first"]) == 0
    for overrides in (
        ["laptop.data=2"],
        ["batch=64", "train.steps=500"],
        ['train.data=text("corpus/*.txt", holdout = 5%)'],
    ):
        spec, diagnostics = load("first.par", overrides)
        assert spec is not None, diagnostics


@pytest.mark.parametrize("there", ["file", "directory", "link", "broken link"])
def test_nothing_is_overwritten(there: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = Path("first.par"), Path("other")
    match there:
        case "file":
            path.write_text("mine")
        case "directory":
            path.mkdir()
        case "link":
            other.write_text("mine")
            path.symlink_to(other)
        case "broken link":
            path.symlink_to(other)
    before = sorted(Path().iterdir())
    assert main(["init", "first"]) == 2
    assert "already exists, and is left unchanged" in capsys.readouterr().err
    assert sorted(Path().iterdir()) == before
    assert other.exists() == (there == "link")
    if there in ("file", "link"):
        assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/there/first", "cannot write missing/there/first.par: No such file or directory"),
        ("", "missing file name"),
        (".", "missing file name"),
        ("..", "missing file name"),
        (".par", "missing file name"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null byte"),
    ],
)
def test_a_name_that_is_none(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name]) == 2
    assert message in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-0.6B",
        "hf://Qwen/Qwen3-0.6B",
        "https://huggingface.co/Qwen/Qwen3-0.6B",
        "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main?x=1",
    ],
)
def test_a_model_that_the_hub_lacks(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("transformers")
    with hub(tmp_path_factory.mktemp("home")):
        for more in ([], ["-o", "qwen.par"]):
            assert main(["init", name, *more]) == 1
            err = capsys.readouterr().err
            assert "error[E0627]: nothing here is called `Qwen/Qwen3-0.6B`, and nothing on the hub" in err
    assert list(Path().iterdir()) == []


def test_a_file_in_no_folder_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "Qwen/first.par"]) == 2
    assert capsys.readouterr().err == "partita: cannot write Qwen/first.par: No such file or directory\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nosuch/config.json", "there is no file nosuch/config.json"),
        ("theirs", "theirs has no config.json, which says what a model is"),
    ],
)
def test_there_is_no_config(name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    Path("theirs").mkdir()
    Path("theirs/model.safetensors").touch()
    assert main(["init", name]) == 1
    assert f"error[E1205]: {told}" in capsys.readouterr().err


def test_transformers_or_torch_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["init", "config.json"]) == 1
    assert "help: `pip install transformers`" in capsys.readouterr().err
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert main(["init", "config.json"]) == 2
    assert (
        "a model of transformers needs torch, numpy, safetensors: pip install 'partita[run]'" in capsys.readouterr().err
    )


def test_the_name_of_another_starter_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "gpt2"]) == 0
    assert capsys.readouterr().out.endswith("; `partita init --from gpt2` is another file\n")
    Path("gpt2.par").unlink()
    assert main(["init", "--from", "gpt2"]) == 0
    assert "another file" not in capsys.readouterr().out


def test_into_another_directory() -> None:
    Path("there").mkdir()
    assert main(["init", "there/first"]) == 0
    assert "partita run     first.par" in Path("there/first.par").read_text()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", starter_names())
def test_a_starter_comes_with_what_it_reads(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--from", name]) == 0
    told = capsys.readouterr().out
    assert f"wrote {name}.par" in told
    assert ("--allow-python" in told) == any(Path().glob("*.py"))
    spec, diagnostics = load(f"{name}.par")
    assert spec is not None, diagnostics
    assert spec.train is not None
    if spec.train.data.name in ("arrays", "rollouts"):
        assert Path(next(iter(spec.train.data.arguments.values()))).is_file()
    before = sorted(Path().rglob("*"))
    assert main(["init", "mine", "--from", name]) == 0  # what it reads is there, and the same
    assert {*Path().rglob("*")} - {*before} == {Path("mine.par")}
    text = Path("mine.par").read_text()
    assert f"{name}.par" not in text or name == "start"
    assert text.count("mine.par") == Path(f"{name}.par").read_text().count(f"{name}.par")


def test_a_starter_replaces_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("digits.npz").write_bytes(b"mine")
    assert main(["init", "--from", "mlp"]) == 2
    assert "digits.npz already exists, and is left unchanged" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["digits.npz"]
    assert Path("digits.npz").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "missing file name"),
        (["--from", "mlp", "-o", "x.par"], "--output is for a model of transformers"),
    ],
)
def test_a_wrong_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not [*Path().iterdir()]


def test_an_unknown_starter_is_told_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["init", "--from", "nothing"])
    assert left.value.code == 2
    assert "'lora'" in capsys.readouterr().err
