"""A run that a scheduler preempts, at any moment, leaves a whole checkpoint of the step in progress or the last one.

Each run is drawn from a number: which signal, how it was started, and when it gets the signal.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from random import Random

import pytest

from partita.runtime.tracing.flight import ACTIVITIES, CONNECTING, ENDED, STARTING
from tests.fault_injection.moments import ACTIONS, SAVES, await_moment
from tests.fault_injection.processes import PROC, wait_until
from tests.fault_injection.runs import STEPS, TORCHRUN, Run

pytestmark = pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")

GRACE = 60
BEFORE = "before it has ranks"  # while the file is read and compiled
PHASES = (BEFORE, ACTIVITIES[STARTING], ACTIVITIES[CONNECTING], *ACTIONS["zero3"], *SAVES, ACTIVITIES[ENDED])
HANDLED = ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "--shutdown-timeout", str(GRACE))


def preempted(run: Run, seed: int, undisturbed: Callable[[str], tuple[list[dict], dict]]) -> tuple[str, float]:
    """Preempt a run, and go on; the phase and the seconds that the run took to end."""
    random = Random(seed)
    records, commits = undisturbed(run.layout)
    number = random.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))
    phase = PHASES[seed % len(PHASES)]
    torchrun = seed % 5 == 4
    prefix = (sys.executable, *TORCHRUN, *HANDLED) if torchrun else (sys.executable,)
    rare = "train.checkpoint=every(1000)" if phase not in SAVES else "train.checkpoint=every(2, keep = 100)"
    run.story.append(f"{number.name} at `{phase}`{', under torchrun' if torchrun else ''}")
    run.start(rare, "--grace", str(GRACE), prefix=prefix)
    if phase == BEFORE:
        time.sleep(random.uniform(0.0, 2.0))
    else:
        for _ in await_moment(run, random.randrange(2), phase, 0 if phase in ACTIVITIES else random.randrange(1, 12)):
            pass
    position = run.position(0)
    assert run.process is not None
    run.process.send_signal(number)
    begun = time.monotonic()
    ended = run.finish()
    seconds = time.monotonic() - begun
    assert seconds < GRACE + 5
    said = None
    late = phase == ACTIVITIES[ENDED] and ended.status == 0
    if not torchrun:
        assert late or ended.status in (128 + number, -number), ended
        said = ended.said(number)
        assert late or said is not None or ended.errors == "", ended
    else:
        assert late or ended.status != 0
    saved = run.commits() if run.checkpoints.exists() else {}
    assert all(commits[step] == hashes for step, hashes in saved.items())
    assert not said or int(said) == max(saved)
    if position is not None and position.step > 1:
        # Of the step in progress: all ranks had begun.
        assert max(saved, default=0) >= position.step
    run.start()
    ended = run.finish()
    assert ended.status == 0, ended
    if saved and max(saved) < STEPS:
        assert f"resumed from run/checkpoints/step-{max(saved):08}" in ended.out
    assert run.records() == records
    return phase, seconds


@pytest.mark.soak
@pytest.mark.parametrize("seed", [7, *range(50)])
def test_a_preempted_run_has_saved(
    seed: int, runs: Callable[..., Run], undisturbed, record_property: Callable[[str, object], None]
) -> None:
    phase, seconds = preempted(runs("zero3"), seed, undisturbed)
    record_property("phase", phase)
    record_property("seconds", round(seconds, 2))


# What an interpreter runs before its program: while a file is there, step 7 of rank 1 is longer than any grace time.
SLOW = """
import os, sys
if "fork_server" in " ".join(sys.orig_argv):
    import time
    import partita.runtime.executor as executor
    compute = executor.Executor.compute
    def slow(self, number, *arguments, **options):
        if number == 7 and os.environ.get("PARTITA_RANK") == "1" and os.path.exists(os.environ["SLOW"]):
            time.sleep(600)
        return compute(self, number, *arguments, **options)
    executor.Executor.compute = slow
"""


@pytest.mark.soak
def test_what_is_not_saved_in_time_is_as_it_was(
    runs: Callable[..., Run], undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes longer than the grace time: the checkpoint before is the last, and the run goes on from it."""
    run = runs("zero3")
    (run.folder / "site").mkdir()
    (run.folder / "site" / "sitecustomize.py").write_text(SLOW)
    (run.folder / "slow").touch()
    monkeypatch.setenv("PYTHONPATH", str(run.folder / "site"), prepend=os.pathsep)
    monkeypatch.setenv("SLOW", str(run.folder / "slow"))
    records, commits = undisturbed("zero3")
    run.start("--grace", "1")
    for _ in await_moment(run, 0, "committed", 6):
        pass
    wait_until(lambda: (p := run.position(0)) is not None and p.step == 7, "rank 0 waits in step 7")
    assert run.process is not None
    run.process.send_signal(signal.SIGUSR1)
    ended = run.finish()
    assert (ended.status, ended.said(signal.SIGUSR1)) == (128 + signal.SIGUSR1, ""), ended
    assert run.commits() == {step: commits[step] for step in (2, 4, 6)}
    (run.folder / "slow").unlink()
    run.start()
    ended = run.finish()
    assert ended.status == 0, ended
    assert "resumed from run/checkpoints/step-00000006" in ended.out
    assert run.records() == records
