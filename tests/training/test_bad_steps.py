"""A bad step ends a run, or is gone past: the same under every layout, and when the run is interrupted on the way."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from partita import train as train_file
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Call
from partita.runtime.bad_steps import MIN_WINDOW, BadStep, BadStepPolicy, History, NotFinite
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.checkpoints import Checkpoints
from partita.runtime.checkpoint.settings import settings_of
from partita.runtime.data.binding import open_data
from partita.runtime.learning_rates import learning_rates
from partita.runtime.training import StepResult, VirtualRun
from tests.commands import partita, records
from tests.marks import soak
from tests.runtime.checkpoint.runs import Outcome, plan_of, same, tensors, trained, without_checkpoints

# Two stages, three mesh axes, a tied parameter; every item is seen once in eight steps.
TEXT = """
axis batch = 8, embed = 8, ffn = 16

block mlp(x: [batch, embed]) {
  param up: [embed, ffn] ~ normal(0.3)
  param down: [ffn, embed] ~ normal(0.3)
  return x + dot(silu(dot(x, up, over = embed)), down, over = ffn)
}

model m(x: [batch, embed], y: [batch, embed]) {
  param tied: [embed] ~ ones()
  let h = x * tied
  repeat 4 as layer { let h = mlp(h) }
  loss mse(h * tied, y)
  metric size = mean(h)
}

mesh cluster(data = 2, pipe = 2, tensor = 2)

layout zero3 on cluster { shard batch -> data shard ffn -> tensor shard param -> data stage layer -> pipe }
layout zero1 on cluster { shard batch -> data shard ffn -> tensor shard state -> data stage layer -> pipe }
layout plain on cluster { shard batch -> data shard ffn -> tensor stage layer -> pipe }
layout one on cluster { }

schedule fast = one_f_one_b(microbatches = 2)

train {
  model = m
  layout = zero3
  schedule = fast
  data = arrays("data.npz", holdout = 20%)
  optimizer = adamw(lr = cosine(peak = 0.01, warmup = 2, total = 20), weight_decay = 0.1)
  clip = 1.0
  steps = 8
  seed = 5
  checkpoint = every(2)
  on_bad_step = skip
}
"""
ITEMS, TRAINED = 80, 64
ONE = ("layout=one", "cluster.data=1", "cluster.pipe=1", "cluster.tensor=1", "schedule=gpipe(microbatches=1)")
LAYOUTS = {
    "zero3": (),
    "zero1": ("layout=zero1", "schedule=zb_h1(microbatches=4)"),
    "plain": ("layout=plain", "schedule=gpipe(microbatches=2)"),
    "one": ONE,
}
OPTIMIZERS = ("adamw(lr = 0.01)", "sgd(lr = 0.05, momentum = 0.9, nesterov = true)", "sgd(lr = 0.05)")


def written(folder: Path, wrong: dict[int, float] | None = None) -> Path:
    """The data, with some items wrong."""
    generator = np.random.default_rng(3)
    x = generator.standard_normal((ITEMS, 8)).astype(np.float32)
    y = np.tanh(x).astype(np.float32)
    for item, value in (wrong or {}).items():
        x[item, item % 8] = value
    np.savez(folder / "data.npz", x=x, y=y)
    return folder


def steps_with(items: set[int], folder: Path, *overrides: str) -> list[int]:
    """The steps whose batches have any of the items."""
    plan = plan_of(*overrides, text=TEXT)
    dataset = open_data(plan.program, plan.train, folder)
    names = {f"item {item}" for item in items}
    return [step for step in range(1, plan.train.steps + 1) if names & set(dataset.row_names(step))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with one item that is no number and one that is infinite."""
    return written(tmp_path_factory.mktemp("wrong"), {9: math.nan, 36: math.inf})


def run_in(folder: Path, *overrides: str, keep: Path | None = None, text: str = TEXT) -> Outcome:
    """A run on the data of a folder, with checkpoints in `keep` or without any."""
    plan = plan_of(*overrides, text=text)
    if keep is None:
        plan = without_checkpoints(plan)
    else:
        (keep / "data.npz").write_bytes((folder / "data.npz").read_bytes())
    return trained(plan, keep or folder)


