"""What the benchmarks compare is the same training: every peer's losses are ours."""

from __future__ import annotations

from itertools import islice

import pytest
import zero_bubble
from measure import measured
from peers.plain import Plain
from peers.workload import Workload, workload

from partita.runtime.learning_rates import learning_rate
from partita.runtime.training import VirtualRun

STEPS = 4
GPT = ("batch=4", "seq=8", "embed=16", "heads=2", "vocab=32", "fast.microbatches=4", "train.precision=f64")
LINEAR = ("batch=8", "embed=4", "layers=6", "fast.microbatches=4", "train.precision=f64")
# Rates at which the losses show what an update has done.
FILES = {
    "gpt.par": (*GPT, "train.optimizer.lr=0.05", "train.optimizer.weight_decay=1.0"),
    "linear.par": (*LINEAR, "train.optimizer.lr=0.5"),
}


def ours(work: Workload) -> list[float]:
    """Our losses."""
    run = VirtualRun(work.plan)
    names = [each.name for each in work.plan.program.inputs]
    rate = learning_rate(work.optimizer["lr"], 1)
    batches = enumerate(islice(work.batches(), STEPS), 1)
    return [run.step(number, dict(zip(names, batch, strict=True)), rate)[0] for number, batch in batches]


def plain(work: Workload, microbatches: int) -> list[float]:
    """The plain loop's."""
    loop = Plain(work, False, microbatches)
    return [loop.step(*batch) for batch in islice(work.batches(), STEPS)]


@pytest.mark.few(1)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_plain_loop_trains_what_ours_trains(file: str, microbatches: int):
    work = workload(file, FILES[file])
    losses = ours(work)
    assert plain(work, microbatches) == pytest.approx(losses, rel=1e-10)
    assert len(set(losses)) == STEPS


@pytest.mark.soak
@pytest.mark.parametrize("file", FILES)
def test_what_differs_is_seen(file: str):
    """The comparison can fail: at another rate, and where one weight is another."""
    work = workload(file, FILES[file])
    right = plain(work, 1)
    faster = plain(workload(file, (*FILES[file], "train.optimizer.lr=0.06")), 1)
    assert faster[0] == right[0]
    assert faster != pytest.approx(right, rel=1e-6)
    next(iter(work.weights.values())).mul_(1.01)
    assert plain(work, 1)[0] != pytest.approx(right[0], rel=1e-6)


@pytest.mark.soak
def test_torchs_pipelining_trains_what_ours_trains():
    """In two processes, as the benchmark runs them: two stages a rank, and a backward pass in two parts."""
    sizes = {"linears": 2, "width": 4, "rows": 2}
    options = [text for name, value in {"steps": STEPS, **sizes}.items() for text in (f"--{name}", str(value))]
    found = measured([zero_bubble.__file__, "--as", "torch:zero_bubble", *options], 2, 1)
    work = workload("linear.par", zero_bubble.overrides(**sizes, schedule="zb_v"))
    assert found["losses"] == pytest.approx(ours(work), rel=1e-5)
