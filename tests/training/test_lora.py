"""LoRA: a frozen base with small trained matrices, as a user has it: what is frozen costs memory for itself alone, and
checkpoints, other layouts and ZeRO take it along.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from partita.compiler.analysis.memory import memory_report, peak_memory
from partita.compiler.graph import Phase
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.dsl.load import load_text
from partita.dsl.spec import Spec
from partita.runtime.rank import Plan, prepare
from partita.runtime.training import VirtualRun
from tests.compiler.analysis.test_memory import peak_of
from tests.files import SPECS
from tests.marks import soak
from tests.runtime.checkpoint.runs import same, tensors, trained

LORA = SPECS / "zoo" / "lora.par"
TEXT = (
    LORA.read_text().replace("  steps = 200\n", "  steps = 4\n  layout = plain\n  checkpoint = every(2)\n")
    + """
mesh ranks(data = 2, pipe = 2)
layout plain on ranks { shard batch -> data  stage layer -> pipe }
layout zero2 on ranks { shard batch -> data  shard grad -> data  stage layer -> pipe }
layout zero3 on ranks { shard batch -> data  shard param -> data  stage layer -> pipe }
schedule split = zb_h1(microbatches = 2)
"""
)
SMALL = ("seq=8", "embed=16", "key=4", "ffn=32", "rank=2", "vocab=256", "layers=2", "train.data=random()")
ADAPTERS = {"query_a", "query_b", "value_a", "value_b"}


def spec_of(*overrides: str, text: str = TEXT) -> Spec:
    spec, diagnostics = load_text(text, "lora.par", overrides, LORA)
    assert spec is not None, diagnostics
    return spec


def plan_of(*overrides: str) -> Plan:
    return prepare(spec_of(*SMALL, *overrides))


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ADAPTERS


# ---------------------------------------------------------------- what is not there


@pytest.mark.parametrize("layout", ["plain", "zero2", "zero3"])
def test_only_adapters_have_gradients_states_and_products_for_weights(layout: str):
    state = compile_spec(spec_of(*SMALL, f"layout={layout}"))
    program = state.program
    accumulated = {each.parameter for stage in program.stages for each in stage.accumulators if each.parameter}
    adapters = {record.name for record in program.parameters if is_adapter(record.name)}
    assert accumulated == adapters
    assert {record.name for record in program.parameters if record.states} == adapters
    # A product for each matrix of each layer, and its sum over microbatches.
    weight = [node for node in state.step.nodes if node.phase is Phase.WEIGHT]
    assert {node.op.name for node in weight} == {"dot", "accumulate"}
    assert len(weight) == 2 * len(adapters)
    report = memory_report(state, program.ranks[0])
    own = [record for record in program.parameters if record.name in program.ranks[0].parameters]
    elements = sum(record.type.elements for record in own if is_adapter(record.name))
    assert report.state == 2 * 4 * elements // (1 if layout == "plain" else 2)


TWO = """
axis batch = 8, width = 8, out = width
block b(x: [batch, width]) {
  param w: [width, out] ~ kaiming()
  return x + rename(tanh(dot(x, w, over = width)), out -> width)
}
model m(x: [batch, width]) {
  repeat 2 as lower { let x = b(x) }
  repeat 2 as upper { let x = b(x) }
  loss mean(x * x)
}
mesh ranks(pipe = 2)
layout cut on ranks { stage lower, upper -> pipe [2, 2] }
schedule s = zb_h1(microbatches = 4)
optimizer some { freeze lower  update all -> adamw(lr = 0.1) }
train { data = random() optimizer = some steps = 2 }
"""


@pytest.mark.parametrize(("frozen", "kinds"), [("lower", ("FP", "FBWP")), ("upper", ("FBWP", "FBP"))])
def test_a_stage_runs_no_backward_that_nothing_trained_needs(frozen: str, kinds: Sequence[str]):
    state = compile_spec(spec_of(text=TWO.replace("freeze lower", f"freeze {frozen}")))
    assert [set(stage.functions) for stage in state.program.stages] == list(map(set, kinds))
    # Before a stage that has nothing to train, nothing is sent back.
    back = {message.source for message in state.partitioned.messages if message.direction == "backward"}
    assert back == ({1} if frozen == "upper" else set())


# ---------------------------------------------------------------- memory


def measured(state: Compilation, plan: Plan) -> tuple[int, int]:
    """The bound of the only rank, and the most that it has held in two steps."""
    runs = []
    batch = {name: torch.zeros(16, 32, dtype=torch.int64) for name in ("tokens", "targets")}

    def run() -> None:
        runs.append(VirtualRun(plan))
        for step in (1, 2):
            runs[0].step(step, batch, 0.1)

    peak = peak_of(run)
    return peak_memory(state, state.program.ranks[0]), peak


@pytest.mark.parametrize("more", ["clip=1", "ema=0.9", "optimizer=adamw(lr=1e-3)"])
def test_the_bound_of_memory_holds_and_is_near(more: str):
    alone = ("ranks.data=1", "ranks.pipe=1", "batch=16", "seq=32", "layers=2", "train.data=random()")
    plan = prepare(spec_of(*alone, "schedule=one_f_one_b", f"train.{more}"))
    bound, peak = measured(plan.training, plan)
    assert 0.9 * bound <= peak <= bound, (bound, peak)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("layout", ["zero3", *soak("plain", "zero2")])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(layout: str, tmp_path: Path):
    undisturbed = trained(plan_of(f"layout={layout}", "train.checkpoint=none"), tmp_path)
    trained(plan_of(f"layout={layout}", "train.steps=2"), tmp_path)
    resumed = trained(plan_of(f"layout={layout}"), tmp_path)
    assert resumed.steps == {step: undisturbed.steps[step] for step in (3, 4)}
    same(tensors(resumed.run), tensors(undisturbed.run))


def test_the_base_stays_and_is_the_same_under_every_layout(tmp_path: Path):
    first = trained(plan_of("train.steps=2"), tmp_path).run.parameters()
    initial = VirtualRun(plan_of()).parameters()
    for name, value in first.items():
        assert torch.equal(value, initial[name]) == (not is_adapter(name)), name
    for layout in ("zero2", "zero3"):
        again = trained(plan_of("train.steps=2", f"layout={layout}"), tmp_path)
        assert again.steps == {}
        same(again.run.parameters(), first)
        anew = trained(plan_of("train.steps=2", f"layout={layout}", "train.checkpoint=none"), tmp_path)
        for name, value in anew.run.parameters().items():
            torch.testing.assert_close(value, first[name], rtol=1e-4, atol=1e-5, msg=name)