# ---------------------------------------------------------------- skip


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bad_step_changes_nothing_and_the_others_are_as_if_it_were_not(layout: str, optimizer: str, folder: Path):
    bad = steps_with({9, 36}, folder)
    assert len(bad) == 2
    assert 1 < bad[0] < bad[1] < 8
    chosen = (*LAYOUTS[layout], f"train.optimizer={optimizer}")
    before = run_in(folder, *chosen, f"train.steps={bad[0] - 1}")
    after = run_in(folder, *chosen, f"train.steps={bad[0]}")
    same(tensors(after.run), tensors(before.run))
    assert not math.isfinite(after.steps[bad[0]][0])
    # The next ones are steps of torch's own optimizers, which have never heard of the bad ones.
    found = run_in(folder, *chosen)
    alone = run_in(folder, *ONE, f"train.optimizer={optimizer}", "train.precision=f64")
    expected = by_torch(folder, optimizer, bad)
    for name, tensor in alone.run.parameters().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
    for name, tensor in found.run.parameters().items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-3, atol=1e-4)
    assert [step for step, figures in found.steps.items() if not math.isfinite(figures[0])] == bad


def by_torch(folder: Path, optimizer: str, bad: list[int]) -> dict[str, torch.Tensor]:
    """The parameters after all steps but the bad ones, in float64, of torch's autograd and optimizer."""
    plan = plan_of(*ONE, f"train.optimizer={optimizer}", "train.precision=f64", text=TEXT)
    dataset = open_data(plan.program, plan.train, folder)
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in VirtualRun(plan).parameters().items()}
    if optimizer.startswith("adamw"):
        other = torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.0)
    else:
        momentum = 0.9 if "momentum" in optimizer else 0.0
        other = torch.optim.SGD(parameters.values(), lr=0.05, momentum=momentum, nesterov=momentum > 0)
    for step in range(1, 9):
        if step in bad:
            continue
        batch = {name: torch.from_numpy(array).double() for name, array in dataset.batch(step).items()}
        h = batch["x"] * parameters["m.tied"]
        for layer in range(4):
            up, down = (parameters[f"m.layer.{layer}.mlp.{each}"] for each in ("up", "down"))
            h = h + torch.nn.functional.silu(h @ up) @ down
        other.zero_grad()
        torch.nn.functional.mse_loss(h * parameters["m.tied"], batch["y"]).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        other.step()
    return {name: tensor.detach() for name, tensor in parameters.items()}


@pytest.mark.soak
def test_no_bad_step_no_difference(tmp_path: Path):
    written(tmp_path)
    skipping, stopping = run_in(tmp_path), run_in(tmp_path, "train.on_bad_step=stop")
    judged = run_in(tmp_path, "train.on_bad_step=skip(spike = 1e6)")
    for each in (skipping, judged):
        assert each.steps == stopping.steps
        same(tensors(each.run), tensors(stopping.run))


@pytest.mark.soak
def test_what_is_left_out_is_said_with_its_rows(folder: Path):
    plan = without_checkpoints(plan_of(text=TEXT))
    dataset = open_data(plan.program, plan.train, folder)
    said: list[Diagnostic] = []
    results: list[StepResult] = []

    class Watch(Outcome):
        def step(self, result: StepResult) -> None:
            results.append(result)

    run = VirtualRun(plan)
    run.train(dataset, [Watch(run)], report=said.append)
    bad = steps_with({9, 36}, folder)
    assert [result.skipped for result in results] == [sum(step <= number for step in bad) for number in range(1, 9)]
    assert [result.step for result in results if result.bad] == bad
    for result in results:
        assert result.rows == (dataset.row_names(result.step) if result.bad else ())
        assert result.rewound_to is None
    assert [each.code for each in said] == ["W0602"] * 2
    for each, step in zip(said, bad, strict=True):
        assert each.message.startswith(f"step {step} is skipped: the loss of step {step} is ")
        names = dataset.row_names(step)
        item = next(name for name in names if name in ("item 9", "item 36"))
        assert each.notes[0] == f"the input `x` is not finite, row {names.index(item)} of the batch ({item})"
        assert each.notes[1] == f"its batch: {', '.join(names[:4])} and 4 more"


