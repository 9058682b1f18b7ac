"""A slow rank is named, with what it is slow at and what that costs; a rank that waits, or has more to do, is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from partita.dsl.load import load_text
from partita.runtime import pace
from partita.runtime.pace import BATCH, UPDATE, Straggler, Sums, actions_of
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.tracing.flight import read
from tests.commands import records
from tests.fault_injection.processes import PROC
from tests.marks import soak

TEXT = """axis batch = 96, width = 96, hidden = 384
model m(x: [batch, width], y: [batch, width]) {
  let h = x
  repeat 4 as layer {
    param up: [width, hidden] ~ kaiming()
    param down: [hidden, width] ~ kaiming()
    let h = h + dot(relu(dot(h, up, over = width)), down, over = hidden)
  }
  loss mse(h, y)
}
mesh ranks(data = 2, pipe = 1)
layout l on ranks { shard batch -> data stage layer -> pipe }
schedule s = gpipe(microbatches = 2)
train { data = random() optimizer = adamw(lr = 1e-3) steps = 60 checkpoint = every(30) }
"""


def plan_of(*overrides: str) -> CompiledRun:
    spec, diagnostics = load_text(TEXT, "m.par", overrides)
    assert spec is not None, diagnostics
    return prepare(spec)


def sums_of(
    plan: CompiledRun,
    *rows: dict[str, float],
    waited: tuple[float, ...],
    steps: int = 20,
    cores: int = 4,
) -> Sums:
    """What the ranks say: seconds of a step by action, everything else a millisecond, and what they waited."""
    mesh = plan.program.mesh
    table = []
    for rank, (row, wait) in enumerate(zip(rows, waited, strict=True)):
        names = [each for each in dict.fromkeys(actions_of(plan.program.ranks[mesh.pipe_rank(rank)])) if each]
        assert set(row) <= set(names), names
        table.append([steps, wait * steps, *(row.get(name, 0.001) * steps for name in names)])
    width = max(map(len, table))
    padded = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in table], dtype=torch.float64)
    return Sums(plan.program, padded, torch.tensor([[7.0, cores]] * len(table)))


def test_the_slow_rank_is_named_with_its_action_and_cost():
    plan = plan_of("ranks.data=4")
    slow = {"BW of stage 0": 0.050}
    usual = {"BW of stage 0": 0.010}
    found = sums_of(plan, usual, usual, slow, usual, waited=(0.045, 0.044, 0.001, 0.046)).slow(plan.predicted)
    (one,) = found
    assert (one.rank, one.action, one.seconds, one.peers) == (2, "BW of stage 0", 0.05, 0.01)
    assert one.cost == pytest.approx(0.040 / 0.062, rel=0.05)
    assert str(one).startswith("rank 2 is slow and cost the run 6")
    assert str(one).endswith("% of its time: BW of stage 0 takes 50 ms per step, 10 ms on its peers")


def test_it_costs_no_more_than_its_peers_have_waited():
    plan = plan_of("ranks.data=2")
    pair = {BATCH: 0.050}, {BATCH: 0.010}
    (found,) = sums_of(plan, *pair, waited=(0.001, 0.012)).slow(plan.predicted)
    assert (found.rank, found.action) == (0, BATCH)
    assert found.cost == pytest.approx(0.012 / 0.057, rel=0.05)
    assert sums_of(plan, *pair, waited=(0.001, 0.001)).slow(plan.predicted) == ()


def test_several_are_named_the_worst_first():
    plan = plan_of("ranks.data=4")
    rows = {UPDATE: 0.03}, {}, {UPDATE: 0.05}, {}
    found = sums_of(plan, *rows, waited=(0.02, 0.05, 0.0, 0.05)).slow(plan.predicted)
    assert [each.rank for each in found] == [2, 0]
    assert all(each.action == UPDATE for each in found)


def test_what_differs_little_or_seldom_is_not():
    plan = plan_of("ranks.data=2")
    even = {"BW of stage 0": 0.011}, {"BW of stage 0": 0.010}
    assert sums_of(plan, *even, waited=(0.0, 0.001)).slow(plan.predicted) == ()
    odd = {"BW of stage 0": 0.050}, {"BW of stage 0": 0.010}
    assert sums_of(plan, *odd, waited=(0.0, 0.04), steps=19).slow(plan.predicted) == ()
    assert sums_of(plan, *odd, waited=(0.0, 0.04)).slow(plan.predicted) != ()
    assert sums_of(plan, *odd, waited=(0.0, 0.04), cores=1).slow(plan.predicted) == ()
    alone = plan_of("ranks.data=1")
    assert sums_of(alone, {"BW of stage 0": 9.0}, waited=(0.0,)).slow(alone.predicted) == ()


def test_a_stage_that_has_more_to_do_is_not_slow_but_a_rank_that_takes_longer_than_that_is():
    """Of a pipeline, where every rank has stages of its own, and there is a prediction to compare them by."""
    plan = plan_of("ranks.data=1", "ranks.pipe=2")
    assert all(seconds > 0 for seconds in plan.predicted)
    rows = {"BW of stage 0": 0.03}, {"BW of stage 1": 0.09}
    assert sums_of(plan, *rows, waited=(0.06, 0.001)).slow((2.0, 6.0)) == ()
    (found,) = sums_of(plan, *rows, waited=(0.06, 0.001)).slow((2.0, 2.0))
    assert (found.rank, found.action) == (1, "BW of stage 1")
    rows = {"BW of stage 0": 0.03}, {"BW of stage 1": 0.27}
    (found,) = sums_of(plan, *rows, waited=(0.24, 0.001)).slow((2.0, 6.0))
    assert (found.rank, found.action) == (1, "BW of stage 1")


def test_ranks_that_share_too_few_cores_are_known(monkeypatch: pytest.MonkeyPatch):
    """By which cores each may use: those of a supervisor and of Slurm are bound to some, those of torchrun share."""
    bound = [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)]
    sharing, others = [(4.0, 2.0)] * 3, [(5.0, 2.0)] * 2
    assert pace._crowded([*bound, *sharing, *others]) == {3, 4, 5}
    own = pace._cores()
    assert own == pace._cores()
    monkeypatch.setattr(pace, "machine", lambda: 1)
    assert pace._cores() != own, "of another machine"


# ---------------------------------------------------------------- real ranks


def held_up(folder: Path, victim: int, *overrides: str) -> Iterator[str]:
    """A run of which one rank is stopped most of the time; what it says."""
    (folder / "m.par").write_text(TEXT)
    command = [sys.executable, "-m", "partita", "run", "m.par", "--run-dir", "run", *overrides]
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=environment, text=True, stderr=subprocess.PIPE)
    try:
        while process.poll() is None:
            found = None
            for directory in folder.glob("partita-*"):
                with suppress(OSError):
                    found = read(directory, victim) or found
            if found is not None and found.step > 1:
                # It runs for as long as a step of the others may take, and stands still for ten times as long: by how
                # much it is slower does not depend on how fast the machine is.
                with suppress(ProcessLookupError):
                    os.kill(found.process, signal.SIGSTOP)
                    time.sleep(0.1)
                    os.kill(found.process, signal.SIGCONT)
            time.sleep(0.01)
        assert process.stderr is not None
        yield process.stderr.read()
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("victim", "overrides"), soak((0, ()), (1, ("ranks.data=1", "ranks.pipe=2"))))
def test_a_rank_that_stands_still_most_of_the_time_is_named(victim: int, overrides: tuple[str, ...], tmp_path: Path):
    (said,) = held_up(tmp_path, victim, *overrides)
    assert said.count("warning[W0604]") == 1, said
    assert f"warning[W0604]: rank {victim} is slow and cost the run " in said
    found = [each for each in records(tmp_path / "run") if "slow_ranks" in each]
    assert {each["step"] for each in found} <= {30, 60}
    assert found
    for each in found:
        first = Straggler(**each["slow_ranks"][0])
        assert first.rank == victim
        assert first.seconds > 2 * first.peers
        assert 0.1 <= first.cost <= 1
    assert len([each for each in records(tmp_path / "run") if "loss" in each]) == 60
