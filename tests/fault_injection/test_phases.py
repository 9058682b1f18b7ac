"""No phase of a run is unwatched: starting, standing ready, ending; a reaper that is stopped or killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable

import pytest

from partita.runtime.supervision.processes import is_stopped
from partita.runtime.tracing.flight import ENDED, READY, STARTING
from tests.fault_injection.moments import await_moment
from tests.fault_injection.processes import PROC, launched, marked, rank_of, wait_until
from tests.fault_injection.runs import RANKS, STALL_SECONDS, STEPS, TORCHRUN, Run
from tests.marks import soak

pytestmark = pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")


@pytest.fixture
def run(runs: Callable[..., Run]) -> Run:
    return runs("pipeline")


def ranks_of(run: Run) -> dict[int, list[int]]:
    """The processes of ranks by number: those of the attempt under way, and those that stand ready."""
    found: dict[int, list[int]] = {}
    for process in sorted(marked(run.mark)):
        rank = rank_of(process)
        if rank is not None:
            found.setdefault(rank, []).append(process)
    return found


def reaper_of(run: Run) -> int:
    (found,) = [process for process, command in marked(run.mark).items() if "reaper.py" in command]
    return found


@pytest.mark.parametrize("when", soak("as a process", "starting", "ready"))
def test_a_rank_that_is_stopped_before_it_begins_is_named(run: Run, when: str) -> None:
    """Also before it has a recorder: nothing could be read of it then."""
    run.start("--stall-timeout", str(STALL_SECONDS))
    wait_until(lambda: 1 in ranks_of(run), "rank 1 is started")
    (process,) = ranks_of(run)[1]
    wanted = {"as a process": None, "starting": STARTING, "ready": READY}[when]
    if wanted is not None:
        wait_until(lambda: (p := run.position(1)) is not None and p.activity >= wanted, "it comes so far")
    os.kill(process, signal.SIGSTOP)
    ended = run.finish()
    assert ended.status == 3
    assert re.search(r"no progress for 10 s\n  rank 1 is stopped, .* for \d+ s", ended.errors), ended.errors
    run.check_nothing_runs()


@pytest.mark.soak
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.05, 0.2])
def test_a_rank_that_is_stopped_at_the_end_is_named(run: Run, delay: float) -> None:
    """All others have ended, or wait for it."""
    run.start("--stall-timeout", str(STALL_SECONDS))
    wait_until(lambda: (p := run.position(1)) is not None and (p.step >= STEPS or p.activity == ENDED), "its last step")
    position = run.position(1)
    assert position is not None
    time.sleep(delay)
    try:
        os.kill(position.process, signal.SIGSTOP)
    except ProcessLookupError:
        return  # it has ended before
    ended = run.finish()
    assert ended.status in (0, 3)
    if ended.status == 3:
        assert "rank 1 is stopped, " in ended.errors
    run.check_nothing_runs()


@pytest.mark.soak
def test_a_rank_that_stands_ready_and_is_stopped_holds_nothing_up(run: Run) -> None:
    """It is exchanged when it is needed."""
    run.start("--restarts", "1", "--stall-timeout", str(STALL_SECONDS))
    for _ in await_moment(run, 0, "between steps", 2):
        pass
    wait_until(lambda: all(len(each) == 2 for each in ranks_of(run).values()), "the next ranks are started")
    now = {position.process for rank in range(RANKS) if (position := run.position(rank))}
    next_ranks = [process for each in ranks_of(run).values() for process in each if process not in now]
    os.kill(next_ranks[1], signal.SIGSTOP)
    os.kill(min(now), signal.SIGKILL)
    ended = run.finish()
    assert ended.status == 0, ended
    run.check_nothing_remains()


@pytest.mark.parametrize(
    ("name", "end"),
    [
        *soak(
            ("SIGKILL", "SIGTERM"),
            ("SIGSTOP", "SIGTERM"),
            ("SIGKILL", "SIGKILL"),
            ("SIGSTOP", "itself"),
            ("SIGSTOP", "SIGKILL"),
            ("SIGKILL", "itself"),
        ),
    ],
)
def test_a_reaper_is_not_needed_twice(run: Run, name: str, end: str) -> None:
    """One that is stopped is woken, one that was killed is exchanged; the supervisor hears signals all the while."""
    run.start("train.steps=40" if end == "itself" else "train.steps=4000")
    for _ in await_moment(run, 0, "between steps", 2):
        pass
    before, number = reaper_of(run), signal.Signals[name]
    os.kill(before, number)
    if number == signal.SIGKILL:
        wait_until(lambda: any("reaper" in each for p, each in marked(run.mark).items() if p != before), "another")
    else:
        wait_until(lambda: not is_stopped(before), "it is woken")
    assert run.process is not None
    if end != "itself":
        run.process.send_signal(getattr(signal, end))
    ended = run.finish()
    status, said = {
        "itself": (0, ""),
        "SIGTERM": (143, r"partita: ended by SIGTERM: saved step \d+; the same command goes on\n"),
        "SIGKILL": (-9, ""),
    }[end]
    assert ended.status == status
    assert re.fullmatch(said, ended.errors), ended.errors
    run.check_nothing_runs()


@pytest.mark.soak
def test_nothing_outlives_a_supervisor_whose_reaper_is_killed_with_it(run: Run) -> None:
    run.start("train.steps=4000")
    for _ in await_moment(run, 0, "between steps", 2):
        pass
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGSTOP)  # so that it does not see what comes
    os.kill(reaper_of(run), signal.SIGKILL)
    os.kill(run.process.pid, signal.SIGKILL)
    run.finish()
    wait_until(lambda: not marked(run.mark), "its processes end")


@pytest.mark.soak
def test_a_rank_that_never_comes_is_named_under_another_launcher(run: Run) -> None:
    """It is stopped before the meeting of all."""
    run.start("--stall-timeout", "1", prefix=(sys.executable, *TORCHRUN))
    wait_until(lambda: len(launched(run.mark)) == RANKS, "both ranks are started")
    os.kill(launched(run.mark)[1], signal.SIGSTOP)
    wait_until(lambda: "rank 0: rank 1 has not come to the rendezvous" in run.errors, "it is said", 300)
    os.kill(launched(run.mark)[1], signal.SIGCONT)
    assert run.finish().status != 0