@pytest.mark.soak
def test_at_most_so_many_in_all_also_over_a_restart(folder: Path, tmp_path: Path):
    bad = steps_with({9, 36}, folder)
    with pytest.raises(NotFinite) as stopped:
        run_in(folder, "train.on_bad_step=skip(at_most = 1)", keep=tmp_path)
    assert stopped.value.step == bad[1]
    assert f"of step {bad[1]} is " in str(stopped.value)
    assert "after skipping 1 step (`at_most = 1`)" in str(stopped.value)
    assert "raise `at_most`" in str(stopped.value)
    # The step that was left out is before the checkpoint from which the next attempt goes on.
    assert steps_in(tmp_path / "checkpoints")[-1] >= bad[0]
    with pytest.raises(NotFinite) as again:
        run_in(folder, "train.on_bad_step=skip(at_most = 1)", keep=tmp_path)
    assert again.value.step == bad[1]
    resumed = run_in(folder, "train.on_bad_step=skip(at_most = 2)", keep=tmp_path)
    same(tensors(resumed.run), tensors(run_in(folder).run))
    assert resumed.said == []  # what is done about bad steps is no other setting


@pytest.mark.soak
@pytest.mark.parametrize(
    "settings", ["rewind(spike = 1.05, window = 2)", *soak("skip", "skip(spike = 1.05, window = 3)")]
)
@pytest.mark.parametrize("interrupted", [4, *soak(2, 6)])
def test_an_interrupted_run_judges_as_the_undisturbed_one(settings: str, interrupted: int, tmp_path: Path):
    """With the same history; what a checkpoint does not have is judged again."""
    folder, keep, whole = written(tmp_path, {9: math.nan, 30: 30.0}), tmp_path / "a", tmp_path / "b"
    keep.mkdir(), whole.mkdir()
    policy = f"train.on_bad_step={settings}".replace("(", "(at_most = 8, ").replace("skip(at_most = 8, )", "skip")
    run_in(folder, policy, f"train.steps={interrupted}", keep=keep)
    resumed = run_in(folder, policy, keep=keep)
    undisturbed = run_in(folder, policy, keep=whole)
    assert repr(resumed.steps) == repr({s: undisturbed.steps[s] for s in range(interrupted + 1, 9)})
    assert resumed.run.ranks[0].bad_step_policy.history == undisturbed.run.ranks[0].bad_step_policy.history
    assert len({repr(rank.bad_step_policy.history) for rank in resumed.run.ranks}) == 1
    assert undisturbed.run.ranks[0].bad_step_policy.history.skipped >= 1
    same(tensors(resumed.run), tensors(undisturbed.run))


# ---------------------------------------------------------------- spikes


def judged(judge: BadStepPolicy, figures: list[tuple[float, float]]) -> list[int]:
    """The steps that are not accepted."""
    return [
        step
        for step, (loss, norm) in enumerate(figures, 1)
        if not judge.accepts(step, {"loss": loss, "square 0": norm**2})
    ]


FIGURES = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1.0, 2.0, 4.0, 30.0, -1.0, -9.0, 0.0, math.nan, math.inf]),
        st.sampled_from([1.0, 2.0, 3.0, 16.0, 64.0, math.inf]),
    ),
    max_size=40,
)


@example(figures=[(-1.0, 1.0)] * 12, spike=4.0, window=15)
@given(figures=FIGURES, spike=st.sampled_from([1.5, 4.0, 10.0]), window=st.integers(1, 15))
def test_a_spike_is_judged_by_the_median_of_the_good_steps_before(
    figures: list[tuple[float, float]], spike: float, window: int
):
    judge = BadStepPolicy(Call("skip", {"at_most": 100, "spike": spike, "window": window}))
    good: list[tuple[float, float]] = []
    bad = []
    for step, pair in enumerate(figures, 1):
        wrong = not all(map(math.isfinite, pair))
        if not wrong and len(good) >= min(MIN_WINDOW, window):
            for value, past in zip(pair, zip(*good[-window:], strict=True), strict=True):
                middle = float(np.median(past))
                limit = spike * middle if middle > 0 else middle + (spike - 1) * -middle
                wrong = wrong or (middle != 0 and value > limit)
        if wrong:
            bad.append(step)
        else:
            good.append(pair)
    assert judged(judge, figures) == bad
    assert judge.history.skipped == len(bad)
    assert judge.history.losses == tuple(loss for loss, _ in good[-window:])
    assert judge.history.norms == pytest.approx([norm for _, norm in good[-window:]])


