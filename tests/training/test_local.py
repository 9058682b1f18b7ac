"""Groups that train apart: each is a run of its own between averages, however they lie on ranks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from pathlib import Path

import pytest
import torch
from attrs import evolve

from partita.dsl.spec import Call
from partita.runtime.checkpoint.parts import Kept
from partita.runtime.checkpoint.store import commit_name
from partita.runtime.global_tensors import assemble
from partita.runtime.groups import seed_of
from partita.runtime.rank import Plan
from partita.runtime.training import VirtualRun
from partita.runtime.verification.experiment import batches
from tests.runtime.checkpoint.runs import ONE_RANK, TEXT, Outcome, plan_of, tensors, trained

# Four groups of four rows each; a run of eight steps averages them after the third, the sixth and the last.
OUTER = {"sgd": "sgd(lr = 0.8)", "nesterov": "nesterov(lr = 0.7, momentum = 0.9)", "mean": "sgd()"}
STEPS = 8
RATE = 0.01


def apart(*overrides: str, groups: int = 4, outer: str = "nesterov", layout: str = "zero1") -> Plan:
    sync = f"local(groups = {groups}, every = 3, outer = {OUTER[outer]})"
    given = ("batch=16", "schedule=one_f_one_b(microbatches = 2)", f"layout={layout}", f"train.steps={STEPS}")
    return plan_of(*given, f"train.sync={sync}", "train.data=random()", *overrides)


def steps_of(plan: Plan, count: int = STEPS) -> tuple[VirtualRun, list[tuple[float, float]]]:
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
        run.ranks[0].training.context.seed = seed_of(plan.train.seed, group)
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
    close(run.besides("anchor"), anchor)
    assert [loss for loss, _ in found] == pytest.approx(losses, abs=1e-5)


@pytest.fixture(scope="module")
def on_one_rank() -> tuple[VirtualRun, list[tuple[float, float]]]:
    return steps_of(apart(*ONE_RANK))


def on(data: int = 1, pipe: int = 1, tensor: int = 1) -> tuple[str, ...]:
    return f"cluster.data={data}", f"cluster.pipe={pipe}", f"cluster.tensor={tensor}"


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        ("plain", on(data=2)),
        ("plain", on(data=4, pipe=2)),
        ("plain", on(data=4, tensor=2)),
        ("zero1", on(data=8)),
        ("zero3", on(data=8)),
        ("zero1", on(data=2, pipe=2, tensor=2)),
        ("plain", on(tensor=2)),
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
    close(run.besides("anchor"), expected.besides("anchor"), 1e-4)
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
        same(run.besides(which), expected.besides(which))


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# ---------------------------------------------------------------- checkpoints


def everything(run: VirtualRun) -> dict[str, torch.Tensor]:
    """All that is kept between steps, by its name in a checkpoint."""
    parts: dict[str, tuple[Kept, dict[int, torch.Tensor]]] = {}
    for rank in run.ranks:
        for kept, tensor in rank.kept():
            parts.setdefault(kept.name, (kept, {}))[1][rank.rank] = tensor
    mesh = run.plan.program.mesh
    return {name: assemble(name, kept.type, kept.layout, mesh, own) for name, (kept, own) in parts.items()}


def kept_every(plan: Plan, steps: int = STEPS) -> Plan:
    """The plan with commits in the middle of a round, and so many steps, the last of which is no average."""
    call = Call("every", {"interval": 2, "dir": None, "keep": 9})
    return evolve(plan, spec=evolve(plan.spec, train=evolve(plan.train, checkpoint=call, steps=steps)))


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
    assert again.found is not None and again.found.step == 4
    assert again.steps == {step: told for step, told in whole.steps.items() if step > 4}
    assert again.evaluations == {step: told for step, told in whole.evaluations.items() if step > 4}
    same(everything(again.run), everything(whole.run))


def test_groups_resume_on_another_mesh(tmp_path: Path) -> None:
    whole = trained(kept_every(apart(*on(data=8), layout="zero3")), tmp_path / "run")
    forget(tmp_path / "run")
    again = trained(kept_every(apart(*on(data=2, pipe=2), layout="plain")), tmp_path / "run")
    assert again.found is not None and again.found.step == 4 and not again.said
    close(everything(again.run), everything(whole.run), 1e-4)
