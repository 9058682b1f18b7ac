"""The directory of a run: one run at a time, no links, nothing touched before its lock is held, nothing ignored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import partita
from partita.dsl.diagnostic import Refused
from partita.runtime import locks
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.run_directory import Record, RunDirectory
from tests.commands import here, records
from tests.commands import partita as command
from tests.marks import every, soak

TEXT = """
axis batch = 4, embed = 8, ffn = 8

model m(x: [batch, embed], y: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.5)
  param down: [ffn, embed] ~ normal(0.5)
  loss mse(dot(relu(dot(x, up, over = embed)), down, over = ffn), y)
}

mesh pair(data = 2)
layout split on pair { shard batch -> data }
train { data = random()  optimizer = sgd(lr = 0.01)  steps = 4 }
"""
OURS = "the lines of somebody else\n"
FILES = ("metrics.jsonl", "metrics.jsonl.new", "run.json", "run.json.new", "fault.json", "fault.json.new")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m.par").write_text(TEXT)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return here("run", "m.par", "--run-dir", "run", "--transport", "virtual", *arguments, cwd=folder)


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "nowhere"])
def test_what_a_run_writes_replaces_whatever_is_there(tmp_path: Path, name: str, kind: str) -> None:
    """And never goes where that leads."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(OURS)
    path = tmp_path / "run" / name
    path.parent.mkdir()
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "nowhere":
        path.symlink_to(tmp_path / "new")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.hardlink_to(elsewhere)
    target = name.removesuffix(".new")
    with RunDirectory.open(path.parent) as directory:
        directory.put(target, b"one\n")
        assert directory.read(target, 100) == b"one\n"
        handle = directory.begin(target, b"two\n")
        os.write(handle, b"three\n")
        os.close(handle)
        assert directory.read(target, 100) == b"two\nthree\n"
    assert elsewhere.read_text() == OURS
    assert not (tmp_path / "new").exists()
    assert os.listdir(path.parent) == [target]


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["virtual", "gloo"])
def test_a_strangers_run_directory_leads_nowhere(folder: Path, transport: str) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.write_text(OURS)
    (folder / "run").mkdir()
    for name in FILES:
        (folder / "run" / name).symlink_to(elsewhere)
    ended = command("run", "m.par", "--run-dir", "run", "--transport", transport, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert elsewhere.read_text() == OURS
    assert len(records(folder / "run")) > 0


def test_a_lock_that_is_a_link_is_not_followed(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "lock").symlink_to(folder / "made")
    ended = run(folder)
    assert ended.returncode == 2
    assert "cannot write to run" in ended.stderr
    assert not (folder / "made").exists()


def test_checkpoints_that_are_a_link_are_refused(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "checkpoints").symlink_to(folder / "elsewhere")
    ended = run(folder, "train.checkpoint=every(2)")
    assert ended.returncode == 1
    assert "error[E0802]: run/checkpoints is a link" in ended.stderr
    assert os.listdir(folder / "elsewhere") == []


# ---------------------------------------------------------------- the lock


def state_of(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that can be seen of the files below a directory."""
    found = (each for each in sorted(directory.rglob("*")) if each.is_file())
    return {str(each): (each.stat().st_ino, each.stat().st_mtime_ns, each.read_bytes()) for each in found}


@pytest.mark.parametrize("how", ["in one process", "python", *soak("alone", "torchrun")])
def test_a_second_run_touches_nothing(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts it, and whether or not the file has checkpoints."""
    monkeypatch.setattr(locks, "TIMEOUT_SECONDS", 0.1)  # in this process
    with RunDirectory.open(folder / "run") as directory:
        assert directory.lock() is None
        directory.keep(Record("first", {}, None))
        directory.put("metrics.jsonl", b'{"step": 1}\n')
        directory.put("fault.json", b"{}\n")
        with directory.folder("flight"):
            (folder / "run" / "flight" / "flight-0").write_bytes(b"recorder")
        before = state_of(folder / "run")
        if how == "python":
            with pytest.raises(Refused, match="another run writes to"):
                partita.train(folder / "m.par", run_dir=folder / "run")
        else:
            launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
            arguments = ("run", "m.par", "--run-dir", "run")
            ended = {
                "alone": lambda: command(*arguments, cwd=folder),
                "in one process": lambda: here(*arguments, "--transport", "virtual", cwd=folder),
                "torchrun": lambda: command(*arguments, cwd=folder, launcher=launcher),
            }[how]()
            assert ended.returncode == 1
            assert ended.stderr.count("error[E0803]: another run writes to run") == 1
        assert state_of(folder / "run") == before


def test_a_directory_that_was_emptied_is_held_anew(tmp_path: Path) -> None:
    """By whoever comes first: two runs never hold what is at one path."""
    first = RunDirectory.open(tmp_path / "run")
    first.lock()
    shutil.rmtree(tmp_path / "run")
    with RunDirectory.open(tmp_path / "run") as second:
        assert second.lock() is None
    first.close()


def test_removed_checkpoints_admit_no_second_run(tmp_path: Path) -> None:
    from partita.runtime.checkpoint.store import Store

    first, second = Store(tmp_path / "checkpoints"), Store(tmp_path / "checkpoints")
    first.lock()
    shutil.rmtree(tmp_path / "checkpoints")
    first.hold()  # made and held anew
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partita.runtime.locks.TIMEOUT_SECONDS", 0.0)
        with pytest.raises(Refused, match="another run writes"):
            second.lock()
    shutil.rmtree(tmp_path / "checkpoints")
    second.lock()
    with pytest.raises(OSError, match="another run now writes"):
        first.hold()
    first.close()
    second.close()


# ---------------------------------------------------------------- what a run begins with


@given(
    st.text(), st.dictionaries(st.text(max_size=20), st.text(max_size=50), max_size=3), st.none() | st.text(max_size=9)
)
def test_a_record_is_read_as_it_was_kept(
    tmp_path_factory: pytest.TempPathFactory, name: str, files: dict[str, str], checkpoints: str | None
) -> None:
    with RunDirectory.open(tmp_path_factory.mktemp("run")) as directory:
        directory.keep(Record(name, files, checkpoints))
        assert directory.record() == Record(name, files, checkpoints)


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"run": 3}', '{"run": "a", "files": {"b": 1}}', "[" * 10**5])
def test_a_record_that_somebody_else_has_written_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with RunDirectory.open(tmp_path) as directory:
        assert directory.record() is None


# ---------------------------------------------------------------- checkpoints that would not be used


def _without_entry(folder: Path) -> list[str]:
    run(folder, "train.checkpoint=every(2)")
    return []


def _directly_in_it(folder: Path) -> list[str]:
    run(folder, "train.checkpoint=every(2)")
    for each in (folder / "run" / "checkpoints").glob("step-*"):
        each.rename(folder / "run" / each.name)
    return ["train.checkpoint=every(2)"]


def _elsewhere(folder: Path) -> list[str]:
    run(folder, "train.checkpoint=every(2)")
    return ['train.checkpoint=every(2, dir = "other")']


def _entry_with_a_place_was_lost(folder: Path) -> list[str]:
    run(folder, 'train.checkpoint=every(2, dir = "other")')
    return []


def _place_was_changed(folder: Path) -> list[str]:
    run(folder, 'train.checkpoint=every(2, dir = "other")')
    return ['train.checkpoint=every(2, dir = "third")']


CASES = (_without_entry, _directly_in_it, _elsewhere, _entry_with_a_place_was_lost, _place_was_changed)


@pytest.mark.parametrize("prepare", every(5, CASES))
def test_checkpoints_that_would_not_be_used_are_an_error(folder: Path, prepare: Callable[[Path], list[str]]) -> None:
    """Before anything is trained, or written over."""
    arguments = prepare(folder)
    before = state_of(folder)
    for how in ((), ("--transport", "gloo")):
        ended = run(folder, *arguments, *how)
        assert ended.returncode == 1, ended.stderr
        assert "error[E0814]: this run would not resume from the checkpoints in" in ended.stderr
        assert "to start over, name another directory with --run-dir" in ended.stderr
    with pytest.raises(Refused, match="would not resume from"):
        partita.train(folder / "m.par", *arguments, run_dir=folder / "run")
    after = state_of(folder)
    assert {path: seen for path, seen in after.items() if "lock" not in path} == {
        path: seen for path, seen in before.items() if "lock" not in path
    }
    if prepare is _without_entry:  # as the message says
        assert run(folder, *arguments, "--run-dir", "new").returncode == 0
        assert run(folder, "train.checkpoint=every(2)").returncode == 0


def test_a_run_goes_on_from_what_is_its_own(folder: Path) -> None:
    for _ in range(2):
        assert run(folder, 'train.checkpoint=every(2, dir = "other")').returncode == 0
    assert steps_in(folder / "other")
    assert json.loads((folder / "run" / "run.json").read_text())["checkpoints"] == str(folder / "other")


def test_a_copy_of_a_run_goes_on_from_its_own_checkpoints(folder: Path) -> None:
    """Though the original has some as well, and goes on too."""
    run(folder, "train.checkpoint=every(2)")
    shutil.copytree(folder / "run", folder / "copy")
    for each in ("copy", "run"):
        assert run(folder, "train.checkpoint=every(2)", "train.steps=6", "--run-dir", each).returncode == 0


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/step-00000002", "checkpoints/step-00000002/new"])
def test_a_run_does_not_begin_within_the_checkpoints_of_another(folder: Path, place: str) -> None:
    """`keep` would remove it with the checkpoint."""
    assert run(folder, "train.checkpoint=every(2)").returncode == 0
    before = sorted(each for each in (folder / "run").rglob("*") if each.is_file())
    with pytest.raises(Refused, match="E0814") as refused:
        partita.train(folder / "m.par", "train.checkpoint=every(2)", run_dir=folder / "run" / place)
    help = refused.value.diagnostics[0].help or ""
    assert str((folder / "run").resolve()) in help
    assert sorted(each for each in (folder / "run").rglob("*") if each.is_file()) == before
