"""`partita init`: a file that is right and runs as it is; nothing that is there is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from partita.cli.main import main
from partita.dsl.load import load
from tests.files import SPECS


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
    for overrides in (["laptop.data=2"], ["batch=64", "train.steps=500"], ['train.data=text("corpus/*.txt")']):
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
        ("missing/first", "cannot write missing/first.par: No such file or directory"),
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


def test_into_another_directory() -> None:
    Path("there").mkdir()
    assert main(["init", "there/first"]) == 0
    assert "partita run     first.par" in Path("there/first.par").read_text()
