"""A rank that stands still is named, with what it is doing: under our own supervisor, and under another launcher."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from random import Random

import pytest

from partita.runtime.supervision.processes import is_stopped
from tests.fault_injection.moments import ACTIONS, await_moment, doing
from tests.fault_injection.processes import PROC, wait_until
from tests.fault_injection.runs import LAYOUTS, RANKS, STALL_SECONDS, STEPS, TORCHRUN, Run
from tests.marks import soak

pytestmark = pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")

WITHIN_SECONDS = 2.0  # after the stall timeout
SAID = re.compile(rf"no progress for {STALL_SECONDS} s\n  rank (\d) is stopped, (.*) for \d+ s(.*)\n")


@pytest.fixture
def run(runs: Callable[..., Run], request: pytest.FixtureRequest) -> Run:
    return runs(Random(request.getfixturevalue("seed")).choice(sorted(LAYOUTS)))


def stall(run: Run, seed: int, prefix: tuple[str, ...] = ()) -> float:
    """Stop a rank at a random moment, and hold the message to what it was doing; how long that took to be said."""
    random = Random(seed)
    victim, step = random.randrange(RANKS), random.randrange(1, STEPS - 2)
    moment = random.choice(ACTIONS[run.layout])
    run.start("--stall-timeout", str(STALL_SECONDS), prefix=(sys.executable, *prefix))
    for _ in await_moment(run, victim, moment, step):
        pass
    position = run.position(victim)
    assert position is not None
    os.kill(position.process, signal.SIGSTOP)
    stopped = time.monotonic()
    process = position.process
    wait_until(lambda: is_stopped(process), "it stops")
    position = run.position(victim)
    assert position is not None
    _, words = doing(run.layout, position)
    run.story.append(f"rank {victim} stopped {words}, step {position.step}")
    wait_until(lambda: SAID.search(run.errors) is not None, f"the stall is noticed; errors: {run.errors}")
    seconds = time.monotonic() - stopped
    run.story.append(f"said after {seconds:.1f} s:\n{run.errors}")
    found = SAID.search(run.errors)
    assert found is not None
    assert found[1] == str(victim)
    assert words in found[2]
    assert f"step {position.step}" in found[3] or position.step <= 0
    return seconds


@pytest.mark.parametrize("seed", soak(0, 1))
def test_a_stalled_rank_is_named(seed: int, run: Run):
    stall(run, seed)
    ended = run.finish()
    assert ended.status == 3
    assert ended.errors.endswith("  ending all ranks\n")
    run.check_nothing_runs()


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2])
def test_a_stalled_rank_is_named_under_torchrun(seed: int, run: Run):
    """Which ends the others, and would wait half a minute for the one that is stopped."""
    stall(run, seed, TORCHRUN)
    for rank in range(RANKS):
        position = run.position(rank)
        assert position is not None
        wait_until(lambda: run.errors.count("no progress for") == 1, "it is said once")
        os.kill(position.process, signal.SIGCONT)
    assert run.finish().status != 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1_000, 1_020))
def test_stalled_ranks_are_named_in_time(seed: int, run: Run):
    assert stall(run, seed) < STALL_SECONDS + WITHIN_SECONDS
    assert run.finish().status == 3
