"""Saving goes on beside training, and training goes on where saving cannot."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from shutil import copytree

import pytest
import torch

from partita.dsl.diagnostic import Diagnostic
from partita.runtime.bad_steps import NotFinite
from partita.runtime.checkpoint import saving
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.checkpoints import Checkpoints
from partita.runtime.checkpoint.commits import read_manifest
from partita.runtime.checkpoint.identity import manifest_of
from partita.runtime.checkpoint.loading import Commit, entries_of
from partita.runtime.checkpoint.saving import Save, prune
from partita.runtime.checkpoint.settings import settings_of
from partita.runtime.checkpoint.shards import Shard
from partita.runtime.checkpoint.store import Store
from partita.runtime.data.binding import open_data
from partita.runtime.training import StepResult, VirtualRun
from tests.commands import computed, partita
from tests.files import ROOT
from tests.runtime.checkpoint.runs import ONE_RANK, TEXT, Outcome, plan_of, same, tensors, trained, without_checkpoints


def content(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a commit, whole."""
    manifest = read_manifest(directory, step)
    with Commit(directory, manifest) as commit:
        assert list(commit.problems(range(len(manifest.files)))) == []
        return {tensor.name: commit.read(tensor.name) for tensor in manifest.tensors}


@pytest.mark.soak
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The disk is so slow that step 2 is written only when step 3 is done: and it is step 2 that is written."""
    third = threading.Event()
    blocks = Shard.blocks

    def slow(shard: Shard):
        assert third.wait(60), "step 3 waits for the checkpoint of step 2"
        return blocks(shard)

    monkeypatch.setattr(Shard, "blocks", slow)
    plan = plan_of("train.steps=4")
    step = Outcome.step

    def told(outcome: Outcome, result: StepResult) -> None:
        step(outcome, result)
        if len(outcome.steps) == 3:
            assert steps_in(tmp_path / "checkpoints") == []
            third.set()

    monkeypatch.setattr(Outcome, "step", told)
    assert list(trained(plan, tmp_path).steps) == [1, 2, 3, 4]
    after_two = trained(without_checkpoints(plan_of("train.steps=2")), tmp_path)
    same(content(tmp_path / "checkpoints", 2), tensors(after_two.run))


def test_one_checkpoint_is_written_at_a_time_and_waiting_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("partita.runtime.checkpoint.checkpoints.NOTABLE_SECONDS", 0.0)
    blocks = Shard.blocks
    running = []

    def slow(shard: Shard):
        running.append(1)
        assert len(running) == 1
        time.sleep(0.5)
        running.clear()
        return blocks(shard)

    monkeypatch.setattr(Shard, "blocks", slow)
    outcome = trained(plan_of(*ONE_RANK), tmp_path)
    assert outcome.codes == ["W0803"]
    assert steps_in(tmp_path / "checkpoints") == [2, 4, 6]


@pytest.mark.soak
def test_a_run_that_ends_on_what_is_not_finite_completes_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is the state to look for the cause from."""
    blocks = Shard.blocks

    def slow(shard: Shard):
        time.sleep(1.0)
        return blocks(shard)

    monkeypatch.setattr(Shard, "blocks", slow)
    plan = plan_of("train.checkpoint=every(1)", "train.optimizer=sgd(lr = 1e38)")
    with pytest.raises(NotFinite):
        trained(plan, tmp_path)
    assert steps_in(tmp_path / "checkpoints") == [1]
    content(tmp_path / "checkpoints", 1)


def test_a_rank_holds_one_copy_of_what_it_saves(tmp_path: Path):
    plan = plan_of()
    together = 0
    settings = settings_of(plan.spec, tmp_path, tmp_path)
    assert settings is not None
    for rank in VirtualRun(plan).ranks:
        shard = Checkpoints(rank, settings, print)._shard
        local = sum(tensor.nbytes for tensor in (*rank.memory.masters.values(), *rank.memory.states.values()))
        shard.take()
        assert shard._copy is not None
        first = shard._copy.data_ptr()
        shard.take()
        assert shard._copy.data_ptr() == first
        assert shard._copy.nbytes <= local
        together += shard._copy.nbytes
    # Together, each tensor once.
    assert together == sum(
        each.type.bytes + sum(state.type.bytes for state in each.states) for each in plan.program.parameters
    )


