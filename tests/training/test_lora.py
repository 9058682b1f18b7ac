"""LoRA: a frozen base with small trained matrices, as a user has it: what is frozen costs memory for itself alone, and
checkpoints, other layouts and ZeRO take it along.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from partita.compiler import pipeline
from partita.compiler.analysis.memory import memory_report, peak_memory
from partita.compiler.graph import Phase
from partita.compiler.pipeline import compile_outputs, compile_run, compile_spec
from partita.compiler.program import Program
from partita.compiler.state import Compilation
from partita.dsl.load import load_text
from partita.dsl.spec import Spec
from partita.runtime.rank import CompiledRun, prepare
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
SMALL = ("seq=8", "embed=16", "key=4", "ffn=32", "vocab=256", "layers=2", "train.data=random()")
ADAPTERS = {"lora_a", "lora_b"}


def spec_of(*overrides: str, text: str = TEXT) -> Spec:
    spec, diagnostics = load_text(text, "lora.par", overrides, LORA)
    assert spec is not None, diagnostics
    return spec


def plan_of(*overrides: str) -> CompiledRun:
    return prepare(spec_of(*SMALL, *overrides))


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ADAPTERS


# ---------------------------------------------------------------- what is not there


@pytest.mark.few(1)
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


# ---------------------------------------------------------------- what is stored in the dtype that reads it

HOSTED = "layout hosted on ranks { shard batch -> data  shard param -> data  stage layer -> pipe  offload param }\n"
NARROW = ("train.precision=bf16", "train.eval=every(2, batches=2)", "train.steps=4", "train.checkpoint=none")


def dtypes_of(program: Program) -> dict[bool, set[str]]:
    """The dtypes in which adapters, and all others, are stored."""
    return {own: {each.type.dtype for each in program.parameters if is_adapter(each.name) == own} for own in (0, 1)}


@pytest.mark.parametrize("layout", ["plain", "zero2", "zero3"])
def test_only_what_is_trained_has_masters_besides_what_computes(layout: str) -> None:
    given = spec_of(*SMALL, *NARROW, f"layout={layout}")
    training, evaluation = compile_run(given)
    assert evaluation is not None
    for state in (training, evaluation, compile_outputs(given, beside=training)):
        assert dtypes_of(state.program) == {True: {"f32"}, False: {"bf16"}}
    program = training.program
    for rank in program.ranks:
        own = [record for record in program.parameters if record.name in rank.parameters]
        trained, frozen = (sum(r.type.elements for r in own if is_adapter(r.name) == each) for each in (True, False))
        split = {"plain": 6 * trained + 2 * frozen, "zero2": 4 * trained // 2 + 2 * trained + 2 * frozen}
        split["zero3"] = split["zero2"] + 2 * frozen // 2  # a half of each, and what is gathered
        assert memory_report(training, rank).parameters == split[layout]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("plain", "ema=0.9"),
        ("zero2", "ema=0.9"),
        ("zero3", "clip=1"),
        ("hosted", "clip=1"),
        ("plain", "precision=fp8"),
        ("plain", "sync=local(groups=2,every=2)"),
    ],
)
def test_the_numbers_are_those_with_masters_of_all_to_the_last_bit(
    layout: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (*SMALL, *NARROW, f"layout={layout}", f"train.{more}")
    found = trained(prepare(spec_of(*given, text=TEXT + HOSTED)), tmp_path)
    monkeypatch.setattr(pipeline, "match_storage_dtype", lambda graph, *_: graph)
    wanted = trained(prepare(spec_of(*given, text=TEXT + HOSTED)), tmp_path)
    assert dtypes_of(wanted.run.plan.program)[False] == {"f32"}
    assert (found.steps, found.evaluations) == (wanted.steps, wanted.evaluations)
    assert set(found.evaluations) == {2, 4}
    for name, value in wanted.run.parameters().items():
        assert torch.equal(found.run.parameters()[name], value if is_adapter(name) else value.bfloat16()), name


# ---------------------------------------------------------------- memory


def measured(state: Compilation, plan: CompiledRun) -> tuple[int, int]:
    """The bound of the only rank, and the most that it has held in two steps."""
    runs = []
    batch = {name: torch.zeros(16, 32, dtype=torch.int64) for name in ("tokens", "targets")}

    def run() -> None:
        runs.append(VirtualRun(plan))
        for step in (1, 2):
            runs[0].step(step, batch, 0.1)

    peak = peak_of(run)
    return peak_memory(state, state.program.ranks[0]), peak


@pytest.mark.few(1)
@pytest.mark.parametrize("more", ["clip=1", "ema=0.9", "precision=bf16", "optimizer=adamw(lr=1e-3)"])
def test_the_bound_of_memory_holds_and_is_near(more: str):
    alone = ("ranks.data=1", "ranks.pipe=1", "batch=16", "seq=32", "layers=2", "train.data=random()")
    plan = prepare(spec_of(*alone, "schedule=one_f_one_b", f"train.{more}"))
    bound, peak = measured(plan.training, plan)
    assert 0.9 * bound <= peak <= bound, (bound, peak)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["zero3", "plain", "zero2"])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(layout: str, tmp_path: Path):
    undisturbed = trained(plan_of(f"layout={layout}", "train.checkpoint=none"), tmp_path)
    trained(plan_of(f"layout={layout}", "train.steps=2"), tmp_path)
    resumed = trained(plan_of(f"layout={layout}"), tmp_path)
    assert resumed.steps == {step: undisturbed.steps[step] for step in (3, 4)}
    same(tensors(resumed.run), tensors(undisturbed.run))


@pytest.mark.parametrize("layout", ["zero3", *soak("plain", "zero2")])
def test_a_base_is_rounded_to_the_dtype_that_reads_it_and_widened_again(layout: str, tmp_path: Path) -> None:
    """Of whatever dtype a checkpoint has it, such as one that was written in another precision."""
    own = f"layout={layout}", "train.checkpoint=every(1, keep=9)"
    first, *others = (
        trained(plan_of(*own, f"train.precision={precision}", f"train.steps={step}"), tmp_path)
        for step, precision in enumerate(("f32", "bf16", "f32"), 1)
    )
    assert all(each.found is not None for each in others)
    assert [dtypes_of(each.run.plan.program)[False] for each in others] == [{"bf16"}, {"f32"}]
    for name, value in first.run.parameters().items():
        if not is_adapter(name):
            for each in others:
                assert torch.equal(each.run.parameters()[name].float(), value.bfloat16().float()), name


@pytest.mark.soak
def test_what_was_frozen_may_be_trained_later(tmp_path: Path) -> None:
    """Without states, which would be others."""
    rules = "optimizer some {\n  update wq.lora_a -> sgd(lr = 0.1)\n  RULE\n}\nadapters small {"
    texts = [
        TEXT.replace("  freeze all\n", "").replace("adapters small {", rules.replace("RULE", rule))
        for rule in ("freeze all", "update all -> sgd(lr = 0.1)")
    ]
    given = (*SMALL, "train.optimizer=some", "train.precision=bf16")
    first = trained(prepare(spec_of(*given, "train.steps=2", text=texts[0])), tmp_path).run.parameters()
    run = trained(prepare(spec_of(*given, "train.steps=2", text=texts[1])), tmp_path)
    assert run.found is not None
    for name, value in run.run.parameters().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, first[name].float())
    after = trained(prepare(spec_of(*given, "train.steps=3", text=texts[1])), tmp_path)
    for name, value in after.run.parameters().items():
        assert is_adapter(name) or not torch.equal(value, first[name].float()), name


@pytest.mark.soak
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
