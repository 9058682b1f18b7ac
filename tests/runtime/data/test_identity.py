"""Data that was replaced, cut off or lengthened, or is another on another machine, is not trained on without a word."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cli.main import main
from partita.dsl.diagnostic import Refused
from partita.dsl.spec import Call
from partita.runtime import data_files
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.data.binding import identify
from partita.runtime.data_files import BLOCK, BLOCKS, WHOLE, DataFile, changed, hashed, identified, unlike
from tests.marks import every
from tests.runtime.supervision.test_consistency import by_port, outcomes


def known(*paths: Path) -> tuple[DataFile, ...]:
    return identified([(path.name, path) for path in paths], None)


@given(data=st.binary(max_size=200), more=st.binary(min_size=1, max_size=50), place=st.integers(0, 10**6))
def test_any_change_of_a_small_file_is_known(
    data: bytes, more: bytes, place: int, tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.mktemp("data") / "a.bin"
    path.write_bytes(data)
    before = known(path)
    assert changed(before, known(path)) == []
    path.write_bytes(data + more)
    (grown,) = changed(before, known(path))
    assert "has grown" in grown
    assert "the old content is unchanged" in grown
    if data:
        place %= len(data)
        other = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        path.write_bytes(other)
        (note,) = changed(before, known(path))
        assert "`a.bin` has different content of the same size" in note
        path.write_bytes(other + more)
        (note,) = changed(before, known(path))
        assert f"`a.bin` had {len(data):,} bytes, and has {len(data + more):,}" in note
        path.write_bytes(data[:-1])
        (note,) = changed(before, known(path))
        assert f"`a.bin` had {len(data):,} bytes, and has {len(data) - 1:,}" in note


def test_when_it_was_written_is_no_difference(tmp_path: Path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    before = known(path)
    os.utime(path, (1, 1))
    assert known(path) == before
    path.write_bytes(b"abd")
    os.utime(path, (86_400, 86_400))
    (note,) = changed(before, known(path))
    assert note.endswith("written 1970-01-02 00:00 UTC")


def large(path: Path, size: int) -> Path:
    """A file of which little is on the disk."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def put(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\1")


@pytest.mark.soak
@pytest.mark.parametrize("size", [WHOLE, WHOLE + 1, WHOLE + BLOCK, 40 * WHOLE])
def test_of_a_large_file_the_first_and_last_block_and_those_between_are_known(size: int, tmp_path: Path):
    path = large(tmp_path / "a.bin", size)
    before = hashed(path, size)
    blocks = list(data_files._blocks(size))
    assert blocks[0][0] == 0
    assert sum(blocks[-1]) == size
    assert sum(length for _, length in blocks) in (size, BLOCK * BLOCKS)
    for place in (0, size // 2 // BLOCK if size > WHOLE else size // 2, size - 1, sum(blocks[len(blocks) // 3]) - 1):
        path = large(tmp_path / "b.bin", size)
        put(path, place)
        assert hashed(path, size) != before, place


@pytest.mark.soak
def test_a_large_file_that_has_grown_is_told_from_another_one(tmp_path: Path):
    path = large(tmp_path / "a.bin", 2 * WHOLE)
    before = known(path)
    large(path, 3 * WHOLE)
    (note,) = changed(before, known(path))
    assert "`a.bin` has grown from 134,217,728 to 201,326,592 bytes; the old content is unchanged" in note
    put(path, 0)
    (note,) = changed(before, known(path))
    assert "has grown" not in note


def test_files_come_and_go(tmp_path: Path):
    paths = [tmp_path / name for name in "abcdefghijkl"]
    for path in paths:
        path.write_bytes(path.name.encode())
    assert changed(known(*paths[:1]), known(*paths[1:2])) == ["`a` is missing", "`b` is new"]
    assert changed(known(*paths[:2]), known(*paths[:1])) == ["`b` is missing"]
    notes = changed(known(), known(*paths))
    assert notes[-1] == "and 6 more files"
    assert len(notes) == 7
    # Order is what the source says it is, and the source sorts.
    assert unlike(known(paths[0]), 0, known(paths[1]), 3) == ["`a` is only on rank 0", "`b` is only on rank 3"]


def test_very_many_files_are_known_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_files, "MAX_FILES", 3)
    paths = [tmp_path / name for name in "abcd"]
    for path in paths:
        path.write_bytes(path.name.encode())
    before = known(*paths)
    assert [each.name for each in before] == ["4 files from a on"]
    paths[2].write_bytes(b"x")
    assert changed(before, known(*paths)) != []


def test_names_are_those_of_the_file(tmp_path: Path):
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / "corpus" / name).write_text(name)
    found = identify(Call("text", {"glob": "corpus/**/*.txt"}), tmp_path)
    assert [each.name for each in found] == ["corpus/a.txt", "corpus/b.txt", "corpus/deep/c.txt"]
    assert identify(Call("random", {}), tmp_path) == ()
    assert "ast.py" in {each.name for each in identify(Call("stdlib", {}), tmp_path)}
    with pytest.raises(Refused, match="no file matches"):
        identify(Call("tokens", {"path": "none.bin"}), tmp_path)


# ---------------------------------------------------------------- going on

TEXT = """axis batch = 4, seq = 8, vocab = 256, other = 256
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param table: [other, vocab] ~ normal(0.1)
  loss cross_entropy(embedding(tokens, table, over = other), targets, over = vocab)
}
mesh laptop(data = 2)
layout l on laptop { shard batch -> data }
train {
  data = DATA
  optimizer = sgd(lr = 0.1)
  steps = 4
  checkpoint = every(2)
}
"""
SOURCES_TRIED = {
    'text("*.txt")': "a.txt",
    'tokens("ids.bin", dtype = u8)': "ids.bin",
}


