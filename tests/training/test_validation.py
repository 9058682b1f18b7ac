"""Updates that do not wait for the norm: bitwise as those that do, however often they are taken back."""

from __future__ import annotations

import math
from itertools import repeat
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from partita.compiler.analysis.memory import memory_report
from partita.compiler.analysis.time import predict
from partita.compiler.pipeline import compile_spec
from partita.compiler.verify.equivalence import validate
from partita.dsl.spec import Call
from partita.runtime.bad_steps import NotFinite
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.checkpoints import Checkpoints
from partita.runtime.checkpoint.settings import settings_of
from partita.runtime.data.binding import open_data
from partita.runtime.executor import Executor
from partita.runtime.instructions import Coroutine
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import VirtualRun
from tests.commands import computed, here, partita
from tests.files import checked
from tests.marks import examples, soak
from tests.programs import SIZES, axes, models, pipelines
from tests.runtime.checkpoint.runs import TEXT, Outcome, plan_of, same, tensors, trained, without_checkpoints
from tests.training.test_bad_steps import LAYOUTS, steps_with, written
from tests.training.test_bad_steps import TEXT as JUDGED

OPTIMIZERS = (
    "adamw(lr = 0.01, weight_decay = 0.1)",
    "sgd(lr = 0.05, momentum = 0.9)",
    "sgd(lr = 0.05)",
    "lion(lr = 0.01)",
    "adafactor(lr = 0.01)",
    "adamw_8bit(lr = 0.01)",
    "rowwise_adagrad(lr = 0.01)",
)
RULES = ("", "shard state -> data", "shard param -> data", "offload state", "shard state -> data offload state")


def late(plan: CompiledRun, calm: int = 0) -> CompiledRun:
    """The plan, where updates do not wait after so many calm steps."""
    return with_train(plan, validate=Call("after", {"calm": calm}))


def with_train(plan: CompiledRun, **entries: object) -> CompiledRun:
    """The plan, compiled with other entries of its train block."""
    return prepare(evolve(plan.spec, train=evolve(plan.train, **entries)))


def rolled_back(outcome: Outcome) -> int:
    """How many updates were, on every rank."""
    (count,) = {rank.validation.rolled_back for rank in outcome.run.ranks}
    return count


def agree(found: Outcome, expected: Outcome) -> None:
    """Two runs were told the same, and have the same bits."""
    assert repr(found.steps) == repr(expected.steps)
    assert list(found.steps) == sorted(found.steps)
    assert repr(found.evaluations) == repr(expected.evaluations)
    same(tensors(found.run), tensors(expected.run))
    assert {repr(rank.bad_step_policy.history) for rank in (*found.run.ranks, *expected.run.ranks)} == {
        repr(expected.run.ranks[0].bad_step_policy.history)
    }


# ---------------------------------------------------------------- random programs


@st.composite
def programs(draw: st.DrawFn) -> str:
    """A program of one or two data-parallel pipelines, with any optimizer and layout of its state."""
    pipeline = draw(pipelines(draw(st.integers(2, 3)), most=4))
    sizes = {"batch": 2 * pipeline.microbatches, **SIZES, "spot": SIZES["seq"], "ffn": 8}
    model = draw(models(pipeline.stages, most=2))
    rules = f"shard batch -> data stage layer -> pipe {draw(st.sampled_from(RULES))}"
    ema = draw(st.sampled_from(("", "ema = 0.9")))
    return (
        f"{axes(sizes)}{model}mesh line(pipe = {pipeline.ranks}, data = {draw(st.integers(1, 2))})\n"
        f"layout cut on line {{ {rules} }}\nschedule s = {pipeline.text}\n"
        f"train {{ model = m layout = cut schedule = s data = random() optimizer = {draw(st.sampled_from(OPTIMIZERS))} "
        f"{ema} on_bad_step = skip(at_most = 100) steps = 7 seed = {draw(st.integers(0, 9))} }}\n"
    )