# ---------------------------------------------------------------- full disks

LIMITED = """
import resource, sys
from functools import partial
from pathlib import Path
from tests.runtime.checkpoint import runs

limit, lifted, overrides = int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3:]

class Said(list):
    def append(self, message):
        super().append(message)
        if lifted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

runs.Outcome = partial(runs.Outcome, said=Said())
plan = runs.plan_of(*overrides, text=Path("m.par").read_text())
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
outcome = runs.trained(plan, Path.cwd())
print(len(outcome.steps), outcome.unsaved)
for each in outcome.said:
    print(each.render())
"""


def limited(directory: Path, limit: int, *overrides: str, lifted: bool = False, text: str = TEXT) -> list[str]:
    """The lines of a run in a process whose files may have `limit` bytes; if `lifted`, until a save has failed."""
    (directory / "m.par").write_text(text)
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), str(lifted), *overrides],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.soak
def test_a_rank_that_cannot_write_costs_a_checkpoint_and_no_training(tmp_path: Path):
    """Rank 1 of two has three of four layers, and a file that is too large; then there is room again."""
    text = TEXT.replace("layer -> pipe", "layer -> pipe [1, 3]")
    mesh = ("cluster.data=1", "cluster.tensor=1", "layout=plain")
    trained(plan_of("train.steps=2", *mesh, text=text), tmp_path)
    small, large = (file.size for file in read_manifest(tmp_path / "checkpoints", 2).files)
    assert limited(tmp_path, (small + large) // 2, *mesh, lifted=True, text=text) == [
        "4 False",
        "warning[W0802]: step 4 was not saved: rank 1: File too large",
        "  = training continues; the last checkpoint is that of step 2",
    ]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["lock", "step-00000002", "step-00000006"]
    content(tmp_path / "checkpoints", 6)


def test_a_file_that_cannot_even_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(saving, "write_file", full)
    plan = plan_of(*ONE_RANK)
    error = Save(Store(tmp_path), manifest_of(plan.spec, plan.program), 0, Shard((), ()), 3).written(print)
    assert error is not None
    assert error.errno == errno.EDQUOT


