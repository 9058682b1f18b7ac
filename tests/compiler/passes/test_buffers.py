"""Buffers in the passes: no gradient, no rule for classes, updates in full precision; programs without outputs."""

from __future__ import annotations

import pytest

from partita.compiler.graph import Graph, Node, Phase
from partita.compiler.layout import REPLICATED
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Refused
from tests.files import checked

MODEL = """
axis batch = 8, embed = 4
model m(x: [batch, embed], y: [batch, embed]) {{
  param w: [embed] ~ ones()
  buffer level: [embed] ~ ones()
  buffer turns: i64[] ~ zeros()
  let h = tanh(x * w) * level
  {body}
  loss mse(h, y)
}}
mesh ranks(data = 2)
layout cut on ranks {{ shard batch -> data {rules} }}
schedule s = gpipe(microbatches = {microbatches})
train {{ data = random() optimizer = adamw(lr = 0.1) steps = 1 precision = {precision} }}
"""


def compiled(body: str, microbatches: int = 2, rules: str = "", precision: str = "f32") -> Compilation:
    text = MODEL.format(body=body, microbatches=microbatches, rules=rules, precision=precision)
    return compile_spec(checked(text, "case.par"))


def late(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.phase is Phase.UPDATE]


AVERAGE = "update level = 0.9 * level + 0.1 * mean(h * h, over = batch)"


def test_buffers_have_no_gradient():
    state = compiled(AVERAGE)
    assert {each.parameter for each in state.joint.gradients} == {"m.w"}
    assert [each.name for each in state.update.parameters] == ["m.w"]
    record = state.program.parameter("m.level")
    assert record.states == ()


def test_rules_for_classes_are_for_what_is_trained():
    layouts = compiled(AVERAGE, rules="shard param -> data").sharded.parameters
    assert layouts["m.w"].param != REPLICATED
    assert layouts["m.level"].param == layouts["m.level"].state == REPLICATED
    assert compiled(AVERAGE, rules="shard m.level: embed -> data").sharded.parameters["m.level"].param != REPLICATED


@pytest.mark.parametrize("microbatches", [1, 2])
def test_updates_are_computed_in_full_precision(microbatches: int):
    """What follows the reduction over the batch is computed from a sum in f32, and from the master."""
    step = compiled(AVERAGE, microbatches, precision="bf16").step
    assert {value.type.dtype for node in late(step) for value in (*node.inputs, *node.outputs)} == {"f32"}
    assert [each.parameter for each in step.masters] == ["m.level"]
    level = next(each for each in step.parameters if each.name == "m.level")
    assert (level.value.type.dtype, level.master.dtype) == ("bf16", "f32")


def test_nothing_but_sums_is_kept_of_a_microbatch():
    step = compiled("update level = sqrt(mean(h * h, over = batch) + 0.1) * level").step
    (statistic,) = (each for each in step.accumulators if each.name.startswith("statistic"))
    assert statistic.value.type.names == ("embed",)
    assert {node.op.label for node in late(step)} >= {"sqrt", "multiply", "add"}


def test_a_maximum_is_the_maximum_of_all_microbatches():
    step = compiled("update level = maximum(level, max(h, over = batch))").step
    (statistic,) = (each for each in step.accumulators if each.name.startswith("statistic"))
    assert statistic.maximum


def test_parts_of_the_batch_are_reduced_as_the_batch():
    """Axes that the batch is split into are along the batch as well."""
    text = MODEL.replace("embed = 4", "embed = 4, groups = 4, rows = 2")
    body = "update level = mean(mean(split(h, batch -> [groups, rows]), over = rows), over = groups)"
    spec = checked(text.format(body=body, microbatches=2, rules="", precision="f32"), "case.par")
    statistics = [each for each in compile_spec(spec).step.accumulators if each.name.startswith("statistic")]
    assert [each.value.type.names for each in statistics] == [("embed",)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("let p = softmax(h, over = batch)  update level = mean(p * p, over = batch)", "is applied to a sum over"),
        (
            "let m = mean(h, over = batch)  update level = mean((h - m) * (h - m), over = batch)",
            "is applied to a sum over `batch`",
        ),
        ("let m = mean(h, over = batch)  let h = h - m  " + AVERAGE, "is applied to a sum over `batch`"),
    ],
)
def test_what_is_not_determined_by_sums_is_refused(body: str, message: str):
    with pytest.raises(Refused) as refused:
        compiled(body)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E0407"
    assert message in diagnostic.message
    assert compiled(body, microbatches=1).step.updates


def test_a_program_is_the_same_with_and_without_outputs():
    """Outputs are no part of training and evaluation, even if they call blocks or name values anew."""
    text = "block twice(x: [batch, embed]) {{ return x * 2.0 + x }}" + MODEL
    more = "output first = twice(twice(h))  let h = twice(h)  output second = dot(h, w, over = embed)"
    less = "let h = twice(h)"
    sources = []
    for body in (less, more):
        spec = checked(text.format(body=body, microbatches=2, rules="", precision="f32"), "case.par")
        sources.append([compile_spec(spec, training=training).program.source for training in (True, False)])
    without_places = [["".join(line.partition("#")[0] for line in s.splitlines()) for s in each] for each in sources]
    assert without_places[0] == without_places[1]


def test_an_unread_buffer_is_kept():
    state = compiled("")
    assert state.partitioned.stage_sets()["m.turns"] == (0,)
    assert not state.update.buffers
