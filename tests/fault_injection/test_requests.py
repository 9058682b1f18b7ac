"""A run that is asked to end saves and ends; what fails around it does not end it; what it began with stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from partita.runtime.checkpoint.address_store import steps_in
from tests.fault_injection.moments import await_moment
from tests.fault_injection.processes import PROC, wait_until
from tests.fault_injection.runs import RUN_DIRECTORY, STEPS, TORCHRUN, Run
from tests.marks import soak

pytestmark = pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")


@pytest.fixture
def run(runs: Callable[..., Run]) -> Run:
    return runs("zero3")


@pytest.fixture
def expected(undisturbed: Callable[[str], tuple[list[dict], dict]]) -> list[dict]:
    return undisturbed("zero3")[0]


# ---------------------------------------------------------------- SIGTERM


@pytest.mark.soak
@pytest.mark.parametrize("how", ["supervisor", *soak("one process", "torchrun")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_end_saves_the_step(
    run: Run, expected: list[dict], how: str, number: signal.Signals
) -> None:
    """Whichever it is, and goes on from there as if nothing had happened."""
    rare = "train.checkpoint=every(1000)"
    prefix = (sys.executable, *TORCHRUN) if how == "torchrun" else (sys.executable,)
    options = ("--transport", "virtual") if how == "one process" else ()
    run.start(rare, *options, prefix=prefix)
    metrics = run.directory / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "some steps are done")
    assert run.process is not None
    run.process.send_signal(number)
    ended = run.finish()
    assert ended.status == (128 + number if how != "torchrun" else ended.status) != 0
    (step,) = steps_in(run.checkpoints)
    assert 3 < step < STEPS
    if how == "torchrun":
        assert f"partita: saved step {step}; the same command goes on\n" in ended.errors
    else:
        assert ended.said(number) == str(step), ended
    run.start(rare)
    ended = run.finish()
    assert ended.status == 0, ended
    assert f"resumed from run/checkpoints/step-{step:08}" in ended.out
    assert run.records() == expected


@pytest.mark.soak
def test_one_rank_that_is_asked_to_end_takes_all_along(run: Run, expected: list[dict]) -> None:
    """The run ends as if its supervisor had been asked: it is not restarted, and goes on when it is started again."""
    rare = "train.checkpoint=every(1000)"
    run.start(rare, "--restarts", "1")
    for _ in await_moment(run, 1, "between steps", 3):
        pass
    position = run.position(1)
    assert position is not None
    os.kill(position.process, signal.SIGTERM)
    ended = run.finish()
    (step,) = steps_in(run.checkpoints)
    assert (ended.status, ended.said(signal.SIGTERM)) == (143, str(step)), ended
    run.start(rare)
    ended = run.finish()
    assert ended.status == 0, ended
    assert f"resumed from run/checkpoints/step-{step:08}" in ended.out
    assert run.records() == expected


@pytest.mark.soak
def test_without_checkpoints_a_run_ends_at_once(run: Run) -> None:
    run.start("train.checkpoint=none", "train.steps=4000")
    for _ in await_moment(run, 1, "between steps", 2):
        pass
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.finish().status == 143
    assert not run.checkpoints.exists()


# ---------------------------------------------------------------- display


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "transport"),
    [
        ("a reader that leaves", "gloo"),
        *soak(
            ("a reader that leaves", "virtual"),
            ("a full disk", "virtual"),
            ("a full disk", "gloo"),
            ("closed", "gloo"),
            ("closed", "virtual"),
        ),
    ],
)
def test_a_run_outlives_its_display(run: Run, expected: list[dict], how: str, transport: str) -> None:
    command = f"{sys.executable} -m partita run m.par --run-dir {RUN_DIRECTORY} --transport {transport}"
    line = {
        "a reader that leaves": f"set -o pipefail; {command} 2> errors | head -1",
        "a full disk": f"{command} > /dev/full 2> errors",
        "closed": f"{command} >&- 2> errors",
    }[how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", line], cwd=run.folder, env=environment, timeout=240, check=False)
    errors = (run.folder / "errors").read_text()
    assert done.returncode == 0, errors
    assert run.records() == expected
    why = {"a reader that leaves": "its reader has exited", "a full disk": "No space left on device"}.get(how)
    assert errors.count("standard output failed") == (0 if why is None else 1)
    assert why is None or why in errors


@pytest.mark.soak
def test_a_run_outlives_its_errors(run: Run, expected: list[dict]) -> None:
    """Where nothing can be said any more, a killed rank is started again all the same."""
    line = f"{sys.executable} -m partita run m.par --run-dir {RUN_DIRECTORY} --restarts 1 > out 2> /dev/full"
    (run.folder / "errors").write_text("")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(run.temporary)}
    run.process = subprocess.Popen(["bash", "-c", line], cwd=run.folder, env=environment)
    for _ in await_moment(run, 1, "between steps", 3):
        pass
    position = run.position(1)
    assert position is not None
    os.kill(position.process, signal.SIGKILL)
    assert run.process.wait(240) == 0
    assert run.records() == expected


# ---------------------------------------------------------------- restarts


FAULTS = {
    "RuntimeError": "RuntimeError('CUDA error: uncorrectable ECC error encountered')",
    "OSError": "OSError(5, 'Input/output error')",
    "MemoryError": "MemoryError()",
    "SystemError": "SystemError('from C')",
}
# What an interpreter runs before its program: rank 1 fails once, in its fifth step.
FAULTY = """
import os, sys
if "fork_server" in " ".join(sys.orig_argv):
    from pathlib import Path
    import partita.runtime.executor as executor
    compute = executor.Executor.compute
    def faulty(self, number, *arguments, **options):
        once = Path(os.environ["FAULT"])
        if os.environ.get("PARTITA_RANK") == "1" and number == 5 and not once.exists():
            once.touch()
            raise {fault}
        return compute(self, number, *arguments, **options)
    executor.Executor.compute = faulty
