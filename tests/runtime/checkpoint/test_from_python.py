"""`partita.train`: the model that `partita run` trains, with the same checkpoints."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import partita
from partita.cli.main import main
from partita.dsl.load import load
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.loading import Commit
from partita.runtime.checkpoint.settings import settings_of
from partita.runtime.checkpoint.shards import Shard
from partita.runtime.checkpoint.store import Store
from partita.runtime.data.binding import open_data
from partita.runtime.in_process import run_in_process
from partita.runtime.rank import prepare
from tests.commands import computed
from tests.runtime.checkpoint.runs import ONE_RANK, TEXT, Outcome, same

QUIET = ("train.eval=every(6, batches = 1)", *ONE_RANK)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `m.par`, which has a checkpoint every two steps, and `plain.par`, which has none; to be in."""
    monkeypatch.chdir(tmp_path)
    Path("m.par").write_text(TEXT)
    Path("plain.par").write_text(TEXT.replace("  checkpoint = every(2)\n", ""))
    return tmp_path


def run(*arguments: str) -> None:
    assert main(["run", *arguments, "--transport", "virtual"]) == 0


def saved(directory: Path, step: int = 6) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint."""
    with Commit(directory, read_manifest(directory, step)) as commit:
        names = [each.name for each in commit.manifest.tensors if "/" not in each.name]
        return {name: commit.read(name) for name in names}


MESHES = st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))


@pytest.mark.soak
@given(
    MESHES,
    st.sampled_from(["zero3", "zero1", "plain"]),
    st.sampled_from(["f32", "bf16"]),
    st.sampled_from([2, 5, 6]),
)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_its_parameters_are_those_of_the_checkpoint_that_a_run_writes(
    folder: Path, mesh: tuple[int, int, int], layout: str, precision: str, steps: int
):
    """Bit for bit, in any layout; and so are the metrics, and the checkpoint of its own."""
    overrides = [f"cluster.{axis}={size}" for axis, size in zip(("data", "pipe", "tensor"), mesh, strict=True)]
    overrides += [f"layout={layout}", f"train.precision={precision}", f"train.steps={steps}"]
    for name in ("one", "other"):
        shutil.rmtree(name, ignore_errors=True)
    run("m.par", *overrides, "--run-dir", "one")
    trained = partita.train("m.par", *overrides, run_dir="other")
    same(dict(trained.parameters), saved(Path("one/checkpoints"), steps))
    same(dict(trained.parameters), saved(Path("other/checkpoints"), steps))
    assert computed(Path("one")) == computed(Path("other"))
    assert (trained.checkpoints, trained.resumed) == (Path("other/checkpoints"), None)
    without = partita.train("plain.par", *overrides)
    same(dict(without.parameters), dict(trained.parameters))
    assert list(without) == list(trained)


@pytest.mark.soak
def test_processes_come_to_the_same_parameters(folder: Path):
    overrides = ["cluster.data=1", "cluster.tensor=1", "train.steps=2"]
    command = [sys.executable, "-m", "partita", "run", "m.par", *overrides, "--run-dir", "one", "--transport", "gloo"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    same(dict(partita.train("plain.par", *overrides).parameters), saved(Path("one/checkpoints"), 2))


def test_it_returns_a_list_of_records_with_more(folder: Path):
    trained = partita.train("plain.par", *QUIET)
    assert [record["step"] for record in trained] == [1, 2, 3, 4, 5, 6]
    assert len(trained) == 6
    assert set(trained[-1]) - set(trained[0]) == {"eval_loss", "eval_accuracy"}
    assert json.loads(json.dumps(trained)) == trained
    assert trained.checkpoints is None
    assert trained.parameters["m.layer.3.mlp.up"].shape == (8, 16)
    trained.parameters["m.wte"].mul_(2)  # whose are they: the caller's
    same({"m.gain": partita.train("plain.par", *QUIET).parameters["m.gain"]}, {"m.gain": trained.parameters["m.gain"]})


# ---------------------------------------------------------------- where it writes, and goes on


def test_without_checkpoints_nothing_is_written_but_to_a_directory_that_is_named(folder: Path):
    before = sorted(os.listdir())
    partita.train("plain.par", *QUIET)
    assert sorted(os.listdir()) == before
    partita.train("plain.par", *QUIET, run_dir=folder / "there")
    assert sorted(os.listdir("there")) == ["lock", "metrics.jsonl", "run.json"]
    assert len(computed(Path("there"))) == 7


@pytest.mark.soak
@pytest.mark.parametrize("dir", [None, "kept/here"])
def test_twice_is_once_and_a_run_goes_on_from_it(dir: str | None, folder: Path, capsys: pytest.CaptureFixture[str]):
    """Python and the command by turns, in the directory that both have by themselves."""
    text = TEXT if dir is None else TEXT.replace("every(2)", f'every(2, dir = "{dir}")')
    Path("m.par").write_text(text)
    where = Path(dir or "runs/m/checkpoints")
    whole = partita.train("plain.par", "train.steps=8", *QUIET)
    first = partita.train("m.par", "train.steps=2", *QUIET)
    assert first.checkpoints is not None
    assert first.checkpoints.resolve() == where.resolve()
    run("m.par", "train.steps=4", *QUIET)
    assert "step 2/4  resumed from" in capsys.readouterr().out
    second = partita.train("m.par", "train.steps=8", *QUIET)
    assert second.resumed == 4
    assert [record["loss"] for record in second] == [record["loss"] for record in whole[4:]]
    same(dict(second.parameters), dict(whole.parameters))
    done = partita.train("m.par", "train.steps=8", *QUIET)
    assert (list(done), done.resumed) == ([], 8)
    same(dict(done.parameters), dict(whole.parameters))
    assert steps_in(where) == [4, 6, 8]
    assert [each["step"] for each in computed(Path("runs/m")) if "loss" in each] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.soak
def test_what_is_wrong_with_checkpoints_is_refused_or_warned_of(folder: Path, monkeypatch: pytest.MonkeyPatch):
    partita.train("m.par", "train.steps=4", *QUIET)
    checkpoints = folder / "runs/m/checkpoints"
    with pytest.raises(partita.Refused, match="E0804"):
        partita.train("m.par", "ffn=8", *QUIET)
    monkeypatch.setattr("partita.runtime.locks.TIMEOUT_SECONDS", 0.1)
    other = Store(checkpoints)
    other.lock()
    with pytest.raises(partita.Refused, match="E0803"):
        partita.train("m.par", *QUIET)
    other.close()
    os.truncate(checkpoints / "step-00000004/rank-0.safetensors", 8)
    with pytest.warns(UserWarning, match=r"warning\[W0801\]: runs/m/checkpoints/step-00000004 is damaged"):
        assert partita.train("m.par", *QUIET).resumed == 2
    Path("taken").write_text("")
    with pytest.raises(partita.Refused, match="cannot write to taken: "):
        partita.train("m.par", *QUIET, run_dir="taken")


@pytest.mark.filterwarnings("ignore:warning")
def test_a_model_whose_checkpoint_cannot_be_written_is_not_lost(folder: Path, monkeypatch: pytest.MonkeyPatch):
    expected = partita.train("plain.par", *QUIET)

    def full(shard: Shard):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Shard, "blocks", full)
    with pytest.warns(UserWarning, match=r"step 6 was not saved: rank 0: Input/output error"):
        found = partita.train("m.par", *QUIET)
    same(dict(found.parameters), dict(expected.parameters))


# ---------------------------------------------------------------- a process that goes on afterwards


@pytest.mark.soak
def test_a_run_that_is_interrupted_leaves_nothing_behind_but_its_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """As Ctrl-C in a notebook: the save under way is completed, no thread stays, and training can go on."""
    blocks = Shard.blocks

    def slow(shard: Shard):
        time.sleep(0.3)
        return blocks(shard)

    monkeypatch.setattr(Shard, "blocks", slow)
    spec, _ = load("m.par")
    assert spec is not None
    plan = prepare(spec)
    given = settings_of(spec, Path("runs/m"), folder)

    class Interrupted(Outcome):
        def step(self, result):
            if result.step == 3:
                raise KeyboardInterrupt

    dataset = open_data(plan.program, plan.train, folder)
    with pytest.raises(KeyboardInterrupt):
        run_in_process(plan, dataset, given, Interrupted(None), pytest.fail)
    assert steps_in(Path("runs/m/checkpoints")) == [2]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("partita")]
    monkeypatch.undo()
    os.chdir(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert partita.train("m.par").resumed == 2


@pytest.mark.parametrize("times", [1, 2])
def test_the_first_ctrl_c_saves_the_step_in_progress_and_the_second_does_not_wait(folder: Path, times: int):
    """In a notebook, from another thread or process. What is said to be saved is, and the same call goes on."""

    def press(record: dict[str, object]) -> None:
        if record["step"] == 3:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    rare = {"train.checkpoint": "every(100)"}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        partita.train("m.par", *QUIET, rare, on_step=press)
    assert signal.getsignal(signal.SIGINT) is before
    assert str(interrupted.value) == ("saved step 4; the same call goes on" if times == 1 else "")
    assert steps_in(Path("runs/m/checkpoints")) == ([4] if times == 1 else [])
    assert partita.train("m.par", *QUIET, rare).resumed == (4 if times == 1 else None)


def test_without_checkpoints_ctrl_c_does_not_wait(folder: Path):
    def press(record: dict[str, object]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("training goes on")

    with pytest.raises(KeyboardInterrupt):
        partita.train("plain.par", *QUIET, on_step=press)


def test_threads_are_as_they_were(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """As many as a rank would have while it trains, since sums depend on it; the caller's before and after."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("partita.runtime.supervision.launcher.usable", lambda: [0, 1, 2, 3, 4, 5])
    monkeypatch.setattr("partita.runtime.in_process.usable", lambda: [0, 1, 2, 3, 4, 5])
    before = torch.get_num_threads()
    seen = []

    class Looking(Outcome):
        def step(self, result):
            seen.append(torch.get_num_threads())

    plan = prepare(partita.load("plain.par", "cluster.data=1", "cluster.tensor=1", "train.steps=1", "train.eval=none"))
    run_in_process(plan, open_data(plan.program, plan.train, folder), None, Looking(None), pytest.fail)
    assert seen == [3]
    assert torch.get_num_threads() == before
