"""Masters of parameters whose state is split: part of it, as in the ZeRO paper (arXiv 1910.02054)."""

from __future__ import annotations

import pytest

from partita.compiler.graph import Phase
from partita.compiler.ops.collective import AllGather
from partita.compiler.pipeline import compile_outputs, compile_run, compile_spec
from partita.compiler.program import StepPlan
from partita.compiler.state import Compilation
from partita.dsl.spec import Spec
from partita.runtime.verification.experiment import experiments
from tests.files import checked

FILE = """
axis batch = 8, width = 16, hidden = 32, classes = 4
model net(x: [batch, width], y: i64[batch]) {{
  param up: [width, hidden] ~ kaiming()
  param base: [hidden, width] ~ kaiming()
  param scale: [width] ~ ones()
  param head: [width, classes] ~ kaiming()
  let h = dot(relu(dot(x, up, over = width)), base, over = hidden)
  output features = h
  loss cross_entropy(dot(h * scale, head, over = width), y, over = classes)
}}
mesh cluster(data = 2) {{ device = device(flops = 1TFLOP/s, memory = {memory}, bandwidth = 1GB/s) }}
layout split on cluster {{ shard batch -> data   {rules} }}
optimizer mixed {{
  freeze base
  update net.up -> {first}
  update net.head -> muon(lr = 0.1)
  update net.scale -> sgd(lr = 0.1)
}}
train {{ data = random()  optimizer = mixed  steps = 4  precision = {precision}  eval = every(2, batches = 1) }}
"""


def file(
    precision: str = "bf16",
    rules: str = "shard state -> data",
    first: str = "adamw(lr = 1e-2)",
    memory: str = "1GiB",
) -> Spec:
    return checked(FILE.format(precision=precision, rules=rules, first=first, memory=memory), "net.par")


def stored(program: StepPlan) -> dict[str, str]:
    """The layout in which each master is stored."""
    return {each.name: str(each.layout) for each in program.parameters}


def gathers(state: Compilation) -> set[tuple[Phase, str, str]]:
    """Which parameters are gathered, when and in which dtype."""
    names = {each.value: each.name for each in state.sharded.graph.parameters}
    return {
        (node.phase, names[node.inputs[0]], node.inputs[0].type.dtype)
        for node in state.sharded.graph.nodes
        if isinstance(node.op, AllGather) and node.inputs[0] in names
    }


@pytest.mark.parametrize("precision", ["bf16", "f32", "f64"])
def test_masters_are_stored_as_states_and_gathered_in_the_dtype_that_computes(precision: str) -> None:
    state = compile_spec(file(precision))
    assert stored(state.program) == {
        "net.up": "hidden/data",
        "net.base": "replicated",  # frozen: it has no state
        "net.scale": "width/data",
        "net.head": "width/data",
    }
    wanted = {(Phase.PROLOGUE, f"net.{name}", precision) for name in ("up", "scale", "head")}
    assert gathers(state) == wanted
    updates = {each.name: each.update for each in state.update.parameters}
    assert not any(isinstance(node.op, AllGather) for node in (*updates["net.up"], *updates["net.scale"]))


def test_they_are_gathered_once_a_step_where_parameters_are_gathered_for_each_use() -> None:
    state = compile_spec(file(rules="shard net.head: param -> data   shard state -> data", memory="16B"))
    found = gathers(state)
    assert {name for phase, name, _ in found if phase is Phase.PROLOGUE} == {"net.up", "net.scale"}
    assert {name for phase, name, _ in found if phase is not Phase.PROLOGUE} == {"net.head"}


def test_where_states_are_whole_masters_compute() -> None:
    state = compile_spec(file("f32", rules=""))
    assert set(stored(state.program).values()) == {"replicated"}
    assert not gathers(state)


@pytest.mark.parametrize(
    ("rules", "first"),
    [
        ("shard state -> data", "adamw(lr = 1e-2)"),
        ("shard grad -> data", "adamw(lr = 1e-2)"),
        ("shard state -> data", "adamw_8bit(lr = 1e-2, min_size = 16, block_size = 32)"),
    ],
)
def test_whatever_reads_masters_finds_them_alike(rules: str, first: str) -> None:
    """Evaluation, and outputs that do not read all parameters."""
    given = file(rules=rules, first=first)
    training, evaluation = compile_run(given)
    assert evaluation is not None
    outputs = compile_outputs(given)
    assert stored(evaluation.program) == stored(training.program)
    read = stored(outputs.program)
    assert read.items() <= stored(training.program).items()
    assert "net.up" in read


def test_a_proxy_keeps_them_apart() -> None:
    """It computes in f64, but stores what the file stores."""
    program = next(experiments(file())).plan.program
    assert stored(program)["net.up"] == "hidden/data"


TIED = """
axis batch = 8, width = 16, vocab = 32
model net(tokens: i64[batch], y: [batch, width]) {
  param table: [vocab, width] ~ kaiming()
  let x = embedding(tokens, table, over = vocab)
  output logits = dot(x, table, over = width)
  loss mse(x, y)
}
mesh cluster(data = 2)
layout split on cluster { shard batch -> data   shard state -> data }
optimizer mixed {
  update matrices -> adamw_8bit(lr = 1e-2, min_size = 16, block_size = 512)
  update all -> adamw(lr = 1e-2)
}
train { data = random()  optimizer = mixed  steps = 4  precision = bf16 }
"""


def test_an_output_that_reads_a_parameter_in_another_way_changes_no_rule() -> None:
    """Only the output has a `dot` of the table, which is no matrix in training; as one it could not be split."""
    given = checked(TIED, "tied.par")
    assert stored(compile_outputs(given).program) == stored(compile_spec(given).program) == {"net.table": "vocab/data"}
