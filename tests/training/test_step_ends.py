"""What hides at the ends of a step changes no bit of what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from partita.compiler.verify.equivalence import validate
from partita.runtime.data.binding import open_data
from partita.runtime.learning_rates import learning_rates
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import StepResult, VirtualRun
from partita.runtime.transports.lines import same_bits
from tests.commands import computed, here, partita
from tests.files import checked
from tests.marks import examples
from tests.programs import SIZES, axes, models, pipelines, recomputations

SHARED = ("", "shard state -> data", "shard param -> data")


@st.composite
def shared(draw: st.DrawFn) -> tuple[str, ...]:
    """A program of two or four data-parallel pipelines, by what they share: nothing, and as in ZeRO-1 and 3."""
    pipeline = draw(pipelines(draw(st.integers(1, 3)), most=4))
    data = draw(st.sampled_from((2, 2, 4)))
    sizes = {"batch": data * pipeline.microbatches, **SIZES, "spot": SIZES["seq"], "ffn": 8}
    model = draw(models(pipeline.stages, most=2))
    rule = draw(recomputations(model))
    optimizer = draw(st.sampled_from(["adamw(lr = 0.01, weight_decay = 0.1)", "sgd(lr = 0.05, momentum = 0.9)"]))
    # The squared norm of a gradient adds up in another order where it is split; so there is no clipping.
    text = axes(sizes) + model + f"mesh line(pipe = {pipeline.ranks}, data = {data})\n"
    text += f"schedule s = {pipeline.text}\ntrain {{ model = m layout = cut schedule = s data = random() "
    text += f"optimizer = {optimizer} steps = 3 seed = 3 precision = f32 }}\n"
    rules = ("shard batch -> data", "stage layer -> pipe", rule)
    return tuple(f"{text}layout cut on line {{ {' '.join((*rules, each))} }}" for each in SHARED)


Trained: TypeAlias = tuple[list[float], dict[str, torch.Tensor]]  # losses and parameters


class Seen:
    """An observer that keeps the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, result: StepResult) -> None:
        self.losses.append(result.loss)


def planned(text: str) -> CompiledRun:
    plan = prepare(checked(text, "random.par"))
    assert validate(plan.training).passed
    return plan


def in_one_go(plan: CompiledRun, seed: int, folder: Path) -> Trained:
    """A run, whose steps gather ahead."""
    run, seen = VirtualRun(plan, seed=seed), Seen()
    run.train(open_data(plan.program, plan.train, folder), [seen])
    return seen.losses, run.parameters()


def step_by_step(plan: CompiledRun, seed: int, folder: Path) -> Trained:
    """The same, with nothing under way between steps."""
    run, losses = VirtualRun(plan, seed=seed), []
    dataset = open_data(plan.program, plan.train, folder)
    for number in range(1, plan.train.steps + 1):
        batch = run.ranks[0].tensors(dataset.batch(number))
        losses.append(run.step(number, batch, *learning_rates(plan.train.optimizer, number))[0])
        assert all(stage.gathering is None for rank in run.ranks for stage in rank.training.stages.values())
    return losses, run.parameters()


def check(texts: tuple[str, ...], seed: int, folder: Path) -> None:
    note(texts[0])
    plain, first, third = map(planned, texts)
    same(step_by_step(plain, seed, folder), in_one_go(first, seed, folder))
    # Its gradients add up over the ranks before they do over microbatches.
    same(step_by_step(third, seed, folder), in_one_go(third, seed, folder))


def same(one: Trained, other: Trained) -> None:
    (losses, parameters), (found, values) = one, other
    assert found == losses
    assert all(same_bits(values[name], parameters[name]) for name in parameters)


@pytest.mark.soak
@given(texts=shared(), seed=st.integers(0, 1000))
@examples(2, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck))
def test_what_is_shared_changes_no_bit(texts: tuple[str, ...], seed: int, tmp_path_factory) -> None:
    check(texts, seed, tmp_path_factory.getbasetemp())


@pytest.mark.soak
@given(texts=shared(), seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_shared_changes_no_bit_at_length(texts: tuple[str, ...], seed: int, tmp_path_factory) -> None:
    check(texts, seed, tmp_path_factory.getbasetemp())


FILE = """
axis batch = 16, width = 16, hidden = 32, classes = 8
model net(x: [batch, width], y: i64[batch]) {
  param head: [width, classes] ~ kaiming()
  let h = x
  repeat 3 as layer {
    param up: [width, hidden] ~ kaiming()
    param down: [hidden, width] ~ kaiming()
    let h = h + dot(relu(dot(h, up, over = width)), down, over = hidden)
  }
  loss cross_entropy(dot(h, head, over = width), y, over = classes)
}
mesh pair(data = 2)
layout split on pair { shard batch -> data  shard state -> data }
schedule s = one_f_one_b(microbatches = 2)
train {
  data = random()  optimizer = adamw(lr = 1e-2)  clip = 0.1  steps = 6
  eval = every(2, batches = 1)  checkpoint = every(3)
}
"""


@pytest.mark.soak
def test_processes_compute_the_same_bits(tmp_path: Path) -> None:
    """With evaluations and checkpoints between steps, whose parameters are under way."""
    (tmp_path / "net.par").write_text(FILE)
    found = []
    for transport, run in (("gloo", partita), ("virtual", here)):
        done = run("run", "net.par", "--transport", transport, f"--run-dir={transport}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(computed(tmp_path / transport))
    assert len(found[0]) == 9
    assert found[0] == found[1]
