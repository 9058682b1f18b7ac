"""Whole runs with checkpoints, all ranks in this process, and what they did."""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import define, evolve, field

from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Call
from partita.runtime.checkpoint.checkpoints import Checkpoints, Resumed
from partita.runtime.checkpoint.settings import settings_of
from partita.runtime.data.binding import open_data
from partita.runtime.global_tensors import assemble
from partita.runtime.rank import CompiledRun, prepare
from partita.runtime.training import StepResult, VirtualRun
from tests.files import checked

# Two stages, three mesh axes, a tied parameter, everything that draws random numbers.
TEXT = """
axis batch = 8, seq = 4, embed = 8, heads = 2, key = 4, ffn = 16, vocab = 6

block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.5)
  param down: [ffn, embed] ~ normal(0.5)
  return x + dropout(dot(silu(dot(rms_norm(x, over = embed), up, over = embed)), down, over = ffn), rate = 0.25)
}

model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.5)
  param gain: [embed] ~ ones()
  sample eps: [batch, embed] ~ normal(0.1)
  let x = embedding(tokens, wte, over = vocab) + eps
  repeat 4 as layer { let x = mlp(x) }
  let logits = dot(rms_norm(x, over = embed, scale = gain), wte, over = embed)
  loss cross_entropy(logits, targets, over = vocab)
  metric accuracy = accuracy(logits, targets, over = vocab)
}

mesh cluster(data = 2, pipe = 2, tensor = 2)

layout zero3 on cluster {
  shard batch -> data
  shard ffn, vocab -> tensor
  shard param -> data
  stage layer -> pipe
}

layout zero1 on cluster {
  shard batch -> data
  shard ffn, vocab -> tensor
  shard state -> data
  stage layer -> pipe
}

layout plain on cluster {
  shard batch -> data
  shard ffn -> tensor
  stage layer -> pipe
}

schedule fast = one_f_one_b(microbatches = 2)

train {
  model = m
  layout = zero3
  schedule = fast
  data = random()
  optimizer = adamw(lr = cosine(peak = 0.01, warmup = 2, total = 12), weight_decay = 0.1)
  clip = 1.0
  steps = 6
  seed = 5
  eval = every(3, batches = 1)
  checkpoint = every(2)
}
"""
ONE_RANK = ("cluster.data=1", "cluster.pipe=1", "cluster.tensor=1")


def plan_of(*overrides: str, text: str = TEXT) -> CompiledRun:
    spec = checked(text, "m.par", overrides)
    return prepare(spec)


def without_checkpoints(plan: CompiledRun) -> CompiledRun:
    return evolve(plan, spec=evolve(plan.spec, train=evolve(plan.train, checkpoint=None)))


def saved_every(plan: CompiledRun, interval: int, keep: int = 3) -> CompiledRun:
    call = Call("every", {"interval": interval, "dir": None, "keep": keep, "copies": None})
    return evolve(plan, spec=evolve(plan.spec, train=evolve(plan.train, checkpoint=call)))


@define
class Outcome:
    """A run that has ended: what its first rank was told, by step, and what its checkpoints have said."""

    run: VirtualRun
    steps: dict[int, tuple[float, ...]] = field(factory=dict)
    evaluations: dict[int, float] = field(factory=dict)
    found: Resumed | None = None
    said: list[Diagnostic] = field(factory=list)
    unsaved: bool = False

    def resumed(self, found: Resumed) -> None:
        self.found = found

    def step(self, result: StepResult) -> None:
        self.steps[result.step] = (result.loss, result.grad_norm, result.learning_rate, *result.metrics.values())

    def evaluation(self, step: int, loss: float, metrics: dict[str, float]) -> None:
        self.evaluations[step] = loss

    @property
    def codes(self) -> list[str]:
        return [each.code for each in self.said]


def trained(plan: CompiledRun, directory: Path, seed: int = 0) -> Outcome:
    """Run a plan to its end, from the newest checkpoint in `directory`/checkpoints on."""
    outcome = Outcome(VirtualRun(plan, seed=seed))
    settings = settings_of(plan.spec, directory, directory)
    checkpoints = [Checkpoints(rank, settings, outcome.said.append) for rank in outcome.run.ranks] if settings else []
    try:
        outcome.run.train(open_data(plan.program, plan.train, directory), [outcome], checkpoints)
    finally:
        for each in checkpoints:
            each.close()
    outcome.unsaved = any(each.unsaved for each in checkpoints)
    return outcome


def tensors(run: VirtualRun) -> dict[str, torch.Tensor]:
    """Every parameter and state of the optimizer, whole; all copies of a part are the same bits."""
    program = run.plan.program
    found = dict(run.parameters())
    for record in program.parameters:
        for state in record.states:
            keep = [rank for rank in run.ranks if record.name in rank.memory.masters]
            parts = {rank.rank: rank.memory.states[state.name, record.name] for rank in keep}
            name = f"{state.name}/{record.name}"
            found[name] = assemble(name, state.type, record.stored(state), program.mesh, parts)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name