def check(text: str, quantile: float | None, calm: int, folder: Path) -> None:
    """Whether a run whose updates do not wait is that of one whose updates do; clips bite in such a part of steps."""
    plan = prepare(checked(text, "random.par"))
    waiting = trained(plan, folder)
    if quantile is not None:
        norms = sorted(norm for _, norm, *_ in waiting.steps.values() if math.isfinite(norm) and norm > 0)
        limit = norms[round(quantile * (len(norms) - 1))] * (0.5 if quantile == 0 else 1.0 + 1e-6) if norms else 1.0
        plan = with_train(plan, clip=limit)
        waiting = trained(plan, folder)
    other = late(plan, calm)
    assert validate(other.training).passed
    agree(trained(other, folder), waiting)


CASES = {
    "text": programs(),
    "quantile": st.sampled_from((None, 0, 0.4, 0.8, 1)),
    "calm": st.sampled_from((0, 0, 1, 2)),
}
QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.soak
@given(**CASES)
@examples(2, phases=(Phase.explicit, Phase.generate), **QUICK)
def test_it_is_the_run_whose_updates_wait(text: str, quantile: float | None, calm: int, tmp_path_factory) -> None:
    check(text, quantile, calm, tmp_path_factory.getbasetemp())


@pytest.mark.soak
@given(**CASES)
@settings(max_examples=150, **QUICK)
def test_it_is_so_at_length(text: str, quantile: float | None, calm: int, tmp_path_factory) -> None:
    check(text, quantile, calm, tmp_path_factory.getbasetemp())


MUON = "optimizer chosen { update up, down -> muon(lr = 0.01) update all -> adamw(lr = 0.01) }\n"


@pytest.mark.parametrize("optimizer", ["chosen", *soak("adamw_8bit(lr = 0.01)", *OPTIMIZERS)])
@pytest.mark.parametrize(("rule", "mean"), [("shard state -> data", True), *soak(("offload state", True), ("", False))])
def test_all_that_an_optimizer_keeps_is_put_back(optimizer: str, rule: str, mean: bool, tmp_path: Path) -> None:
    """Clips bite always, so that every update is taken back that did not wait: all but the last, and before the saves
    and evaluations.
    """
    text = MUON + TEXT.replace("shard param -> data", rule).replace("shard state -> data", rule)
    overrides = (f"train.optimizer={optimizer}", "train.clip=0.01", *(("train.ema=0.9",) if mean else ()))
    plan = plan_of(*overrides, text=text)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    found = trained(late(plan), tmp_path / "a")
    agree(found, trained(plan, tmp_path / "b"))
    assert rolled_back(found) == 2  # of 6 steps, 2, 4 and 6 are saved and 3 and 6 evaluated