def test_a_spike_ends_a_run_that_asks_for_it():
    judge = BadStepPolicy(Call("stop", {"spike": 10.0, "window": 100}))
    with pytest.raises(BadStep) as stopped:
        judged(judge, [(0.5, 1.0)] * 12 + [(7e11, 1.0)])
    assert not isinstance(stopped.value, NotFinite)
    assert stopped.value.step == 13
    assert "the loss of step 13 is 7e+11, a spike above 0.5, the median of the 12 good steps" in str(stopped.value)
    assert "`on_bad_step = skip`" in str(stopped.value)
    assert judged(BadStepPolicy(Call("stop", {"spike": None, "window": 100})), [(0.5, 1.0)] * 12 + [(7e11, 1.0)]) == []


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spike_of_the_loss_is_left_out_under_every_layout(layout: str, tmp_path: Path):
    folder = written(tmp_path, {9: 1e6})
    bad = steps_with({9}, folder)
    spike = "train.on_bad_step=skip(spike = 10, window = 2)"
    found = run_in(folder, *LAYOUTS[layout], spike)
    assert [step for step, (loss, *_) in found.steps.items() if loss > 100] == bad
    assert all(rank.bad_step_policy.history.skipped == 1 for rank in found.run.ranks)
    accepted = run_in(folder, *LAYOUTS[layout])
    assert accepted.steps[8][0] != found.steps[8][0]


# ---------------------------------------------------------------- rewind


def by_hand(folder: Path, keep: Path, bad: int, to: int, overrides: tuple[str, ...]) -> VirtualRun:
    """What going back means: the state after step `to`, and from there the steps after the bad one."""
    plan = plan_of(*overrides, text=TEXT)
    run = VirtualRun(plan)
    dataset = open_data(plan.program, plan.train, folder)
    if to:
        settings = settings_of(plan.spec, keep, keep)
        assert settings is not None
        checkpoints = [Checkpoints(rank, settings, print) for rank in run.ranks]
        run.cluster.run([each.resume() for each in checkpoints])
        for each in checkpoints:
            each.close()
    for rank in run.ranks:
        rank.bad_step_policy.rewound(bad, to, rank.bad_step_policy.history)

    def steps(rank):
        for number in range(bad + 1, plan.train.steps + 1):
            batch = rank.tensors(dataset.batch(number))
            yield from rank.step(number, batch, learning_rates(plan.train.optimizer, number), rank.bad_step_policy)

    run.cluster.run([steps(rank) for rank in run.ranks])
    return run


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "interval"), [("zero3", 2), ("zero1", 3), ("plain", 5), ("one", 8)])
def test_going_back_leaves_out_all_since_the_checkpoint(layout: str, interval: int, tmp_path: Path):
    folder = written(tmp_path, {9: math.nan})
    (bad,) = steps_with({9}, folder)
    to = (bad - 1) // interval * interval
    chosen = (*LAYOUTS[layout], "train.on_bad_step=rewind", f"train.checkpoint=every({interval}, keep = 9)")
    keep, part = tmp_path / "keep", tmp_path / "part"
    keep.mkdir(), part.mkdir()
    found = run_in(folder, *chosen, keep=keep)
    assert found.run.ranks[-1].bad_step_policy.history.skipped == bad - to
    if to:
        run_in(folder, *chosen, f"train.steps={to}", keep=part)
    same(tensors(found.run), tensors(by_hand(folder, part, bad, to, chosen)))
    assert list(found.steps) == list(range(1, 9))


def test_what_was_left_out_and_how_often_is_counted_on_whatever_one_goes_back_to():
    """A checkpoint does not know how often a run went back to it."""
    judge, saved = BadStepPolicy(Call("rewind", {"at_most": 2, "spike": None, "window": 100})), History(skipped=1)
    for step in (7, 9):
        assert judged(judge, [(math.nan, 1.0)]) == [1]
        judge.rewound(step, 3, saved)
        assert judge.history == History(skipped=1 + step - 3, rewinds=1 if step == 7 else 2)
        assert judge.updates(step + 1) == 3  # after the checkpoint's two
    with pytest.raises(NotFinite, match="after rewinding 2 times"):
        judged(judge, [(math.nan, 1.0)])