@pytest.mark.parametrize(
    ("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False), (errno.EFBIG, False)]
)
def test_a_full_disk_and_a_used_up_quota_are_lack_of_space(number: int, full: bool, tmp_path: Path):
    class Failing(Store):
        def commit(self, *_: object) -> None:
            raise OSError(number, os.strerror(number))

    class Empty(Shard):
        def blocks(self):
            yield from ()

    plan = plan_of(*ONE_RANK)
    save = Save(Failing(tmp_path), manifest_of(plan.spec, plan.program), 0, Empty((), ()), 3)
    assert save.written(print) is None
    save.conclude(True, lambda: None)
    assert (save.full, save.trouble) == (full, f"rank 0: {os.strerror(number)}")


def test_a_rank_that_cannot_write_gives_its_space_back_at_once(tmp_path: Path):
    """Other ranks may need it, and are still writing."""

    class Short(Shard):
        def blocks(self):
            yield b"some"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plan = plan_of(*ONE_RANK)
    save = Save(Store(tmp_path), manifest_of(plan.spec, plan.program), 0, Short((), ()), 3)
    error = save.written(print)
    assert error is not None
    assert error.errno == errno.ENOSPC
    (partial,) = tmp_path.iterdir()
    assert list(partial.iterdir()) == []
    save.conclude(False, lambda: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_where_the_last_checkpoint_fails_the_run_says_so(tmp_path: Path):
    assert limited(tmp_path, 2000, *ONE_RANK)[:3] == [
        "6 True",
        "warning[W0802]: step 2 was not saved: rank 0: File too large",
        "  = training continues",
    ]
    assert os.listdir(tmp_path / "checkpoints") == ["lock"]


@pytest.mark.soak
def test_the_manifest_may_be_what_does_not_fit(tmp_path: Path):
    trained(plan_of("train.steps=2"), tmp_path / "other")
    commit = tmp_path / "other" / "checkpoints" / "step-00000002"
    *_, second, largest = sorted(path.stat().st_size for path in commit.iterdir())
    assert largest == (commit / "manifest.json").stat().st_size
    lines = limited(tmp_path, (second + largest) // 2)
    assert lines[:2] == ["6 True", "warning[W0802]: step 2 was not saved: rank 0: File too large"]
    assert os.listdir(tmp_path / "checkpoints") == ["lock"]


def small_disk(size: str, folder: Path, command: list[str]) -> subprocess.CompletedProcess:
    """Run a command where `folder` is a disk of its own; skips where this machine does not let us have one."""
    script = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(folder)]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mounts in a namespace here")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*prefix, *command],
        cwd=folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.soak
def test_a_full_disk(tmp_path: Path):
    """Two processes. There is room for one checkpoint, and for no second beside it."""
    (tmp_path / "m.par").write_text(TEXT)
    disk = tmp_path / "disk"
    disk.mkdir()
    overrides = ["cluster.data=1", "cluster.tensor=1", "ffn=256"]
    trained(plan_of("train.steps=2", *overrides), tmp_path / "other")
    commit = tmp_path / "other" / "checkpoints" / "step-00000002"
    size = 1.5 * sum(path.stat().st_size for path in commit.iterdir())
    run = f"{sys.executable} -m partita run m.par {' '.join(overrides)} --run-dir disk --transport gloo"
    # What is on the disk goes with its namespace: it is looked at inside.
    script = f"{run}; echo status $?; {sys.executable} -m partita checkpoint verify disk; ls disk/checkpoints"
    done = small_disk(f"{size / 1024:.0f}k", disk, ["sh", "-c", script])
    assert "status 3" in done.stdout, done.stdout + done.stderr
    assert "step 6/6  loss" in done.stdout
    assert re.search(r"step-00000002: intact \(2 files", done.stdout)
    assert done.stdout.split()[-2:] == ["lock", "step-00000002"]
    assert re.search(r"W0802\]: step 4 was not saved: .*No space left on device", done.stderr)
    assert "the last checkpoint is that of step 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.soak
def test_where_there_is_no_room_for_all_fewer_are_kept_and_each_is_saved(tmp_path: Path):
    """Room for three checkpoints, so that two are kept. Every step is saved; that fewer are kept is said once."""
    (tmp_path / "m.par").write_text(TEXT)
    disk = tmp_path / "disk"
    disk.mkdir()
    sizes = [*ONE_RANK, "ffn=256"]
    trained(plan_of("train.steps=2", *sizes), tmp_path / "other")
    commit = tmp_path / "other" / "checkpoints" / "step-00000002"
    pages = sum(-(-path.stat().st_size // 4096) for path in commit.iterdir())
    every = ["train.checkpoint=every(1, keep = 3)", "train.steps=8", "--run-dir", "disk", "--transport", "virtual"]
    run = shlex.join([sys.executable, "-m", "partita", "run", "m.par", *sizes, *every])
    done = small_disk(f"{3.4 * 4 * pages:.0f}k", disk, ["sh", "-c", f"{run}; echo status $?; ls disk/checkpoints"])
    assert done.stdout.split()[-5:] == ["status", "0", "lock", "step-00000007", "step-00000008"], done.stderr
    assert re.findall(r"W080.*", done.stderr) == [
        "W0805]: removed step-00000001 to free space for the checkpoint of step 4; from now on 2 are kept"
    ]


def test_what_can_be_spared_goes_first_where_room_is_short_and_the_newest_whole_one_never(tmp_path: Path):
    """One that was set aside; then the oldest; the newest one is cut off, so that the one before it stays."""
    plan = plan_of("train.steps=8", "train.checkpoint=every(2, keep = 4)", *ONE_RANK)
    trained(plan, tmp_path)
    path = tmp_path / "checkpoints"
    (path / "step-00000002").rename(path / "step-00000002.damaged")
    os.truncate(path / "step-00000008" / "rank-0.safetensors", 8)
    settings = settings_of(plan.spec, tmp_path, tmp_path)
    assert settings is not None
    said: list[Diagnostic] = []
    checkpoints = Checkpoints(VirtualRun(plan).ranks[0], settings, said.append)
    assert [checkpoints._makes_room(10) for _ in range(3)] == [True, True, False]
    assert steps_in(path) == [6, 8]
    assert [each.message for each in said] == [
        "removed step-00000002.damaged to free space for the checkpoint of step 10",
        "removed step-00000004 to free space for the checkpoint of step 10; from now on 2 are kept",
    ]


def test_what_runs_that_died_left_behind_goes_and_nothing_else(tmp_path: Path):
    for name in ("step-00000002", "step-00000004.partial-1f", "step-00000006.removed", "step-00000008.damaged"):
        (tmp_path / name / "inner").mkdir(parents=True)
    Store(tmp_path).clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000008.damaged"]


def test_a_damaged_commit_goes_with_the_whole_ones_of_its_time(tmp_path: Path):
    store = Store(tmp_path)
    (tmp_path / "step-00000002.damaged").mkdir()
    for step in (3, 5, 7):
        (tmp_path / f"step-{step:08}").mkdir()
        prune(store, 2)
        assert (tmp_path / "step-00000002.damaged").exists() == (step < 5)
    assert store.steps() == [5, 7]


@pytest.mark.soak
def test_the_ranks_that_could_not_write_are_named_and_only_they_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ranks 2 and 5 of eight have a full disk. So a supervisor, which names a rank that failed, names one of them."""
    blocks = Shard.blocks
    full = []

    def limited(shard: Shard):
        if any(shard is each for each in full):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return blocks(shard)

    monkeypatch.setattr(Shard, "blocks", limited)
    plan = plan_of("train.steps=2")
    settings = settings_of(plan.spec, tmp_path, tmp_path)
    assert settings is not None
    said: list[Diagnostic] = []
    run = VirtualRun(plan)
    checkpoints = [Checkpoints(rank, settings, said.append) for rank in run.ranks]
    full += [checkpoints[2]._shard, checkpoints[5]._shard]
    run.train(open_data(plan.program, plan.train, tmp_path), [], checkpoints)
    for each in checkpoints:
        each.close()
    (warning,) = said
    assert warning.message == "step 2 was not saved: ranks 2, 5: Disk quota exceeded"
    assert [rank for rank, each in enumerate(checkpoints) if each.unsaved] == [2, 5]


@pytest.mark.soak
def test_a_process_that_could_not_write_is_the_one_that_is_named(tmp_path: Path):
    """Rank 1 has the larger file, beyond what may be written; the other one does not end as if it were at fault."""
    (tmp_path / "m.par").write_text(TEXT.replace("layer -> pipe", "layer -> pipe [1, 3]"))
    mesh = ["cluster.data=1", "cluster.tensor=1", "layout=plain", "ffn=2048", "train.steps=2", "train.eval=none"]
    run = [sys.executable, "-m", "partita", "run", "m.par", *mesh, "--transport", "gloo"]
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 1000; {shlex.join(run)}"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "step 2 was not saved: rank 1: File too large" in done.stderr
    assert "partita: rank 1 could not write its part of the last checkpoint" in done.stderr


@pytest.mark.soak
def test_a_file_system_without_locks_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def none(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    outcome = trained(plan_of(), tmp_path)
    assert outcome.codes == ["W0806"]
    assert outcome.said[0].message == f"{tmp_path / 'checkpoints'} cannot be locked: No locks available"
    assert steps_in(tmp_path / "checkpoints") == [2, 4, 6]


# ---------------------------------------------------------------- whole runs


@pytest.mark.soak
def test_processes_resume_bit_for_bit_and_fall_back_together(tmp_path: Path):
    (tmp_path / "m.par").write_text(TEXT)
    run = ["run", "m.par", "cluster.data=1", "cluster.tensor=1", "train.steps=8"]
    whole = partita(*run, "--run-dir", "whole", cwd=tmp_path, timeout=200)
    assert whole.returncode == 0, whole.stderr
    first = partita(
        *run, "train.steps=5", "train.eval=every(3, batches = 1)", "--run-dir", "parts", cwd=tmp_path, timeout=200
    )
    assert first.returncode == 0, first.stderr
    # Only rank 1 reads this file, and rank 0 has to learn of it.
    path = tmp_path / "parts" / "checkpoints" / "step-00000005" / "rank-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    second = partita(*run, "--run-dir", "parts", cwd=tmp_path, timeout=200)
    assert second.returncode == 0, second.stderr
    assert "rank 1: warning[W0801]" in second.stderr
    assert "rank-1.safetensors: its SHA-256 is not the manifest's" in second.stderr
    assert "step 4/8  resumed from parts/checkpoints/step-00000004" in second.stdout
    assert computed(tmp_path / "parts") == computed(tmp_path / "whole")
    same(content(tmp_path / "parts" / "checkpoints", 8), content(tmp_path / "whole" / "checkpoints", 8))


@pytest.mark.soak
def test_llama_on_eight_processes_resumes_on_any_number(tmp_path: Path):
    """The file as it stands, saved under 2 × 2 × 2; `test_reshard.py` has more meshes, smaller."""
    text = (ROOT / "specs" / "llama.par").read_text()
    (tmp_path / "llama.par").write_text(text)
    (tmp_path / "anywhere.par").write_text(text.replace("pipe [3, 3]", "pipe"))
    options = ["train.checkpoint=every(3)", "--transport", "gloo"]
    whole = partita("run", "llama.par", "train.steps=6", *options, "--run-dir", "whole", cwd=tmp_path, timeout=200)
    assert whole.returncode == 0, whole.stderr
    assert partita("run", "llama.par", *options, "--run-dir", "saved", cwd=tmp_path, timeout=200).returncode == 0
    expected, worst = computed(tmp_path / "whole"), 0.0
    for layout in ("everything", "zero1"):
        for sizes in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)):
            axes = [f"cluster.{axis}={size}" for axis, size in zip(("data", "pipe", "tensor"), sizes, strict=True)]
            name = "-".join((layout, *map(str, sizes)))
            copytree(tmp_path / "saved", tmp_path / name)
            overrides = ["train.steps=6", f"layout={layout}", *axes]
            done = partita("run", "anywhere.par", *overrides, *options, "--run-dir", name, cwd=tmp_path, timeout=200)
            assert done.returncode == 0, done.stderr
            assert f"resumed from {name}/checkpoints/step-00000003" in done.stdout, name
            for one, other in zip(computed(tmp_path / name), expected, strict=True):
                assert one == pytest.approx(other, rel=1e-5, abs=1e-5), name
                worst = max(worst, abs(one["loss"] - other["loss"]))
    print(f"the largest difference of a loss: {worst:.1e}")


FEW = """
axis batch = 8, features = 4
model m(x: [batch, features]) { param w: [features] ~ ones()  loss mean(dot(x, w, over = features)) }
mesh cluster(data = 4)
layout plain on cluster { shard batch -> data }
train { data = random()  optimizer = sgd(lr = 0.1, momentum = 0.9)  steps = 2  checkpoint = every(2) }
"""


def test_more_ranks_than_tensors(tmp_path: Path):
    """Every rank has a file, though two of four have nothing to save."""
    run = trained(plan_of(text=FEW), tmp_path)
    manifest = read_manifest(tmp_path / "checkpoints", 2)
    assert [len(entries_of(manifest, rank)) for rank in range(4)] == [1, 1, 0, 0]
    same(content(tmp_path / "checkpoints", 2), tensors(run.run))


@pytest.mark.soak
def test_a_disk_that_takes_its_time_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While it says that all is there, for as long as it likes, ranks take marks."""
    import time

    from partita.runtime.tracing.flight import Flight

    real, slow = os.fsync, 0.4
    gaps: list[float] = []

    class Watched(Flight):
        last = time.monotonic()

        def mark(self) -> None:
            now = time.monotonic()
            gaps.append(now - self.last)
            self.last = now
            super().mark()

    def fsync(handle: int) -> None:
        time.sleep(slow)
        real(handle)

    plan = plan_of(*ONE_RANK, "train.steps=4")
    monkeypatch.setattr("partita.runtime.checkpoint.saving.POLL_SECONDS", slow / 20)
    monkeypatch.setattr("os.fsync", fsync)
    run = VirtualRun(plan)
    rank = run.ranks[0]
    watched = Watched(None)
    rank.flight = watched
    settings = settings_of(plan.spec, tmp_path, tmp_path)
    assert settings is not None
    checkpoints = Checkpoints(rank, settings, lambda _: None)
    run.cluster.run([checkpoints.resume()])
    run.cluster.run([checkpoints.save(2)])
    gaps.clear()
    watched.last = time.monotonic()
    run.cluster.run([checkpoints.finish()])
    checkpoints.close()
    assert steps_in(settings.path) == [2]
    assert len(gaps) > 10, "it marks many times within one fsync"
