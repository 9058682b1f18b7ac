"""Groups that train apart: each is a run of its own between averages, however they lie on ranks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from attrs import evolve

from partita.compiler.analysis.memory import memory_report
from partita.compiler.report.claims import outcomes
from partita.compiler.report.summary import summarize
from partita.compiler.text.partitioned import parse_update, update_text
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Refused
from partita.dsl.spec import MEAN, Call
from partita.runtime.bad_steps import NotFinite
from partita.runtime.checkpoint.parts import SavedTensor
from partita.runtime.checkpoint.store import commit_name
from partita.runtime.global_tensors import assemble
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.files import checked
from tests.marks import soak
from tests.runtime.checkpoint.runs import ONE_RANK, TEXT, plan_of, saved_every, trained

# Four groups of four rows each; a run of eight steps averages them after the third, the sixth and the last.
OUTER = {"sgd": "sgd(lr = 0.8)", "nesterov": "nesterov(lr = 0.7, momentum = 0.9)", "mean": "sgd()"}
STEPS = 8
RATE = 0.01


def apart(
    *overrides: str, groups: int = 4, outer: str = "nesterov", layout: str = "zero1", text: str = TEXT
) -> CompiledRun:
    sync = f"local(groups = {groups}, every = 3, outer = {OUTER[outer]})"
    given = ("batch=16", "schedule=one_f_one_b(microbatches = 2)", f"layout={layout}", f"train.steps={STEPS}")
    return plan_of(*given, f"train.sync={sync}", *overrides, text=text)


def steps_of(plan: CompiledRun, count: int = STEPS) -> tuple[VirtualRun, list[tuple[float, float]]]:
    """A run over the same batches, and the loss and norm of each step."""
    run, drawn = VirtualRun(plan), batches(plan.program, 3)
    return run, [run.step(number, drawn[number % 2], RATE) for number in range(1, count + 1)]


def by_hand(outer: str, groups: int = 4) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor], list[float]]:
    """The same by runs of one group's rows each, which know nothing of groups: their parameters at the end, the anchor,
    and the mean loss of each step.
    """
    whole = apart(*ONE_RANK, groups=groups, outer=outer)
    plan = plan_of(*ONE_RANK, f"batch={16 // groups}", "layout=plain", "schedule=gpipe(microbatches = 1)")
    runs = [VirtualRun(plan) for _ in range(groups)]
    for group, run in enumerate(runs):
        seed = (plan.train.seed + group * 0x9E3779B97F4A7C15) % (1 << 63)  # docs/random.md
        run.ranks[0].training.context.seed = seed
    anchor = {name: tensor.clone() for name, tensor in runs[0].parameters().items()}
    optimizer = {
        "sgd": torch.optim.SGD(anchor.values(), lr=0.8),
        "mean": torch.optim.SGD(anchor.values(), lr=1.0),
        "nesterov": torch.optim.SGD(anchor.values(), lr=0.7, momentum=0.9, nesterov=True),
    }[outer]
    drawn, losses = batches(whole.program, 3), []
    for number in range(1, STEPS + 1):
        found = []
        for group, run in enumerate(runs):
            rows = {name: tensor.chunk(groups)[group] for name, tensor in drawn[number % 2].items()}
            found.append(run.step(number, rows, RATE)[0])
        losses.append(sum(found) / groups)
        if number % 3 == 0 or number == STEPS:
            there = [run.parameters() for run in runs]
            for name, tensor in anchor.items():
                tensor.grad = tensor - sum(each[name] for each in there) / groups
            optimizer.step()
            for run in runs:
                run.set_parameters(anchor)
    return [run.parameters() for run in runs], anchor, losses


def close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("outer", OUTER)
def test_groups_are_runs_of_their_own_that_are_averaged(outer: str) -> None:
    parameters, anchor, losses = by_hand(outer)
    run, found = steps_of(apart(*ONE_RANK, outer=outer))
    for group, expected in enumerate(parameters):
        close(run.parameters(group), expected)
    close(run.companions("anchor"), anchor)
    assert [loss for loss, _ in found] == pytest.approx(losses, abs=1e-5)


@pytest.fixture(scope="module")
def on_one_rank() -> tuple[VirtualRun, list[tuple[float, float]]]:
    return steps_of(apart(*ONE_RANK))


def on(data: int = 1, pipe: int = 1, tensor: int = 1) -> tuple[str, ...]:
    return f"cluster.data={data}", f"cluster.pipe={pipe}", f"cluster.tensor={tensor}"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("zero1", on(data=8)),
        ("zero1", on(data=2, pipe=2, tensor=2)),
        *soak(
            ("plain", on(data=2)),
            ("plain", on(data=4, pipe=2)),
            ("plain", on(data=4, tensor=2)),
            ("zero3", on(data=8)),
            ("plain", on(tensor=2)),
        ),
    ],
    ids=str,
)
def test_groups_are_the_same_however_they_lie_on_ranks(
    layout: str, mesh: tuple[str, ...], on_one_rank: tuple[VirtualRun, list[tuple[float, float]]]
) -> None:
    expected, told = on_one_rank
    run, found = steps_of(apart(*mesh, layout=layout))
    for group in range(4):
        close(run.parameters(group), expected.parameters(group), 1e-4)
    close(run.companions("anchor"), expected.companions("anchor"), 1e-4)
    assert found == [pytest.approx(each, abs=1e-4) for each in told]


def test_groups_on_ranks_of_their_own_have_the_bits_of_one_process(
    on_one_rank: tuple[VirtualRun, list[tuple[float, float]]],
) -> None:
    expected, told = on_one_rank
    run, found = steps_of(apart(*on(data=4), layout="plain"))
    assert found == told
    for group in range(4):
        same(run.parameters(group), expected.parameters(group))
    for which in ("anchor", "velocity"):
        same(run.companions(which), expected.companions(which))


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# ---------------------------------------------------------------- checkpoints


def everything(run: VirtualRun) -> dict[str, torch.Tensor]:
    """All that is kept between steps, by its name in a checkpoint."""
    parts: dict[str, tuple[SavedTensor, dict[int, torch.Tensor]]] = {}
    for rank in run.ranks:
        for kept, tensor in rank.kept():
            parts.setdefault(kept.name, (kept, {}))[1][rank.rank] = tensor
    mesh = run.plan.program.mesh
    return {name: assemble(name, kept.type, kept.layout, mesh, own) for name, (kept, own) in parts.items()}


def kept_every(plan: CompiledRun, steps: int = STEPS) -> CompiledRun:
    """The plan with commits in the middle of a round, and so many steps, the last of which is no average."""
    plan = evolve(plan, spec=evolve(plan.spec, train=evolve(plan.train, steps=steps)))
    return saved_every(plan, 2, keep=9)


def forget(run: Path) -> None:
    """Remove the commits after that of step 4."""
    for step in (6, 8):
        (commit,) = run.rglob(commit_name(step))
        shutil.rmtree(commit)


def test_a_run_of_groups_resumes_with_the_same_bits_in_the_middle_of_a_round(tmp_path: Path) -> None:
    plan = kept_every(apart(*on(data=8), layout="zero1"))
    whole = trained(plan, tmp_path / "whole")
    first = tmp_path / "part"
    trained(plan, first)
    forget(first)
    again = trained(plan, first)
    assert again.found is not None
    assert again.found.step == 4
    assert again.steps == {step: told for step, told in whole.steps.items() if step > 4}
    assert again.evaluations == {step: told for step, told in whole.evaluations.items() if step > 4}
    same(everything(again.run), everything(whole.run))


@pytest.mark.soak
def test_groups_resume_on_another_mesh(tmp_path: Path) -> None:
    whole = trained(kept_every(apart(*on(data=8), layout="zero3")), tmp_path / "run")
    forget(tmp_path / "run")
    again = trained(kept_every(apart(*on(data=2, pipe=2), layout="plain")), tmp_path / "run")
    assert again.found is not None
    assert again.found.step == 4
    assert not again.said
    close(everything(again.run), everything(whole.run), 1e-4)


# ---------------------------------------------------------------- what the compiler says


def test_communication_falls_by_the_interval() -> None:
    """Of what data parallelism sends in a step: the claim is about the mesh axis that the file has."""
    sizes = *on(data=4), "layout=plain"
    together, alone = (summarize(plan.training) for plan in (plan_of(*sizes), apart(*sizes, "batch=16")))
    sent = [sum(each.bytes for each in found.collectives) for found in (together, alone)]
    assert sent[0] == pytest.approx(3 * sent[1])
    assert {each.axis for each in alone.collectives} == {"data_groups"}
    claimed = apart(*sizes, "batch=16", text=TEXT + f"expect {{ bytes(data) == {sent[1]}B }}")
    assert all(each.holds for each in outcomes(claimed.training, alone))


def test_what_a_rank_sends_for_each_of_its_groups_is_counted() -> None:
    """Along the axis of tensors, in every step."""
    sizes = on(tensor=2)
    small = ("batch=4", "schedule=one_f_one_b(microbatches = 2)", "layout=plain")
    alone, every = plan_of(*sizes, *small), apart(*sizes, layout="plain")
    sent = [
        sum(each.bytes for each in summarize(plan.training).collectives if each.axis == "tensor")
        for plan in (alone, every)
    ]
    assert every.program.replicas_per_rank == 4
    assert sent[1] == pytest.approx(4 * sent[0])
    assert sent[0] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mesh", "members"), [(on(data=8), 1), (on(data=4, pipe=2), 1), (on(data=2, pipe=2), 2)], ids=str
)
def test_every_way_that_groups_lie_is_valid_and_read_back(mesh: tuple[str, ...], members: int) -> None:
    plan = apart(*mesh, layout="zero1")
    assert plan.program.replicas_per_rank == members
    for state in (plan.training, plan.evaluation):
        assert state is not None
        assert not validate(state).problems
        written = update_text(state.update, places=False)
        assert update_text(parse_update(written), places=False) == written


def test_the_memory_bound_counts_every_group() -> None:
    """With a master and two states of each of four groups, an anchor and a velocity."""
    plan = apart(*ONE_RANK)
    size = sum(each.type.bytes for each in plan.program.parameters)
    (report,) = (memory_report(plan.training, rank) for rank in plan.program.ranks)
    assert report.parameters >= 4 * size
    assert report.state == (4 * 2 + 2) * size
    assert report.gradients < 2 * size


SMALL = """
axis batch = 12, embed = 4
model m(x: [batch, embed]) {{
  param w: [embed] ~ ones()
  {buffer}
  loss mean(x * w)
}}
mesh k(data = 6)
layout l on k {{ shard batch -> data {rule} }}
train {{ data = random() optimizer = adamw(1e-3) steps = 2 {entries} }}
"""


@pytest.mark.parametrize(
    ("code", "entries", "more"),
    [
        ("E0421", "sync = local(groups = 4, every = 2)", {}),
        ("E0406", "sync = local(groups = 24, every = 2)", {}),
        ("E0308", "sync = local(groups = 0, every = 2)", {}),
        ("E0308", "sync = delayed(9)", {}),
        ("E0309", "sync = gossip(2)", {}),
        ("E0318", "sync = local(groups = 2, every = 2) ema = 0.9", {}),
        ("E0318", "sync = delayed(1) on_bad_step = skip", {}),
        ("E0318", "sync = delayed(1) validate = after", {}),
        ("E0318", "sync = paired() on_bad_step = skip", {}),
        ("E0401", "sync = local(groups = 2, every = 2)", {"rule": "offload w by mmap"}),
        ("E0401", "sync = paired()", {"rule": "offload w by mmap"}),
        ("E0401", "sync = local(groups = 2, every = 2)", {"buffer": "buffer n: i64[] ~ zeros() update n = n + 1"}),
    ],
)
def test_what_cannot_be_is_refused_by_name(code: str, entries: str, more: dict[str, str]) -> None:
    text = SMALL.format(entries=entries, **{"rule": "", "buffer": "", **more})
    with pytest.raises(Refused) as refused:
        prepare(checked(text, "small.par"))
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == code
    assert diagnostic.help or code == "E0308"


def test_buffers_are_averaged() -> None:
    buffer = "buffer mean: [embed] ~ zeros() update mean = 0.5 * mean + 0.5 * mean(x, over = batch)"
    text = SMALL.format(entries="sync = local(groups = 3, every = 2)", rule="", buffer=buffer)
    run = VirtualRun(prepare(checked(text, "small.par", ["train.steps=4"])))
    drawn = batches(run.plan.program, 1)
    for number in (1, 2, 3):
        run.step(number, drawn[0], 0.1)
    rows = drawn[0]["x"].chunk(3)
    average = drawn[0]["x"].mean(0) * 0.75
    close({"m.mean": run.companions("anchor")["m.mean"]}, {"m.mean": average}, 1e-6)
    for group in range(3):
        close({"m.mean": run.parameters(group)["m.mean"]}, {"m.mean": average / 2 + rows[group].mean(0) / 2}, 1e-6)


def small(loss: str, groups: int, **changes: str) -> VirtualRun:
    """A run on one rank, which trains all groups."""
    text = SMALL.format(entries=f"sync = local(groups = {groups}, every = 9)", rule="", buffer="")
    text = text.replace("loss mean(x * w)", loss).replace("data = 6", "data = 1")
    for old, new in changes.items():
        text = text.replace(old, new)
    return VirtualRun(prepare(checked(text, "small.par")))


def test_what_is_computed_of_a_whole_batch_is_of_the_rows_of_a_group() -> None:
    """Of inputs alone, and before the first of two microbatches."""
    run = small(
        "let c = x - expand(mean(x, over = batch), batch) loss mean(c * c * w)",
        3,
        train="schedule s = gpipe(microbatches = 2)\ntrain",
    )
    drawn = batches(run.plan.program, 1)[0]
    run.step(1, drawn, 0.1)
    assert run.plan.program.stages[0].full_inputs
    for group, rows in enumerate(drawn["x"].chunk(3)):
        expected = rows.var(0, unbiased=False) / 4
        close({"w": run.gradients(group)["m.w"]}, {"w": expected}, 1e-6)


def test_axes_that_are_made_of_the_batch_are_of_the_rows_of_a_group() -> None:
    """Merged with another and split again, under microbatches too: the numbers of the model without them."""
    losses = {
        "apart": "loss mean(tanh(x * w) * tanh(x * w))",
        "merged": """let two = concat(expand(x, one), expand(x, one), [one, one] -> two)
          let h = split(tanh(merge(two, [batch, two] -> rows) * w), rows -> [batch, two])
          let r = rename(gather(h, 0, along = two), batch -> others)
          loss mean(gather(h, 1, along = two) * rename(r, others -> batch))""",
    }
    parts = "schedule s = gpipe(microbatches = 2)\ntrain"
    sizes = "embed = 4, one = 1, two = 2, rows = 2 * batch, others = batch"
    apart, merged = (small(loss, 3, train=parts, **{"embed = 4": sizes}) for loss in losses.values())
    drawn = batches(apart.plan.program, 1)[0]
    for run in (apart, merged):
        run.step(1, drawn, 0.1)
    for group in range(3):
        close(merged.gradients(group), apart.gradients(group), 1e-6)
        assert not torch.equal(merged.gradients(group)["m.w"], merged.gradients((group + 1) % 3)["m.w"])


def test_what_pairs_rows_by_their_number_is_named() -> None:
    loss = "loss mean(sum(split(x * w, batch -> [two, half]), over = two))"
    with pytest.raises(Refused) as refused:
        small(loss, 3, **{"embed = 4": "embed = 4, two = 2, half = batch / 2"})
    (found,) = refused.value.diagnostics
    assert found.message == "`split(x * w, batch -> [two, half])` depends on the number of rows of `batch`"
    assert found.span is not None
    assert found.notes == ("each of the 3 groups of `sync` has a part of them",)


def test_ids_that_are_out_of_range_are_counted_and_not_averaged() -> None:
    run = small("loss mean(embedding(cast(sum(x, over = embed), i64), w, over = embed))", 3)
    x = torch.zeros(12, 4)
    x[[0, 8, 11], 2] = 9.0
    run.step(1, {"x": x}, 0.1)
    assert list(run.outside().values()) == [3.0]


def test_a_group_whose_step_is_bad_is_not_updated() -> None:
    run = small("loss mean(x * w)", 3)
    x = torch.ones(12, 4)
    x[5, 1] = float("nan")  # of the second group
    with pytest.raises(NotFinite):
        run.step(1, {"x": x}, 0.1)
    before = torch.ones(4)
    assert [bool((run.parameters(group)["m.w"] == before).all()) for group in range(3)] == [False, True, True]


def test_groups_take_their_mean_unless_the_file_says_otherwise() -> None:
    text = SMALL.format(entries="sync = local(2, every = 3)", rule="", buffer="")
    train = checked(text, "small.par").train
    assert train is not None
    assert train.sync == Call("local", {"groups": 2, "every": 3, "outer": MEAN})
    assert [step for step in range(1, 8) if evolve(train, steps=7).averages(step)] == [3, 6, 7]
    off = checked(text, "small.par", ["train.sync=none"]).train
    assert off is not None
    assert off.sync is None
    assert off.groups == 1