def test_the_beginning_is_as_it_was():
    """Of parameters, states, and means of parameters."""
    run, fresh = (VirtualRun(plan_of("train.ema=0.9", text=TEXT)) for _ in range(2))
    for rank in run.ranks:
        for tensor in (*rank.memory.masters.values(), *rank.memory.states.values()):
            tensor.fill_(7.0)
        rank.restart()
    same(tensors(run), tensors(fresh))


@pytest.mark.soak
def test_going_back_is_said_and_ends(folder: Path, tmp_path: Path):
    first, second = steps_with({9, 36}, folder)
    said: list[Diagnostic] = []
    plan = plan_of("train.on_bad_step=rewind(at_most = 1)", text=TEXT)
    settings = settings_of(plan.spec, tmp_path, tmp_path)
    assert settings is not None
    run = VirtualRun(plan)
    checkpoints = [Checkpoints(rank, settings, said.append) for rank in run.ranks]
    results: list[StepResult] = []

    class Watch(Outcome):
        def step(self, result: StepResult) -> None:
            results.append(result)

    with pytest.raises(NotFinite, match=r"after rewinding once \(`at_most = 1`\)"):
        run.train(open_data(plan.program, plan.train, folder), [Watch(run)], checkpoints, said.append)
    to = (first - 1) // 2 * 2
    assert results[first - 1].rewound_to == to
    assert results[first - 1].skipped == first - to
    (diagnostic,) = said
    back = f"back to the checkpoint of step {to}" if to else "back to the beginning"
    assert diagnostic.message.startswith(back)
    assert len(results) == second - 1


@pytest.mark.soak
def test_a_run_that_is_killed_after_it_went_back_goes_back_again(tmp_path: Path):
    """Before its next checkpoint: nothing of what it did since the last one is left but lines of metrics."""
    folder, keep, whole = written(tmp_path, {9: math.nan}), tmp_path / "a", tmp_path / "b"
    keep.mkdir(), whole.mkdir()
    (bad,) = steps_with({9}, folder)
    policy = ("train.on_bad_step=rewind", f"train.checkpoint=every({bad - 1 or 1})")
    (keep / "data.npz").write_bytes((folder / "data.npz").read_bytes())

    class Killed(Exception):
        pass

    def step(outcome: Outcome, result: StepResult) -> None:
        if result.step == bad + 1:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outcome, "step", step)
        with pytest.raises(Killed):
            run_in(folder, *policy, keep=keep)
    resumed = run_in(folder, *policy, keep=keep)
    assert resumed.found is not None
    assert resumed.found.step == bad - 1
    undisturbed = run_in(folder, *policy, keep=whole)
    same(tensors(resumed.run), tensors(undisturbed.run))
    assert resumed.run.ranks[0].bad_step_policy.history == undisturbed.run.ranks[0].bad_step_policy.history


# ---------------------------------------------------------------- stop, and what it says


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_row_that_is_not_finite_is_named(layout: str, folder: Path):
    bad = steps_with({9, 36}, folder)[0]
    names = open_data(*_program(layout), folder).row_names(bad)
    item = next(name for name in names if name in ("item 9", "item 36"))
    with pytest.raises(NotFinite) as stopped:
        run_in(folder, *LAYOUTS[layout], "train.on_bad_step=stop")
    text = str(stopped.value)
    assert f"the input `x`, row {names.index(item)} of the batch ({item}) on rank " in text
    assert text.endswith("help: `on_bad_step = skip` in the train block skips such steps, up to 10 of them")


def _program(layout: str):
    plan = plan_of(*LAYOUTS[layout], text=TEXT)
    return plan.program, plan.train


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shift", [0, 1])
def test_so_is_the_row_of_which_something_is_computed(layout: str, shift: int, tmp_path: Path):
    """A logarithm of what is negative in one row only; on whichever rank, in whichever microbatch and stage."""
    folder = written(tmp_path, {11: -50.0})
    line = "param tied: [embed] ~ ones()\n  let low = log(x + 20.0)"
    text = TEXT.replace("param tied: [embed] ~ ones()", line).replace("mse(h * tied, y)", "mse(h * tied + low, y)")
    if shift:  # on the last stage
        text = TEXT.replace("mse(h * tied, y)", "mse(h * tied + log(x + 20.0), y)")
    (bad,) = steps_with({11}, folder)
    names = open_data(*_program(layout), folder).row_names(bad)
    with pytest.raises(NotFinite) as stopped:
        run_in(folder, *LAYOUTS[layout], "train.on_bad_step=stop", text=text)
    row = names.index("item 11")
    assert f", row {row} of the batch (item 11) (" in str(stopped.value)
    assert "`m.low`" in str(stopped.value) or "log" in str(stopped.value)


