"""Ranks that are lost for good, and return: a run goes on with those there are, and computes what it would have."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random

import pytest

from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.tracing.flight import LOADING, READY, STARTING
from tests.fault_injection.moments import await_moment
from tests.fault_injection.processes import PROC, wait_until
from tests.fault_injection.runs import Run
from tests.marks import soak

pytestmark = pytest.mark.skipif(not (PROC / "self" / "stat").exists(), reason="looks for processes in /proc")

LAYOUTS = {
    "data": "mesh cluster(data = 4)\n\nlayout cut on cluster {\n  shard batch -> data\n  shard param -> data\n}",
    "both": "mesh cluster(data = 2, pipe = 2)\n\n"
    "layout cut on cluster {\n  shard batch -> data\n  stage layer -> pipe\n}",
}
MOST, LEAST, STEPS = 4, 2, 120


def elastic(run: Run, layout: str) -> None:
    """Give a run a file of four ranks, which three and two can divide."""
    text = (run.folder / "m.par").read_text()
    cut = text[text.index("mesh cluster") : text.index("schedule fast")]
    text = text.replace(cut, f"{LAYOUTS[layout]}\n\n").replace("batch = 16", "batch = 48")
    text = text.replace("embed = 32", "embed = 24").replace("every(2,", "every(4,").replace("every(5,", "every(20,")
    (run.folder / "m.par").write_text(text.replace("total = 20", "total = 1000"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[dict]]:
    """What a run of a layout computes in so many steps without losing anybody."""

    @cache
    def of(layout: str, steps: int) -> list[dict]:
        run = Run(tmp_path_factory.mktemp(layout), "zero3")
        elastic(run, layout)
        run.alone(f"train.steps={steps}", "train.checkpoint=none")
        return run.records()

    return of


def training(run: Run, gone: set[int], ranks: int) -> bool:
    """Whether ranks other than those that are gone have all begun to train."""
    assert run.process is not None
    if run.process.poll() is not None:
        return True
    found = [run.position(rank) for rank in range(ranks)]
    return all(
        each is not None
        and each.process not in gone
        and each.activity not in (STARTING, READY, LOADING)
        and each.step > 0
        for each in found
    )


def loses(run: Run, seed: int, layout: str, steps: int, moves: int, expected: list[dict]) -> list[float]:
    """A random sequence of losses and returns; the seconds from each loss to the next step."""
    random = Random(seed)
    elastic(run, layout)
    run.start(f"train.steps={steps}", "--elastic", f"min={LEAST}")
    size, gone, seconds = MOST, set[int](), list[float]()
    for _ in range(moves):
        wait_until(partial(training, run, gone, size), "ranks train")
        time.sleep(random.uniform(0.0, 2.0))
        assert run.process is not None
        if run.process.poll() is not None:
            break
        gone |= {each.process for rank in range(MOST) if (each := run.position(rank)) is not None}
        if size == LEAST or (size == 3 and random.random() < 0.3 and layout == "data"):
            (run.directory / "ranks").write_text(f"{MOST}\n")
            run.story.append(f"{size} ranks, and then {MOST}")
            size = MOST
        else:
            victim = run.position(random.randrange(size))
            assert victim is not None
            run.story.append(f"of {size} ranks {victim.rank} is killed, step {victim.step}")
            os.kill(victim.process, random.choice((signal.SIGKILL, signal.SIGSEGV)))
            size = size - 1 if layout == "data" else LEAST
            begun = time.monotonic()
            wait_until(partial(training, run, gone, size), "the others go on")
            seconds.append(time.monotonic() - begun)
    ended = run.finish()
    assert ended.status == 0, ended
    assert "Traceback" not in ended.errors
    assert len(re.findall("gone for good", ended.errors)) == len(seconds)
    compare(run.records(), expected)
    return seconds


def compare(found: list[dict], expected: list[dict]) -> None:
    """The same steps, and the same losses up to rounding."""
    assert [each["step"] for each in found] == [each["step"] for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "eval_loss"):
            assert name not in theirs or ours[name] == pytest.approx(theirs[name], rel=1e-5), ours


@pytest.mark.parametrize("seed", soak(*range(50)))
def test_ranks_are_lost_and_return(
    seed: int, runs: Callable[..., Run], whole, record_property: Callable[[str, object], None]
) -> None:
    seconds = loses(runs("zero3"), seed, "data", STEPS, 5, whole("data", STEPS))
    record_property("seconds", [round(each, 2) for each in seconds])


@pytest.mark.parametrize("layout", soak("data", "both"))
def test_a_run_goes_on_with_fewer_ranks(runs: Callable[..., Run], whole, layout: str) -> None:
    loses(runs("zero3"), 3, layout, 40, 1, whole(layout, 40))


@pytest.mark.soak
@pytest.mark.parametrize(("restarts", "ranks"), [("0", 2), ("1", 3)])
def test_a_loss_costs_the_steps_since_the_last_copy_and_no_checkpoint(
    runs: Callable[..., Run], whole, restarts: str, ranks: int
) -> None:
    """Three ranks, and then two; no step is ever saved to disk."""
    run = runs("zero3")
    elastic(run, "data")
    run.start(
        *("cluster.data=3", "train.steps=16", "train.checkpoint=every(1000, copies = 3)"),
        *("--elastic", "min=2", "--restarts", restarts),
    )
    for _ in await_moment(run, 1, "F", 9):
        pass
    position = run.position(1)
    assert position is not None
    os.kill(position.process, signal.SIGKILL)
    wait_until(partial(training, run, {position.process}, ranks), "the others go on")
    assert not run.checkpoints.exists() or steps_in(run.checkpoints) == []
    ended = run.finish()
    assert ended.status == 0, ended
    (step,) = re.findall(r"step (\d+)/16  resumed from copies in memory", ended.out)
    assert position.step - 2 * 3 < int(step) < position.step
    compare(run.records(), whole("data", 16))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--elastic", "3"), "`min=N` with N from 1 up, not '3'"),
        (("--elastic", "min=5"), "error[E0624]: --elastic min=5 asks for more ranks than the 4 of mesh `cluster`"),
        (("--elastic", "min=2", "train.checkpoint=none"), "error[E0624]: --elastic goes on from checkpoints"),
        (("--elastic", "min=2", "--transport", "virtual"), "--elastic changes the number of processes"),
    ],
)
def test_what_cannot_shrink_is_refused(tmp_path: Path, capsys, options: tuple[str, ...], said: str) -> None:
    from partita.cli.main import main

    run = Run(tmp_path, "zero3")
    elastic(run, "data")
    try:
        status = main(["run", str(tmp_path / "m.par"), "--run-dir", str(tmp_path / "run"), *options])
    except SystemExit as exit:
        status = int(exit.code or 0)
    assert status in (1, 2)
    assert said in capsys.readouterr().err