# ---------------------------------------------------------------- bad steps


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with an item that is no number, one that is infinite, and one that is a spike."""
    return written(tmp_path_factory.mktemp("wrong"), {9: math.nan, 36: math.inf, 50: 1e4})


@pytest.mark.parametrize("layout", ["zero1", *soak(*(each for each in LAYOUTS if each != "zero1"))])
@pytest.mark.parametrize(
    ("policy", "clip"),
    [
        ("skip", "2.0"),
        ("rewind(at_most = 9)", "none"),
        *soak(("skip(spike = 3, window = 2)", "2.0"), ("rewind(at_most = 9, spike = 3, window = 2)", "none")),
    ],
)
def test_bad_steps_are_left_out_alike(layout: str, policy: str, clip: str, wrong: Path, tmp_path: Path) -> None:
    overrides = (*LAYOUTS[layout], f"train.on_bad_step={policy}", f"train.clip={clip}", "train.checkpoint=every(5)")
    found = []
    for name, validated in (("before", "before"), ("after", "after(calm = 0)")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "data.npz").write_bytes((wrong / "data.npz").read_bytes())
        plan = plan_of(*overrides, "train.steps=9", f"train.validate={validated}", text=JUDGED)
        found.append(trained(plan, folder))
    waiting, ours = found
    agree(ours, waiting)
    assert rolled_back(ours) >= 2
    assert [each.message for each in ours.said] == [each.message for each in waiting.said]


@pytest.mark.soak
def test_a_run_ends_at_the_step_that_is_bad(wrong: Path) -> None:
    """With everything as it was before that step, whose rows are named."""
    first = steps_with({9, 36}, wrong)[0]
    plan = without_checkpoints(plan_of("train.on_bad_step=stop", text=JUDGED))
    stopped = []
    for each in (plan, late(plan)):
        outcome = Outcome(run := VirtualRun(each))
        with pytest.raises(NotFinite) as raised:
            run.train(open_data(each.program, each.train, wrong), [outcome])
        assert raised.value.step == first
        stopped.append((outcome, str(raised.value)))
    (waiting, said), (ours, ours_said) = stopped
    assert ours_said == said
    agree(ours, waiting)


# ---------------------------------------------------------------- interruptions


@pytest.mark.parametrize(("interrupted", "clip"), [(4, 1e6), *soak((1, 0.01), (3, 1.5), (4, 1.5), (5, 1.5))])
def test_an_interrupted_run_goes_on_with_the_same_bits(interrupted: int, clip: float, tmp_path: Path) -> None:
    chosen = (f"train.clip={clip}", "train.checkpoint=every(3)", "train.eval=none")
    overrides = (*chosen, "train.validate=after(calm = 0)")
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    trained(plan_of(*overrides, f"train.steps={interrupted}"), tmp_path / "a")
    # A run also saves as it ends.
    assert steps_in(tmp_path / "a" / "checkpoints") == sorted({*range(3, interrupted + 1, 3), interrupted})
    resumed = trained(plan_of(*overrides, "train.steps=9"), tmp_path / "a")
    whole = trained(plan_of(*chosen, "train.steps=9"), tmp_path / "b")
    assert repr(resumed.steps) == repr({step: whole.steps[step] for step in resumed.steps})
    same(tensors(resumed.run), tensors(whole.run))


@pytest.mark.parametrize(("after", "clip"), [(2, 1e6), *soak((1, 1e6), (3, 1e6), (2, 0.01), (3, 0.01))])
def test_what_is_saved_when_asked_to_end_is_validated(after: int, clip: float, tmp_path: Path) -> None:
    """All ranks hear of it with the sums of a step, and wait for those of the next one, after which they save."""
    chosen = (f"train.clip={clip}", "train.eval=none")
    plan = late(plan_of(*chosen, "train.checkpoint=every(100)"))
    outcome = Outcome(run := VirtualRun(plan))
    settings = settings_of(plan.spec, tmp_path, tmp_path)
    assert settings is not None
    checkpoints = [Checkpoints(rank, settings, outcome.said.append) for rank in run.ranks]
    dataset = open_data(plan.program, plan.train, tmp_path)
    run.train(dataset, [outcome], checkpoints, stop_requested=lambda: len(outcome.steps) >= after)
    for each in checkpoints:
        each.close()
    last = max(outcome.steps)
    assert after < last < plan.train.steps
    assert steps_in(tmp_path / "checkpoints") == [last]
    whole = trained(plan_of(*chosen, f"train.steps={last}", "train.checkpoint=none"), tmp_path)
    assert repr(outcome.steps) == repr(whole.steps)
    same(tensors(run), tensors(whole.run))


# ---------------------------------------------------------------- what does not wait


ZERO_BUBBLE = """
axis batch = 24, width = 32, wide = 64
model net(x: [batch, width], y: [batch, width]) {
  let h = x
  repeat 4 as layer {
    param up: [width, wide] ~ kaiming()
    param down: [wide, width] ~ kaiming()
    let h = h + dot(tanh(dot(h, up, over = width)), down, over = wide)
  }
  loss mse(h, y)
}
mesh line(pipe = 4) { device = device(flops = 1GFLOP/s, memory = 1GiB, bandwidth = 100GB/s) }
layout cut on line { stage layer -> pipe }
schedule s = zb_h2(microbatches = 12)
train { data = random()  optimizer = sgd(lr = 0.01)  clip = 1e6  steps = 5  validate = VALIDATE }
"""


def zero_bubble(validate: str, tied: str = "", schedule: str = "zb_h2") -> str:
    text = ZERO_BUBBLE.replace("VALIDATE", validate).replace("zb_h2", schedule)
    if tied:
        text = text.replace("let h = x\n", f"param {tied}: [width] ~ ones()\n  let h = x * {tied}\n")
        text = text.replace("loss mse(h, y)", f"loss mse(h * {tied}, y)")
    return text


@pytest.mark.parametrize("validated", ["before", "after(calm = 0)"])
def test_ranks_begin_a_step_while_others_end_the_one_before(
    validated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []  # by a rank, a step
    ended: list[tuple[int, int]] = []
    early: set[tuple[int, int]] = set()
    compute, all_totals = Executor.compute, Executor._all_totals

    def watched(self: Executor, number: int, *arguments: object) -> Coroutine:
        rank = self.context.coordinates["pipe"]
        begun.append((rank, number))
        if number > 1 and (3, number - 1) not in ended:
            early.add((rank, number))
        yield from compute(self, number, *arguments)
        ended.append((rank, number))

    def slowly(self: Executor) -> Coroutine:
        if self.context.coordinates["pipe"] == 3:
            yield from repeat(None, 200)
        return (yield from all_totals(self))

    monkeypatch.setattr(Executor, "compute", watched)
    monkeypatch.setattr(Executor, "_all_totals", slowly)
    plan = plan_of(text=zero_bubble(validated))
    run = VirtualRun(plan, strict=False)  # so that messages arrive while a rank computes
    run.train(open_data(plan.program, plan.train, tmp_path))
    assert len(begun) == len(ended) == 4 * 5
    assert {number for rank, number in early if rank == 0} == (set() if validated == "before" else {2, 3, 4, 5})


def test_copies_are_in_the_memory_bound() -> None:
    for rule, host in (("", False), ("offload state", True)):
        text = TEXT.replace("shard param -> data", f"shard state -> data {rule}")
        plans = [plan_of(text=text), late(plan_of(text=text))]
        for rank in plans[0].program.ranks:
            waiting, ours = (memory_report(plan.training, plan.program.ranks[rank.rank]) for plan in plans)
            held = [run for run in VirtualRun(plans[1]).ranks if plans[1].program.mesh.pipe_rank(run.rank) == rank.rank]
            for each in held:
                kept = [*each.memory.masters.values()], [*each.memory.states.values()]
                masters, states = (sum(tensor.nbytes for tensor in tensors) for tensors in kept)
                assert (
                    ours.parameters - waiting.parameters + (ours.state - waiting.state) == masters + (not host) * states
                )
                assert ours.host - waiting.host == host * states


def test_a_step_is_predicted_to_be_as_long_as_the_busiest_rank() -> None:
    waiting, ours = (compile_spec(checked(zero_bubble(each), "z.par")) for each in ("before", "after"))
    before, after = predict(waiting), predict(ours)
    assert before.period is None
    assert after.period is not None
    assert after.waiting_time == before.step_time == before.waiting_time
    assert before.step_time - after.step_time == pytest.approx(after.timeline.makespan - after.timeline.cost, rel=0.05)
    assert after.timeline.makespan > 1.03 * after.timeline.cost
    # What copies take is between the update and the next step.
    plan = ours.plan
    without = predict(evolve(ours, plan=evolve(plan, ranks=tuple(evolve(each, copied=()) for each in plan.ranks))))
    copied = 2 * 2 * 32 * 64 * 4 / (ours.device.bandwidth * ours.device.streaming)
    assert after.step_time - without.step_time == pytest.approx(copied)
    # The first rank and the last exchange the gradient of what both have.
    tied = predict(compile_spec(checked(zero_bubble("after", "gain"), "z.par")))
    assert tied.step_time >= tied.waiting_time


def test_there_must_be_a_pipeline() -> None:
    text = zero_bubble("after", schedule="one_f_one_b")
    assert [each.code for each in compile_spec(checked(text, "z.par")).warnings] == []
    (found,) = compile_spec(checked(text, "z.par", ("line.pipe=1",))).warnings
    assert found.code == "W0304"
    assert found.span is not None


@pytest.mark.soak
def test_processes_compute_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "net.par").write_text(zero_bubble("after(calm = 1)").replace("pipe = 4", "pipe = 2"))
    found = []
    for transport, run, *more in (("gloo", partita), ("virtual", here, "train.validate=before")):
        settings = ("train.steps=12", "train.clip=0.5", "train.checkpoint=every(5)", *more)
        done = run("run", "net.par", *settings, "--transport", transport, f"--run-dir={transport}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(computed(tmp_path / transport))
    assert len(found[0]) == 12
    assert found[0] == found[1]
