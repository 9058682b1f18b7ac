"""Updates with gradients of earlier steps: what they mean, under every layout, and across restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from shutil import copytree, rmtree

import numpy as np
import pytest
import torch
from attrs import evolve

from partita.compiler.analysis.memory import memory_report
from partita.compiler.analysis.time import predict
from partita.compiler.program import ESTIMATE
from partita.runtime.bad_steps import NotFinite
from partita.runtime.checkpoint.store import commit_name
from partita.runtime.data.binding import open_data
from partita.runtime.executor import Executor
from partita.runtime.instructions import Coroutine
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.compiler.verify.broken import FILE
from tests.files import checked
from tests.marks import soak
from tests.runtime.checkpoint.runs import ONE_RANK, plan_of, saved_every, trained
from tests.training.test_local import RATE, close, everything, forget, kept_every, on, same

STEPS = 6


def delayed(*overrides: str, by: int = 1, layout: str = "zero1") -> CompiledRun:
    given = f"layout={layout}", f"train.steps={STEPS}", f"train.sync=delayed({by})", "train.clip=3.0"
    return plan_of(*given, *overrides)


def paired(*overrides: str, layout: str = "zero1") -> CompiledRun:
    return delayed("train.sync=paired()", *overrides, layout=layout)


def steps_of(plan: CompiledRun) -> tuple[VirtualRun, list[tuple[float, float]]]:
    run, drawn = VirtualRun(plan), batches(plan.program, 3)
    return run, [run.step(number, drawn[number % 2], RATE) for number in range(1, STEPS + 1)]


def by_hand(
    by: int, paired: bool = False, count: int = STEPS
) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """The same with torch's AdamW and gradients of a run without delay, whose own updates are undone; so is, with pairs
    of steps, the update with the first one's gradient, once it has been computed with.
    """
    plan = plan_of(*ONE_RANK, "layout=plain", "train.clip=none")
    oracle, drawn = VirtualRun(plan), batches(plan.program, 3)
    parameters = {name: tensor.clone() for name, tensor in oracle.parameters().items()}
    decays = {each.name: each.decays for each in plan.training.update.parameters}
    optimizer = torch.optim.AdamW(
        [{"params": tensor, "weight_decay": 0.1 * decays[name]} for name, tensor in parameters.items()], lr=RATE
    )
    gradients: list[dict[str, torch.Tensor]] = []
    told = []
    before: tuple[dict[str, torch.Tensor], dict[str, object]] = ({}, {})
    for number in range(1, count + 1):
        oracle.set_parameters(parameters)
        loss, _ = oracle.step(number, drawn[number % 2], 0.0)
        gradients.append({name: tensor.clone() for name, tensor in oracle.gradients().items()})
        norm = 0.0
        estimates = paired and number % 2 == 0
        if estimates:
            kept = {name: tensor.detach().clone() for name, tensor in parameters.items()}
            before = kept, deepcopy(optimizer.state_dict())
        elif paired and number > by:
            for name, tensor in parameters.items():
                tensor.data.copy_(before[0][name])
            optimizer.load_state_dict(before[1])
        if number > by:
            for name, tensor in parameters.items():
                gradient = gradients[number - by - 1][name]
                if paired and not estimates:
                    gradient = (gradients[number - by - 2][name] + gradient) / 2
                tensor.grad = gradient.clone()
            norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), 3.0))
            optimizer.step()
        told.append((loss, norm))
    return parameters, told


def agree(found: Sequence[tuple[float, float]], expected: Sequence[tuple[float, float]]) -> None:
    assert found == [pytest.approx(each, abs=1e-4) for each in expected]


@pytest.mark.parametrize("by", [1, 2])
def test_an_update_has_the_gradients_of_as_many_steps_before(by: int) -> None:
    parameters, told = by_hand(by)
    run, found = steps_of(delayed(*ONE_RANK, by=by))
    agree(found, told)
    close(run.parameters(), parameters)


def test_an_update_of_a_pair_has_the_gradients_of_two_steps_and_is_estimated_from_the_first() -> None:
    parameters, told = by_hand(1, paired=True)
    run, found = steps_of(paired(*ONE_RANK))
    agree(found, told)
    # The last update has the gradient of the fifth step alone.
    close({name: run.ranks[0].memory.states[ESTIMATE, name] for name in parameters}, parameters)
    completed, _ = by_hand(1, paired=True, count=STEPS - 1)
    close(run.parameters(), completed)


@pytest.mark.parametrize("layout", ["zero1", *soak("plain", "zero3")])
@pytest.mark.parametrize("sync", [delayed, paired])
def test_a_delay_is_the_same_under_every_layout(layout: str, sync: Callable[..., CompiledRun]) -> None:
    expected, told = steps_of(sync(*ONE_RANK))
    run, found = steps_of(sync(layout=layout))
    agree(found, told)
    close(run.parameters(), expected.parameters(), 1e-4)


def test_an_estimate_lies_as_its_parameter_where_the_state_is_split_further() -> None:
    text = FILE.replace("ffn, vocab -> tensor", "ffn -> tensor shard param -> tensor")
    text = text.replace("steps = 1", f"steps = {STEPS} sync = paired()")
    plan, one = (prepare(checked(text, "split.par", overrides)) for overrides in ((), ONE_RANK))
    assert any(each.layout != each.state_layout for each in plan.program.parameters)
    (run, found), (expected, told) = steps_of(plan), steps_of(one)
    agree(found, told)
    close(run.parameters(), expected.parameters(), 1e-4)


BARE = """
axis batch = 4, embed = 8, out = 8
model m(x: [batch, embed], y: [batch, embed]) {
  param w: [embed, out] ~ normal(0.5)
  let h = rename(dot(x, w, over = embed), out -> embed)
  repeat 2 as layer { let h = tanh(h) }
  loss mse(h, y)
}
mesh k(pipe = 2)
layout l on k { stage layer -> pipe }
schedule s = gpipe(microbatches = 2)
train { data = random() optimizer = adamw(lr = 0.1) steps = 6 sync = paired() }
"""


def test_a_rank_without_parameters_has_nothing_to_estimate() -> None:
    plan, one = (prepare(checked(BARE, "bare.par", overrides)) for overrides in ((), ("k.pipe=1",)))
    assert any(not rank.parameters for rank in plan.program.ranks)
    (run, found), (expected, told) = steps_of(plan), steps_of(one)
    agree(found, told)
    close(run.parameters(), expected.parameters())


@pytest.mark.parametrize("by", [1, *soak(3)])
def test_a_run_with_a_delay_resumes_with_the_same_bits(by: int, tmp_path: Path) -> None:
    plan = kept_every(delayed(by=by), 8)
    whole = trained(plan, tmp_path / "whole")
    trained(plan, tmp_path / "part")
    forget(tmp_path / "part")
    again = trained(plan, tmp_path / "part")
    assert again.found is not None
    assert again.found.step == 4
    assert again.steps == {step: told for step, told in whole.steps.items() if step > 4}
    same(everything(again.run), everything(whole.run))


@pytest.mark.parametrize("step", [2, *soak(1, 3, 4)])
def test_a_run_in_pairs_resumes_with_the_same_bits_after_any_step(step: int, tmp_path: Path) -> None:
    plan = paired()
    plan = saved_every(evolve(plan, spec=evolve(plan.spec, train=evolve(plan.train, steps=8))), step, keep=9)
    whole = trained(plan, tmp_path / "whole")
    copytree(tmp_path / "whole", tmp_path / "part")
    for later in range(step + 1, 9):
        for commit in (tmp_path / "part").rglob(commit_name(later)):
            rmtree(commit)
    again = trained(plan, tmp_path / "part")
    assert again.found is not None
    assert again.found.step == step
    assert again.steps == {at: told for at, told in whole.steps.items() if at > step}
    same(everything(again.run), everything(whole.run))


@pytest.mark.soak
@pytest.mark.parametrize("sync", [partial(delayed, by=2), paired])
def test_gradients_that_are_late_resume_on_another_mesh(sync: Callable[..., CompiledRun], tmp_path: Path) -> None:
    whole = trained(kept_every(sync(), 8), tmp_path)
    forget(tmp_path)
    again = trained(kept_every(sync(*on(data=2), layout="zero3"), 8), tmp_path)
    assert again.found is not None
    assert again.found.step == 4
    close(everything(again.run), everything(whole.run), 1e-4)


def test_all_ranks_meet_before_totals_of_the_next_step_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for what one step sends: here, totals of a tied parameter."""
    run, _ = steps_of(delayed(by=2))
    assert any(rank.sends for rank in run.plan.program.ranks)
    told: list[str] = []
    exchange, summed = Executor._exchange_tied, Executor._barrier

    def noted(name: str, method: Callable[..., Coroutine]) -> Callable[..., Coroutine]:
        def call(self: Executor, *arguments: object) -> Coroutine:
            if self is run.ranks[0].training:
                told.append(name)
            yield from method(self, *arguments)

        return call

    monkeypatch.setattr(Executor, "_exchange_tied", noted("sent", exchange))
    monkeypatch.setattr(Executor, "_barrier", noted("met", summed))
    run.cluster.run([rank.training.flush() for rank in run.ranks])
    assert told == ["sent", "met", "sent", "met"]