def fill(folder: Path, data: str) -> None:
    (folder / "m.par").write_text(TEXT.replace("DATA", data))
    for name in ("a.txt", "b.txt", "ids.bin"):
        (folder / name).write_bytes(bytes(range(97, 123)) * 20)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["run", "m.par", "--transport", "virtual", *arguments])
    # A machine that is busy with other things may add that a checkpoint was due before the last one was written.
    return status, re.sub(r"warning\[W0803\].*\n\n?", "", capsys.readouterr().err)


CHANGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "replaced": (lambda data: data[:-1] + b"!", "has different content of the same size, written 2"),
    "cut off": (lambda data: data[:-7], "had 520 bytes, and has 513, written 2"),
    "lengthened": (lambda data: data + b"more", "has grown from 520 to 524 bytes; the old content is unchanged"),
}


@pytest.mark.parametrize("data", every(2, list(SOURCES_TRIED)))
@pytest.mark.parametrize("change", every(3, list(CHANGES)))
def test_a_run_does_not_go_on_with_other_data(
    data: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, data)
    name = SOURCES_TRIED[data]
    assert run(capsys) == (0, "")
    saved = read_manifest(tmp_path / "runs/m/checkpoints", 4)
    assert name in {each.name for each in saved.data}
    assert all((each.size, each.sha256) == (520, hashed(tmp_path / each.name, 520)) for each in saved.data)
    os.utime(tmp_path / name, (5, 5))
    assert run(capsys, "train.steps=5")[0] == 0
    does, note = CHANGES[change]
    (tmp_path / name).write_bytes(does((tmp_path / name).read_bytes()))
    status, said = run(capsys, "train.steps=6")
    assert status == 1
    assert said.count("error[E0815]: the data is not what runs/m/checkpoints/step-00000005 was trained on") == 1
    assert f"`{name}` {note}" in said
    assert "--changed-data" in said
    # Nothing has happened to what is there.
    status, said = run(capsys, "train.steps=6", "--changed-data")
    assert status == 0
    assert f"warning[W0804]: the run resumes after step 5 with different settings\n  = `{name}` {note}" in said
    # From then on this is the data.
    assert run(capsys, "train.steps=7") == (0, "")


def test_other_files_of_the_entry_are_other_data_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, 'text("a.txt")')
    assert run(capsys)[0] == 0
    status, said = run(capsys, "train.steps=5", 'train.data=text("b.txt")')
    assert (status, said.count("E0815")) == (1, 1)
    assert "  = data was text(glob = a.txt" in said
    assert "  = `a.txt` is missing\n" in said
    assert "  = `b.txt` is new\n" in said
    status, said = run(capsys, "train.steps=5", 'train.data=text("b.txt")', "--changed-data")
    assert (status, said.count("W0804")) == (0, 1)
    # How the same files are read is a setting.
    status, said = run(capsys, "train.steps=6", 'train.data=text("b.txt", holdout = 25%)')
    assert (status, said.count("W0804"), "error" in said) == (0, 1, False)


def test_the_supervisor_says_it_before_it_starts_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, 'text("a.txt")')
    assert run(capsys)[0] == 0
    (tmp_path / "a.txt").write_bytes(b"x" * 520)
    assert main(["run", "m.par", "train.steps=6"]) == 1
    assert capsys.readouterr().err.count("error[E0815]") == 1


def test_evaluation_data_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, 'text("a.txt")')
    eval = 'train.eval=every(4, data = text("b.txt"), batches = 2)'
    assert run(capsys, eval) == (0, "")
    assert [each.name for each in read_manifest(tmp_path / "runs/m/checkpoints", 4).data] == ["a.txt"]
    (tmp_path / "b.txt").write_bytes(b"xyz" * 200)
    assert run(capsys, eval, "train.steps=6") == (0, "")


# ---------------------------------------------------------------- ranks


@pytest.mark.soak
def test_ranks_with_other_data_end_and_say_which(tmp_path: Path):
    text = TEXT.replace("DATA", 'text("*.txt")')
    for rank, content in enumerate((b"one" * 100, b"two" * 100)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "a.txt").write_bytes(content)
        (tmp_path / str(rank) / "b.txt").write_bytes(b"the same" * 20)
    (first, shown), (second, silent) = outcomes(tmp_path, by_port, text, text, small=False)
    assert (first, second) == (1, 1), shown + silent
    assert shown.count("error[E0615]: rank 1 has different data than rank 0") == 1
    assert "`a.txt` has different content of the same size, written 2" in shown
    assert "on rank 0, 2" in shown
    assert "b.txt" not in shown
    assert "Traceback" not in shown + silent
    assert "error" not in silent
    assert not list(tmp_path.rglob("metrics.jsonl"))


ITEM = 7  # in the third step


def test_arrays_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """An item that was repaired is a change that one wants to go on with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.par").write_text(
        "axis batch = 4, width = 3 model m(x: [batch, width]) { param w: [width] ~ ones() loss mean(x * w * w) }\n"
        'train { data = arrays("d.npz") optimizer = sgd(lr = 0.1) steps = 4 checkpoint = every(1) }'
    )
    x = np.ones((12, 3), np.float32)
    x[ITEM] = np.nan
    np.savez(tmp_path / "d.npz", x=x)
    status, said = run(capsys)
    assert status == 3
    assert f"the input `x`, row 1 of the batch (item {ITEM})" in said
    assert "the loss of step 3 is nan" in said
    np.savez(tmp_path / "d.npz", x=np.ones((12, 3), np.float32))
    status, said = run(capsys)
    assert status == 1
    assert "E0815" in said
    assert run(capsys, "--changed-data")[0] == 0