"""


@pytest.mark.parametrize("kind", soak("RuntimeError", "MemoryError", "OSError", "SystemError"))
def test_whatever_is_no_wrong_input_is_started_again(
    run: Run, expected: list[dict], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.folder / "site").mkdir()
    (run.folder / "site" / "sitecustomize.py").write_text(FAULTY.format(fault=FAULTS[kind]))
    monkeypatch.setenv("PYTHONPATH", str(run.folder / "site"))
    monkeypatch.setenv("FAULT", str(run.folder / "once"))
    run.start("--restarts", "1")
    ended = run.finish()
    assert (run.folder / "once").exists()
    assert ended.status == 0, ended
    assert ended.errors.count("restarting all ranks, 1 of at most 1 times") == 1
    assert f"rank 1 ended with exit status {3 if kind == 'MemoryError' else 1}" in ended.errors
    assert run.records() == expected


@pytest.mark.soak
def test_restarts_go_on_with_the_file_that_the_run_began_with(run: Run, expected: list[dict]) -> None:
    """Whatever its owner does to it in the meantime."""
    run.start("--restarts", "2")
    struck = set[int]()
    for text in ("train {", (run.folder / "m.par").read_text().replace("peak = 0.01", "peak = 0.5")):
        wait_until(
            lambda: (p := run.position(1)) is not None and p.step > 0 and p.process not in struck, "an attempt trains"
        )
        (run.folder / "m.par").write_text(text)
        position = run.position(1)
        assert position is not None
        os.kill(position.process, signal.SIGKILL)
        struck.add(position.process)
    ended = run.finish()
    assert ended.status == 0, ended
    assert "W0804" not in ended.errors
    assert run.records() == expected


@pytest.mark.soak
def test_wrong_input_is_not_tried_again(run: Run) -> None:
    """And ends a run with the status that it has without a supervisor."""
    text = (run.folder / "m.par").read_text()
    more = "let x = embedding(tokens + 3, wte, over = vocab) +"
    (run.folder / "m.par").write_text(text.replace("let x = embedding", f"{more} embedding"))
    run.start("--restarts", "2")
    ended = run.finish()
    assert ended.status == 1, ended
    assert ended.errors.count("error[E0605]") == 1
    assert "restarting all ranks" not in ended.errors
