"""However a program is cut, scheduled and recomputed, it computes what the whole one computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from partita.compiler.graph import Phase
from partita.compiler.passes.cut import described, join
from partita.compiler.passes.prefetch import without_copies
from partita.runtime.data.binding import open_data
from partita.runtime.rank import prepare
from partita.runtime.training import VirtualRun
from tests.files import checked
from tests.marks import examples
from tests.programs import Program, programs


def plan_of(text: str, overrides: tuple[str, ...] = ()):
    spec = checked(text, "random.par", overrides)
    return prepare(spec)


def trained(plan, seed: int, tmp_path):
    """Losses, norms, gradients of the first step, metrics, evaluation and parameters after two steps."""
    run = VirtualRun(plan, seed=seed)
    dataset = open_data(plan.program, plan.train, tmp_path)
    found = []
    for step in (1, 2):
        batch = run.ranks[0].tensors(dataset.batch(step))
        found.append(run.step(step, batch, 0.01))
        found.append(run.metrics())
        if step == 1:
            gradients = run.gradients()
    evaluation = run.evaluate(run.ranks[0].tensors(dataset.holdout_batch(0)))
    for rank in run.ranks:
        for executor in (rank.training, rank.evaluation):
            for stage in executor.stages.values():
                assert not stage.in_flight, f"stage {stage.record.index} keeps frames of {stage.in_flight}"
    return found, gradients, run.parameters(), evaluation


def close(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    scale = max(float(b.abs().max()) if b.numel() else 0.0, 1e-3)
    assert torch.allclose(a, b, rtol=1e-9, atol=1e-10 * scale), f"{what}: differs by {(a - b).abs().max()}"


@given(program=programs(), seed=st.integers(0, 1000))
@examples(4, suppress_health_check=list(HealthCheck))
def test_partitioned_equals_whole(program: Program, seed: int, tmp_path_factory):
    note(program.text)
    check(program, seed, tmp_path_factory.getbasetemp())


@pytest.mark.soak
@given(program=programs(), seed=st.integers(0, 1000))
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
def test_partitioned_equals_whole_at_length(program: Program, seed: int, tmp_path_factory):
    note(program.text)
    check(program, seed, tmp_path_factory.getbasetemp())


def check(program: Program, seed: int, tmp_path) -> None:
    plan = plan_of(program.text)
    whole = plan_of(program.text, program.single)
    assert whole.ranks == 1
    steps, gradients, parameters, evaluation = trained(plan, seed, tmp_path)
    steps_, gradients_, parameters_, evaluation_ = trained(whole, 0, tmp_path)
    for (a, b), (a_, b_) in zip(steps[::2], steps_[::2], strict=True):
        assert a == pytest.approx(a_, rel=1e-10)
        assert b == pytest.approx(b_, rel=1e-9)
    for named, named_ in zip(steps[1::2], steps_[1::2], strict=True):
        assert named == pytest.approx(named_, rel=1e-9)
    assert gradients.keys() == gradients_.keys()
    for name in gradients_:
        close(gradients[name], gradients_[name], f"gradient of {name}")
    for name in parameters_:
        close(parameters[name], parameters_[name], name)
    assert evaluation[0] == pytest.approx(evaluation_[0], rel=1e-10)
    assert evaluation[1] == pytest.approx(evaluation_[1], rel=1e-9)


@given(program=programs())
@examples(4, suppress_health_check=list(HealthCheck))
def test_without_its_messages_the_cut_graph_is_the_one_before(program: Program):
    state = plan_of(program.text).training
    before = [node for node in state.step.nodes if node.phase is not Phase.FINISH]
    assert join(without_copies(state.partitioned)) == described(before)