ROOTS = """
axis batch = 4, embed = 4
model m(x: [batch, embed]) {
  param w: [embed] ~ ones()
  loss mean(sqrt(x * w))
}
train { data = arrays("data.npz") optimizer = sgd(lr = 0.1) steps = 8 seed = 5 sync = delayed(2) }
"""


def test_a_norm_that_is_not_finite_is_that_of_a_step_before(tmp_path: Path) -> None:
    """A root of zero is finite, and its gradient is not: two steps later, rows of that step are named."""
    x = np.ones((32, 4), np.float32)
    x[9, 2] = 0.0
    np.savez(tmp_path / "data.npz", x=x)
    plan = prepare(checked(ROOTS, "roots.par"))
    data = open_data(plan.program, plan.train, tmp_path)
    step = next(number for number in range(1, 7) if "item 9" in data.row_names(number))
    with pytest.raises(NotFinite) as stopped:
        VirtualRun(plan).train(data)
    text = str(stopped.value)
    assert text.startswith(
        f"the gradient norm of step {step + 2} is nan; its gradients are of step {step}; the first value"
    )
    assert f"row {data.row_names(step).index('item 9')} of the batch (item 9)" in text
    assert text.endswith("help: look for the cause in the data and the learning rate and restart")


def test_a_reduction_hides_behind_the_next_step() -> None:
    """Of a program whose reduction takes less than a step and is exposed, all is hidden."""
    link = "cluster.link=link(bandwidth = 1GB/s, latency = 5us)"
    sizes = ("batch=64", "seq=32", "embed=64", "ffn=256", link, "cluster.pipe=1", "cluster.tensor=1", "layout=plain")
    syncs = "none", "delayed(1)", "paired()"
    waiting, *others = (predict(plan_of(*sizes, f"train.sync={sync}").training) for sync in syncs)
    assert waiting.exposed_communication > 0.01
    for late in others:
        assert late.exposed_communication == pytest.approx(0.0, abs=1e-9)
        assert late.step_time == pytest.approx(waiting.step_time - waiting.exposed)


