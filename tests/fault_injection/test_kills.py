"""A run that is struck by a real signal, at any moment, says so or goes on; nothing is lost, and nothing remains of it.

Each run is drawn from a number, which its name shows: who is struck, by which signal, doing what, in which step.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache, partial
from random import Random

import pytest
from attrs import evolve, frozen

from partita.runtime.tracing.flight import ACTIVITIES, ENDED, READY, STARTING
from tests.fault_injection.moments import ACTIONS, EDGES, SAVES, await_moment, doing
from tests.fault_injection.processes import PROC, marked, private_networks, rank_of, wait_until
from tests.fault_injection.runs import ALL, INTERVAL, LAYOUTS, RANKS, STALL_SECONDS, STEPS, Ended, Run

pytestmark = pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")

RANK, SUPERVISOR, GROUP, REAPER = "a rank", "the supervisor", "the foreground group", "the reaper"
PAUSE = signal.SIGCONT  # stopped, and after a while woken again
# Who is struck, and how: each in its turn.
STRIKES = (
    (RANK, signal.SIGKILL),
    (SUPERVISOR, signal.SIGKILL),
    (RANK, signal.SIGSTOP),
    (GROUP, signal.SIGINT),
    (RANK, signal.SIGTERM),
    (SUPERVISOR, signal.SIGTERM),
    (RANK, signal.SIGINT),
    (SUPERVISOR, signal.SIGINT),
    (RANK, PAUSE),
    (SUPERVISOR, PAUSE),
    (REAPER, signal.SIGKILL),
    (REAPER, signal.SIGSTOP),
)
PAUSE_SECONDS = 1.0
FIRST_SOAK = 1_000  # the number of the first run that is not part of `make test`
# All that may stand on standard error; tracebacks and what libraries say of their own troubles are none of it.
SAID = re.compile(
    r"partita: (rank \d (was killed by SIG\w+|lost its connection|ended with exit status).*"
    r"|(interrupted|ended by SIGTERM|saving this step).*|no progress for \d+ s"
    r"|restarting all ranks, 1 of at most 1 times)"
    r"|  rank \d (was|waited|waits|is) .*|  details: run/fault\.json|  ending all ranks"
    r"|rank \d: partita: (.* failed: |lost the store at ).*"  # of a peer, by who is ended next
)
OF_A_PEER = re.compile(r"rank \d: .*\n")


# What a machine that is busy otherwise may add: that a checkpoint was due before the last one was written, or that a
# rank which was stopped for a while held up the others. And, where a run was struck at its end, that it is finished.
SLOW = re.compile(r"rank 0: warning\[(W0803|W0604|W0810)\].*\n(rank 0:   .*\n)*(rank 0: \n)?")


@frozen
class Case:
    """A run, and how it is struck."""

    layout: str
    target: str
    number: signal.Signals
    victim: int
    moment: str
    step: int
    keep: int
    restarts: int
    waits: bool  # for what the run has left to be gone, before it is started again

    def __str__(self) -> str:
        name = "SIGSTOP and SIGCONT" if self.number == PAUSE else self.number.name
        return (
            f"{self.layout}: {self.target} gets {name}, rank {self.victim} being at `{self.moment}` from step "
            f"{self.step} on; keep {self.keep}, restarts {self.restarts}"
        )


def drawn(seed: int) -> Case:
    random = Random(seed)
    target, number = STRIKES[seed % len(STRIKES)]
    layout = random.choice(sorted(LAYOUTS))
    moment = random.choice(random.choices((SAVES, ACTIONS[layout], EDGES), (4, 6, 3))[0])
    return Case(
        layout,
        target,
        number,
        random.randrange(RANKS),
        moment,
        0 if moment in EDGES else random.randrange(1, STEPS - 2),
        random.choice((1, 2, ALL, ALL)),
        random.randrange(2),
        random.random() < 0.5,
    )


@pytest.fixture
def run(runs: Callable[..., Run], request: pytest.FixtureRequest) -> Run:
    case = drawn(request.getfixturevalue("seed"))
    return runs(case.layout, case.keep, [str(case)])


def strike(run: Run, case: Case) -> tuple[set[int], bool]:
    """Strike at the moment; the commits that were seen before, and whether there was still somebody to strike."""
    run.start("--restarts", str(case.restarts), "--stall-timeout", str(STALL_SECONDS if stalls(case) else 600))
    seen: set[int] = set()
    looked = False
    for commits in await_moment(run, case.victim, case.moment, case.step):
        seen = commits
        position = run.position(case.victim)
        if not looked and position is not None and position.step > 0:
            run.held.look(marked(run.mark))
            assert run.held.sockets, "Gloo listens for its peers; if not, nothing is seen here"
            if private_networks():
                assert not run.held.reachable, "nobody but ranks reaches what they listen on"
            looked = True
    position = run.position(case.victim)
    assert run.process is not None
    send = os.killpg if case.target == GROUP else os.kill
    reapers = [process for process, command in marked(run.mark).items() if "reaper.py" in command]
    if position is None or run.process.poll() is not None or not reapers:
        return seen, False
    process = {RANK: position.process, REAPER: min(reapers)}.get(case.target, run.process.pid)
    try:
        send(process, signal.SIGSTOP if case.number == PAUSE else case.number)
    except ProcessLookupError:
        return seen, False
    run.story.append(f"struck in {doing(case.layout, position)[1]}, step {position.step}; the save: {run.partial()}")
    if case.number == PAUSE:
        time.sleep(PAUSE_SECONDS)
        with suppress(ProcessLookupError):
            send(process, signal.SIGCONT)
    return seen, True


def stalls(case: Case) -> bool:
    return case.number == signal.SIGSTOP and case.target == RANK


def check_said(case: Case, ended: Ended, struck: bool) -> None:
    """The run has ended as it must, and says why, and nothing else."""
    errors = SLOW.sub("", ended.errors)
    assert [line for line in errors.splitlines() if not SAID.fullmatch(line)] == []
    late = case.moment == ACTIVITIES[ENDED] and (ended.status, errors) == (0, "")  # all had been done
    if case.number == PAUSE or case.target == REAPER or not struck or late:
        assert (ended.status, errors) == (0, "")
    elif case.target == RANK and case.number != signal.SIGTERM:
        what = "is stopped, " if stalls(case) else f"was killed by {case.number.name}"
        assert f"rank {case.victim} {what}" in errors
        assert ended.status == (0 if case.restarts else 3)
        assert errors.count("restarting all ranks") == case.restarts
    elif case.number == signal.SIGKILL:
        assert (ended.status, errors) == (-signal.SIGKILL, "")
    else:
        assert ended.status == 128 + case.number
        errors = OF_A_PEER.sub("", errors) if case.target == RANK else errors
        assert evolve(ended, errors=errors).said(case.number) is not None, errors


def check_kept(case: Case, seen: set[int], found: dict[int, tuple[str, ...]]) -> None:
    """What was committed is there, but for what `keep` has removed."""
    if seen:
        assert max(found, default=0) >= max(seen)
        assert len(found) >= min(case.keep, len(seen))
    if case.keep == ALL:
        assert seen <= found.keys()


def survives(run: Run, seed: int, undisturbed) -> None:
    case = drawn(seed)
    records, commits = undisturbed(case.layout)
    seen, struck = strike(run, case)
    ended = run.finish()
    if case.waits or ended.status == 0:
        run.check_nothing_runs()
    check_said(case, ended, struck)
    if ended.status != 0:
        saved = run.commits() if case.waits else {}
        if case.waits:
            check_kept(case, seen, saved)
            assert all(commits[step] == hashes for step, hashes in saved.items())
        run.start()
        ended = run.finish()
        assert (ended.status, SLOW.sub("", ended.errors)) == (0, "")
        if saved:
            assert f"resumed from run/checkpoints/step-{max(saved):08}" in ended.out
        elif seen:
            (step,) = re.findall(r"resumed from run/checkpoints/step-(\d+)", ended.out)
            assert int(step) >= max(seen)
    run.check_nothing_remains()
    assert run.records() == records
    assert run.commits() == {step: commits[step] for step in run.expected()}
    assert case.number in (signal.SIGTERM, signal.SIGINT) or not any(step % INTERVAL for step in run.expected())


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_a_run_survives(seed: int, run: Run, undisturbed):
    survives(run, seed, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0])
def test_ranks_that_stand_ready_may_die_first(seed: int, run: Run, undisturbed):
    """They are started anew when they are needed."""
    run.start("--restarts", "1")
    for _ in await_moment(run, 0, "between steps", 4):
        pass
    ranks = {position.process for rank in range(RANKS) if (position := run.position(rank))}
    assert run.process is not None
    wait_until(lambda: len(ready(run, ranks)) == RANKS, "the next ranks are started")
    os.kill(ready(run, ranks)[0], signal.SIGKILL)
    os.kill(min(ranks), signal.SIGKILL)
    ended = run.finish()
    assert ended.status == 0
    assert ended.errors.count("restarting all ranks") == 1
    run.check_nothing_remains()
    records, commits = undisturbed(run.layout)
    assert run.records() == records
    assert run.commits() == {step: commits[step] for step in run.expected()}


def ready(run: Run, ranks: set[int]) -> list[int]:
    """The ranks of a run that are not among those that train."""
    return [process for process in marked(run.mark) if process not in ranks and rank_of(process) is not None]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(FIRST_SOAK, FIRST_SOAK + 100))
def test_runs_survive(seed: int, run: Run, undisturbed):
    survives(run, seed, undisturbed)


# ---------------------------------------------------------------- strike after strike


# SIGTERM ends the run: the first test has it.
LETHAL = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGINT, signal.SIGSTOP)
STRIKES_OF_A_RUN, LONG = 8, 80  # the strikes, and the steps: enough for all of them
CULPRIT = re.compile(r"rank (\d) (?:was killed by (SIG\w+)|is (stopped), )")


@pytest.fixture(scope="session")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[dict], tuple[str, ...]]]:
    """What a long run of a layout computes, and the hashes of its last checkpoint."""

    @cache
    def of(layout: str) -> tuple[list[dict], tuple[str, ...]]:
        run = Run(tmp_path_factory.mktemp(layout), layout)
        run.alone(f"train.steps={LONG}")
        return run.records(), run.commits()[LONG]

    return of


def begun(run: Run, victim: int, gone: Collection[int]) -> bool:
    """Whether a rank that is none of those that are gone has had the word to begin; or the run has ended."""
    position = run.position(victim)
    new = position is not None and position.process not in gone and position.activity not in (STARTING, READY)
    return new or (run.process is not None and run.process.poll() is not None)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2_000, 2_060))
def test_a_run_survives_strike_after_strike(
    seed: int, runs: Callable[..., Run], undisturbed_long, record_property: Callable[[str, object], None]
):
    """At random times of each attempt: as it connects, loads, trains or saves. Each culprit is named in its turn."""
    random = Random(seed)
    run = runs(random.choice(sorted(LAYOUTS)))
    records, last = undisturbed_long(run.layout)
    options = f"train.steps={LONG}", "--restarts", str(2 * STRIKES_OF_A_RUN), "--stall-timeout", str(STALL_SECONDS)
    run.start(*options)
    assert run.process is not None
    struck: list[tuple[str, str]] = []
    late: list[tuple[str, str]] = []
    gone: set[int] = set()
    for _ in range(STRIKES_OF_A_RUN):
        victim, number = random.randrange(RANKS), random.choice(LETHAL)
        wait_until(partial(begun, run, victim, gone), "the next attempt begins")
        time.sleep(random.uniform(0.0, 1.0))
        position = run.position(victim)
        if position is None or position.step >= LONG - 2 or run.process.poll() is not None:
            break
        run.story.append(f"rank {victim} gets {number.name} {doing(run.layout, position)[1]}, step {position.step}")
        with suppress(ProcessLookupError):
            os.kill(position.process, number)
            struck.append((str(victim), "stopped" if number == signal.SIGSTOP else number.name))
        gone |= {each.process for rank in range(RANKS) if (each := run.position(rank)) is not None}
        gone.add(position.process)
        if (after := run.position(victim)) is not None and after.activity == ENDED:
            late = struck[-1:]  # it may have done all that it had to do
            break
    ended = run.finish()
    assert ended.status == 0, ended
    named = [(rank, name or stopped) for rank, name, stopped in CULPRIT.findall(ended.errors)]
    assert named in (struck, struck[: len(struck) - len(late)])
    assert ended.errors.count("restarting all ranks") == len(named)
    run.check_nothing_runs()
    assert run.records() == records
    assert run.commits()[LONG] == last
    record_property("strikes", len(named))  # `--junitxml` has them, to be summed
