"""`partita diff` says what changes in a program, and nothing else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from partita.cli.main import main
from tests.files import SPECS

TEXT = """import "sizes.par"
block mlp(x: [batch, embed]) {
  param up: [embed, ffn] ~ kaiming()
  param down: [ffn, embed] ~ kaiming()
  return dot(relu(dot(x, up, over = embed)), down, over = ffn)
}
model m(x: [batch, embed], y: [batch, embed]) {
  repeat 2 as layer { let x = x + mlp(x) }
  loss mse(x, y)
}
mesh four(data = 2, tensor = 2)
layout split on four {
  shard batch -> data
  shard ffn -> tensor
}
train { data = random() optimizer = sgd(lr = 0.1) steps = 1 layout = split }
expect { bytes(tensor) <= 100KiB }
"""
SIZES = "axis batch = 8, embed = 16, ffn = 32\n"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    write(TEXT)
    Path("models/sizes.par").write_text(SIZES)


def write(text: str, name: str = "m") -> None:
    Path(f"models/{name}.par").write_text(text)


def found(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, list[dict[str, object]]]:
    """The differences by kind."""
    assert main(["diff", *arguments, "--json"]) == status
    kinds: dict[str, list[dict[str, object]]] = {}
    for each in json.loads(capsys.readouterr().out)["differences"]:
        kinds.setdefault(each["kind"], []).append(each)
    return kinds


def test_a_file_is_not_different_from_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "models/m.par", "models/m.par"]) == 0
    assert capsys.readouterr().out == "no differences\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("block mlp", "# a comment\n\nblock mlp"),
        ("let x = x + mlp(x)", "let h = mlp(x)\n    let x = x + h"),
        (
            "  return dot(relu(dot(x, up, over = embed)), down",
            "  let h = relu(dot(x, up, over = embed))\n  return dot(h, down",
        ),
    ],
)
def test_other_words_for_the_same_are_none(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(TEXT.replace(old, new), "other")
    assert found(capsys, "models/m.par", "models/other.par") == {}


def replicated() -> str:
    """The text with a layout in which each rank has all parameters."""
    text = TEXT.replace("batch -> data\n  shard ffn -> tensor", "batch -> data, tensor")
    return text.replace("expect { bytes(tensor) <= 100KiB }\n", "")


def test_a_layout_changes_collectives_bytes_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    write(replicated(), "other")
    kinds = found(capsys, "models/m.par", "models/other.par")
    assert set(kinds) == {"measure", "collective", "claim"}
    measures = {each["what"]: (each["before"], each["after"]) for each in kinds["measure"]}
    # Gradients of all parameters, not of half of each, go along `data`: 2(N - 1)/N of each, in four bytes.
    assert measures["bytes(data)"] == (2 * 2 * 16 * 16 * 4, 2 * 2 * 16 * 32 * 4)
    assert [(each["after"], each["place"]) for each in kinds["claim"]] == [(None, "models/m.par:17:10")]
    gone = [each for each in kinds["collective"] if each["after"] is None]
    places = {(str(each["what"]).partition(",")[0], each["place"]) for each in gone}
    assert places == {("all_reduce over tensor", "models/m.par:5")}


def test_a_size_changes_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = found(capsys, "models/m.par", "--after", "ffn=64")
    shapes = {each["what"]: (each["before"], each["after"]) for each in kinds["parameter"]}
    assert shapes == {
        "m.layer.mlp.up": ("f32[embed=16, ffn=32]", "f32[embed=16, ffn=64]"),
        "m.layer.mlp.down": ("f32[ffn=32, embed=16]", "f32[ffn=64, embed=16]"),
    }
    assert [(each["what"], each["before"], each["after"]) for each in kinds["program"]] == [("parameters", 2048, 4096)]


def test_a_schedule_changes_actions(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = found(capsys, str(SPECS / "tiny.par"), "--after", "schedule=gpipe(microbatches=4)")
    assert {each["what"] for each in kinds["schedule"]} == {"rank 0", "rank 1"}
    assert "schedule" in {each["what"] for each in kinds["program"]}
    assert "parameter" not in kinds


@pytest.mark.parametrize(
    ("limit", "status"), [("bytes(data)=50", 1), ("bytes(data)=100", 0), ("peak_memory=1", 1), ("step_time=1e9", 0)]
)
def test_a_limit_is_kept_or_not(limit: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    write(replicated(), "other")
    assert main(["diff", "models/m.par", "models/other.par", "--limit", limit]) == status
    assert (f"{limit.partition('=')[0]} is worse by " in capsys.readouterr().out) == bool(status)


def test_more_tokens_are_better(capsys: pytest.CaptureFixture[str]) -> None:
    tiny, slower = str(SPECS / "tiny.par"), "schedule=gpipe(microbatches=4)"
    assert main(["diff", tiny, "--before", slower, "--limit", "tokens_per_second=1"]) == 0
    capsys.readouterr()
    assert main(["diff", tiny, "--after", slower, "--limit", "tokens_per_second=1"]) == 1
    assert "tokens_per_second is worse by" in capsys.readouterr().out


def git(*arguments: str) -> None:
    names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *names, *arguments], check=True, capture_output=True)


def test_a_revision_has_the_files_that_it_had(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that it imports, too; the other is the file as it is."""
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    Path("models/sizes.par").write_text(SIZES.replace("32", "48"))
    git("commit", "-qam", "two")
    assert found(capsys, "HEAD:models/m.par") == {}
    for given in (["HEAD~1:models/m.par"], ["HEAD~1:models/m.par", "HEAD:models/m.par"]):
        kinds = found(capsys, *given)
        assert [each["before"] for each in kinds["program"]] == [2 * 2 * 16 * 32]
        assert {str(each["place"]).partition(":")[0] for each in kinds["parameter"]} == {"models/m.par"}


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        (["HEAD:models/m.par"], 2, "git has no HEAD:models/m.par: not a git repository"),
        (["nothing.par"], 1, "error[E0001]: there is no file `nothing.par`"),
        (["models/m.par", "--limit", "bytes(pipe)=1"], 2, "--limit bytes(pipe): there is no such measure: peak_memory"),
    ],
)
def test_what_is_wrong_is_said(
    given: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(Path.cwd().parent))
    assert main(["diff", *given]) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["step=1", "step_time", "step_time=x"])
def test_a_limit_is_a_measure_and_percent(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["diff", "models/m.par", "--limit", limit])
    assert left.value.code == 2
    assert "it is a measure and percent: step_time=2" in capsys.readouterr().err