# ---------------------------------------------------------------- evaluation


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero3", "one"])
def test_an_evaluation_that_is_not_finite_is_said_and_training_goes_on(layout: str, tmp_path: Path):
    held = TRAINED + 9  # in the second of two batches
    folder = written(tmp_path, {held: math.nan})
    plan = without_checkpoints(plan_of(*LAYOUTS[layout], "train.eval=every(4, batches = 2)", text=TEXT))
    run, said = VirtualRun(plan), []
    run.train(open_data(plan.program, plan.train, folder), [outcome := Outcome(run)], report=said.append)
    assert list(outcome.steps) == list(range(1, 9))
    assert [math.isnan(loss) for loss in outcome.evaluations.values()] == [True, True]
    assert [each.message for each in said] == [f"the loss of the evaluation after step {s} is nan" for s in (4, 8)]
    for each in said:
        note = f"the first value that is not finite: the input `x`, row 1 of the batch (item {held}) on rank "
        assert each.notes[0].startswith(note)
    assert all(rank.eval_nonfinite for rank in run.ranks)
    plain = run_in(folder, *LAYOUTS[layout])
    same(tensors(run), tensors(plain.run))


@pytest.mark.soak
def test_the_command_says_so(tmp_path: Path):
    """Of real ranks; and the last checkpoint is there all the same."""
    written(tmp_path, {9: math.nan, TRAINED + 3: math.inf})
    (tmp_path / "m.par").write_text(TEXT)
    small = ("cluster.pipe=1", "cluster.tensor=1", "train.eval=every(8, batches = 2)")
    done = partita("run", "m.par", "--run-dir", "run", "--restarts", "1", *small, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("warning[W0601]: the loss of the evaluation after step 8 is ") == 1
    assert f"(item {TRAINED + 3}) on rank " in done.stderr
    assert done.stderr.count("warning[W0602]: step ") == 1
    assert "restarting all ranks" not in done.stderr
    assert "Traceback" not in done.stderr
    assert steps_in(tmp_path / "run" / "checkpoints")[-1] == 8
    found = [each for each in records(tmp_path / "run") if "loss" in each]
    (bad,) = steps_with({9}, tmp_path)
    assert [each["skipped"] for each in found] == [int(step >= bad) for step in range(1, 9)]
    assert [each.get("bad") for each in found if each["step"] == bad] == [f"the loss of step {bad} is nan"]
    assert "item 9" in found[bad - 1]["rows"]
    stopped = partita("run", "m.par", "--transport", "virtual", *ONE, "train.on_bad_step=stop", cwd=tmp_path)
    assert stopped.returncode == 3
    assert stopped.stderr.count(f"the loss of step {bad} is nan; the first value that is not finite: ") == 1
    assert stopped.stderr.count("help: `on_bad_step = skip`") == 1


def test_from_python(tmp_path: Path):
    written(tmp_path, {9: math.nan})
    (tmp_path / "m.par").write_text(TEXT)
    found = train_file(tmp_path / "m.par", *ONE, run_dir=tmp_path / "skipped")
    (bad,) = steps_with({9}, tmp_path)
    assert [each["skipped"] for each in found] == [int(step >= bad) for step in range(1, 9)]
    assert found[bad - 1]["bad"] == f"the loss of step {bad} is nan"
    with pytest.raises(BadStep):
        train_file(tmp_path / "m.par", *ONE, "train.on_bad_step=stop", run_dir=tmp_path / "stopped")
    back = train_file(tmp_path / "m.par", *ONE, "train.on_bad_step=rewind", run_dir=tmp_path / "rewound")
    assert back[bad - 1]["rewound_to"] == (bad - 1) // 2 * 2


def test_steps_by_hand_are_refused_where_they_are_not_finite(folder: Path):
    """`verify` and others that step a program themselves take no bad step for a good one, whatever the file says."""
    plan = plan_of(*ONE, text=TEXT)
    run = VirtualRun(evolve(plan))
    with pytest.raises(NotFinite):
        run.step(1, {"x": torch.full((8, 8), math.nan), "y": torch.zeros(8, 8)})