def test_a_reduction_that_takes_several_steps_has_as_many_to_end_in_as_the_delay_says() -> None:
    link = "cluster.link=link(bandwidth = 100KB/s, latency = 5us)"
    sizes = (link, "cluster.pipe=1", "cluster.tensor=1", "layout=plain")
    one, two, three = (predict(plan_of(*sizes, f"train.sync=delayed({by})").training).step_time for by in (1, 2, 3))
    assert [one / two, one / three] == [pytest.approx(2, rel=0.05), pytest.approx(3, rel=0.05)]


def test_the_memory_bound_counts_late_gradients() -> None:
    """The accumulators of each step, and each gradient among the states that a checkpoint has. What is not reduced has
    zeros for the gradients of steps before the first.
    """
    plans = [plan_of(*ONE_RANK, f"train.sync={sync}") for sync in ("none", "delayed(1)", "delayed(2)", "paired()")]
    reports = [memory_report(plan.training, plan.program.ranks[0]) for plan in plans]
    size = sum(each.type.bytes for each in plans[0].program.parameters)
    assert [each.gradients - reports[0].gradients for each in reports] == [0, 2 * size, 3 * size, 2 * size]
    # Of pairs, also the first gradient, and what is estimated from it, with both states of AdamW.
    assert [each.state - reports[0].state for each in reports] == [0, size, 2 * size, 5 * size]
