"""The certificate: what it demands of the stages of a program, and how it says what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attrs import evolve

from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import MAX, REPLICATED, SUM, layout_of
from partita.compiler.ops.collective import AllGather, AllReduce, Part
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.position import Random
from partita.compiler.pipeline import compile_run
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from partita.dsl.load import load
from tests.compiler.verify.broken import FILE, Edit, compiled, output, problem, program, staged, the
from tests.compiler.verify.changes import places
from tests.files import SPECS

# ---------------------------------------------------------------- what is right


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("mlp.par", ()),
        ("tiny.par", ()),
        ("llama.par", ()),
        ("llama.par", ("layout=zero1",)),
        ("gpt.par", ()),
        ("gpt.par", ("cluster.tensor=4", "cluster.pipe=2", "schedule=gpipe")),
    ],
)
def test_the_examples_are_certified_as_they_stand(name: str, overrides: tuple[str, ...]):
    spec, _ = load(SPECS / name, overrides)
    assert spec is not None
    for state in compile_run(spec):
        if state is not None:
            found = validate(state)
            assert found.passed, "\n\n".join(d.render() for d in found.problems)
            assert found.nodes >= len(state.step.nodes)
            assert found.messages == len(state.partitioned.messages)
            assert found.parameters == len(state.step.parameters)


def test_a_program_of_one_rank_is_certified():
    text = FILE.replace("(pipe = 2, data = 2, tensor = 2)", "(pipe = 1, data = 1, tensor = 1)")
    found = validate(compiled(text))
    assert found.passed
    assert (found.reshardings, found.messages) == (0, 0)


def moved(node: Node, value: Value, op, layout, name: str = "by hand") -> Node:
    """A change of layout written by hand, beside a node."""
    result = Value(name, op.infer(value.type)[0], layout)
    return evolve(node, op=op, inputs=(value,), outputs=(result,))


def test_other_ways_to_the_same_layout_are_certified():
    """A reduce-scatter as an all-reduce of which each rank keeps its part; a part gathered and cut again."""
    place, node = the(program(), "m.layer.0.mlp.dot~2.reduced")
    (partial,), (reduced,) = node.inputs, node.outputs
    whole = layout_of((("data", "batch"),))
    summed = moved(node, partial, AllReduce("tensor", 2), whole, "summed")
    part = evolve(node, op=Part("tensor", 2, "seq"), inputs=summed.outputs)
    assert validate(place.changed({}, {node: (summed, part)})).passed
    again = moved(node, reduced, AllGather("tensor", 2, ("seq",)), whole, "gathered")
    cut = moved(node, output(again), Part("tensor", 2, "seq"), reduced.layout, "cut")
    found = validate(place.changed({reduced: output(cut)}, {node: (node, again, cut)}))
    assert found.passed
    assert found.reshardings == validate(program()).reshardings + 2


def test_another_order_of_independent_nodes_is_certified():
    place, node = the(program(), "m.embedding.reduced")
    mask = next(n for n in place.nodes if isinstance(n.op, Random))
    assert validate(place.changed({}, {mask: (), node: (node, mask)})).passed


def test_work_that_is_done_twice_is_certified():
    """Each reader has its own copy: wasteful, and not wrong."""
    place, node = the(program(), "m.layer.0.mlp.h")
    copy = evolve(node, outputs=(evolve(output(node), name="copy"),))
    gradient = next(n for n in place.nodes if isinstance(n.op, Pointwise) and n.op.function == "tanh_gradient")
    assert validate(place.changed({}, {node: (node, copy), gradient: (gradient,)})).passed


# ---------------------------------------------------------------- what is wrong


def edited(name: str, edit: Edit, values: dict[Value, Value] | None = None) -> Compilation:
    """The program with other nodes in the place of the one that makes a value."""
    place, node = the(program(), name)
    return place.changed(values or {}, {node: edit(node)})


def dropped(name: str) -> Compilation:
    _, node = the(program(), name)
    return edited(name, lambda _: (), {output(node): node.inputs[0]})


def doubled(name: str) -> Compilation:
    """A change of layout applied to its own result."""
    _, node = the(program(), name)
    again = evolve(output(node), name="again", type=node.op.infer(output(node).type)[0])
    return edited(name, lambda node: (node, evolve(node, inputs=node.outputs, outputs=(again,))), {output(node): again})


def op(name: str, **changes: object) -> Compilation:
    """The program with one operation's fields changed."""
    return edited(name, lambda node: (evolve(node, op=evolve(node.op, **changes)),))


def laid(name: str, *states: tuple[str, str]) -> Compilation:
    """The program with a value that is said to lie otherwise."""
    place, node = the(program(), name)
    (value,) = (v for v in node.outputs if v.name == name)
    return place.changed({value: evolve(value, layout=layout_of(states))}, made=True)


def reading(name: str, other: str) -> Compilation:
    """The program in which the node that makes a value reads another one first."""
    _, node = the(program(), other)
    return edited(name, lambda old: (evolve(old, inputs=(output(node), *old.inputs[1:])),))


def swapped(first: str, second: str) -> Compilation:
    """The program with two nodes in each other's place."""
    place, a = the(program(), first)
    _, b = the(program(), second)
    return place.changed({}, {a: (b,), b: (a,)})


DOT = "m.layer.0.mlp.dot~2"

BROKEN: dict[str, tuple[Callable[[], Compilation], str, int | None, str]] = {
    # Changes of layout: the culprit is what reads a value that lies otherwise than its rule wants it.
    "a sum that is never made": (
        lambda: dropped(f"{DOT}.reduced"),
        "`add` cannot be applied to what one rank holds of its operands",
        6,
        f"{DOT}: f32[batch=1, seq=4, embed=8] on each rank, laid out as batch/data sum/tensor",
    ),
    "a sum that is made twice": (
        lambda: doubled("m.max.reduced"),
        "`all_reduce` converts max to replicated along mesh axis `tensor`, but its operand has another layout",
        13,
        "m.max.reduced: f32[batch=1, seq=4] on each rank, laid out as batch/data",
    ),
    "a maximum that is summed": (
        lambda: op("m.max.reduced", maximum=False),
        "`all_reduce` converts sum to replicated along mesh axis `tensor`, but its operand has another layout",
        13,
        "m.max: f32[batch=1, seq=4] on each rank, laid out as batch/data max/tensor",
    ),
    "a sum along the wrong mesh axis": (
        lambda: op(f"{DOT}.reduced", over="data"),
        "`reduce_scatter` converts sum to seq along mesh axis `data`, but its operand has another layout",
        6,
        f"{DOT}: ",
    ),
    "a sum along the pipeline": (
        lambda: op(f"{DOT}.reduced", over="pipe"),
        "no tensor is laid out along mesh axis `pipe`",
        6,
        f"{DOT}: ",
    ),
    "a sum of too few ranks": (
        lambda: op("m.max.reduced", parts=1),
        "mesh axis `tensor` does not have 1 ranks",
        13,
        "m.max: ",
    ),
    "parts along the wrong axis": (
        lambda: op(f"{DOT}.reduced", axes=("embed",)),
        "`reduce_scatter` does not make what one rank holds of its results",
        6,
        f"{DOT}.reduced: ",
    ),
    # Layouts: no rule leads there.
    "a result that is said to be whole": (
        lambda: laid(DOT, ("data", "batch")),
        "along mesh axis `tensor`, no sharding rule of `dot` maps (ffn, ffn) to (replicated)",
        6,
        f"{DOT}: f32[batch=1, seq=4, embed=8] on each rank, laid out as batch/data",
    ),
    "a result that is said to be split": (
        lambda: laid("m.layer.0.mlp.h", ("data", "batch"), ("tensor", "seq")),
        "`tanh` does not make the whole of its results",
        5,
        "m.layer.0.mlp.h: f32[batch=1, seq=4, ffn=6] on each rank, laid out as batch/data seq/tensor",
    ),
    "parts of a sum where the operation is not linear": (
        lambda: laid("m.layer.0.mlp.h", ("data", "batch"), ("tensor", SUM)),
        "`tanh` does not make the whole of its results",
        5,
        "laid out as batch/data sum/tensor",
    ),
    "an axis that the value does not have": (
        lambda: laid("m.max", ("data", "batch"), ("tensor", "vocab")),
        "the value has no axis `vocab` to be split along",
        13,
        "m.max: ",
    ),
    "a sum of maxima": (
        lambda: laid("m.max", ("data", SUM), ("tensor", MAX)),
        "parts of a sum along one mesh axis cannot be parts of a maximum along another",
        13,
        "m.max: ",
    ),
    "a mesh axis that there is not": (
        lambda: laid("m.max", ("data", "batch"), ("pipe", MAX)),
        "a layout has each mesh axis once, in the mesh's order",
        13,
        "m.max: ",
    ),
    # Operations: those of the single-device program, on operands that mean the same.
    "another operation": (
        lambda: op("m.layer.0.mlp.h", function="sigmoid"),
        "the single-device program has no `sigmoid` of these operands (`m.layer.0.mlp.h`)",
        5,
        "m.layer.0.mlp.dot: f32[batch=1, seq=4, ffn=6] on each rank, laid out as batch/data ffn/tensor",
    ),
    "another constant": (
        lambda: op("m.x", rate=0.2),
        "the single-device program has no `dropout` of these operands (`m.x`)",
        10,
        "m.embedding.reduced: ",
    ),
    "another random number": (
        lambda: op("m.keep", key="other"),
        "the single-device program has no `keep` of these operands (`m.keep`)",
        10,
        "on stage 0",
    ),
    "another operand": (
        lambda: reading("m.layer.1.mlp.rms_norm", "m.x"),
        # The norm of `x` there is; the product of that with this turn's parameter there is not.
        "the single-device program has no `dot` of these operands (`m.layer.1.mlp.dot`)",
        5,
        "m.layer.1.mlp.up.gathered: f32[embed=8, ffn=6] on each rank, laid out as ffn/tensor",
    ),
    "a shard that does not know where it lies": (
        lambda: op("m.keep", shards=()),
        "`keep` does not work on the shards that it is given",
        10,
        "m.keep: ",
    ),
    "a shard that takes itself for another": (
        lambda: op("m.keep", shards=(("batch", "time", 4), ("batch", "tensor", 2), ("seq", "data", 2))),
        "`keep` does not work on the shards that it is given",
        10,
        "m.keep: ",
    ),
    # Order.
    "a value that is read before it is made": (
        lambda: swapped("m.layer.0.mlp.h", DOT),
        "`m.layer.0.mlp.h` is read before it is made, or is not made at all",
        6,
        "on stage 0",
    ),
    "a value that is made twice": (
        lambda: edited("m.layer.0.mlp.h", lambda node: (node, node)),
        "`m.layer.0.mlp.h` is made twice",
        5,
        "on stage 0",
    ),
    "a value that is made too late": (
        lambda: edited("m.layer.0.mlp.h", lambda node: (evolve(node, phase=Phase.WEIGHT),)),
        "`m.layer.0.mlp.h` is made after phase F, in which it is read",
        6,
        "m.layer.0.mlp.h: ",
    ),
    "work of another stage": (
        lambda: edited("m.layer.0.mlp.h", lambda node: (evolve(node, stage=1),)),
        "`m.layer.0.mlp.h` is said to be on stage 1",
        5,
        "on stage 0",
    ),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(name: str):
    build, message, line, note = BROKEN[name]
    found = problem(build())
    assert message in found.message
    assert found.span.line == line
    assert any(note in each for each in found.notes), found.notes


# ---------------------------------------------------------------- accumulation


def contributions(edit: Callable[[list[Node]], list[Node]], target: str = "m.layer.0.mlp.up") -> Compilation:
    """The program with other accumulations of a target on the first stage that has any."""
    for place in places(program()):
        own = [n for n in place.nodes if isinstance(n.op, Accumulate) and n.op.target == target]
        if own:
            return place.changed({}, dict.fromkeys(own[:-1], ()) | {own[-1]: edit(own)})
    raise AssertionError(target)


def test_every_contribution_counts_once():
    lost = problem(contributions(lambda nodes: []))
    assert "`m.layer.0.mlp.up` gets 0 contributions, and 1 in the single-device program" in lost.message
    assert any("laid out as sum/data ffn/tensor" in note for note in lost.notes)
    assert (
        "gets 2 contributions, and 1 in the single-device program"
        in problem(contributions(lambda nodes: nodes * 2)).message
    )
    _, gradient = the(program(), "d(m.layer.1.mlp.up)")

    def of_another_turn(nodes: list[Node]) -> list[Node]:
        return [evolve(nodes[0], inputs=gradient.outputs)]

    assert "`m.layer.0.mlp.up` gets other contributions" in problem(contributions(of_another_turn)).message


def test_contributions_are_added_in_the_order_of_the_whole_program():
    """Addition is not associative in floats: the order is part of what a program means."""
    text = FILE.replace("let x = mlp(x) }", "let x = mlp(x) + dot(dot(x, w, over = embed), w, over = ffn) }")
    text = text.replace("  let x = dropout", "  param w: [embed, ffn] ~ normal(0.5)\n  let x = dropout")
    state = compiled(text)
    assert validate(state).passed
    place = next(places(state))
    own = [n for n in place.nodes if isinstance(n.op, Accumulate) and n.op.target == "m.w"]
    assert len(own) > 1
    found = problem(place.changed({}, {own[0]: (), own[-1]: (own[-1], own[0])}))
    assert "`m.w` gets other contributions than in the single-device program" in found.message


def test_an_accumulation_is_of_the_layout_that_it_says():
    value = program().partitioned.stages[0].accumulators[0].value
    place = next(places(program()))
    found = problem(place.changed({value: evolve(value, layout=layout_of((("tensor", "ffn"),)))}, made=True))
    assert "is accumulated in another layout than its own" in found.message


def test_accumulators_are_those_of_the_whole_program():
    state = program()
    stage = state.partitioned.stages[0]
    fewer = evolve(stage, accumulators=stage.accumulators[1:])
    found = validate(evolve(state, partitioned=staged(fewer)))
    assert any("has no accumulator" in each.message for each in found.problems)
    assert any("has other accumulators than the single-device program" in each.message for each in found.problems)
    other = evolve(stage.accumulators[0], maximum=True)
    found = validate(evolve(state, partitioned=staged(evolve(stage, accumulators=(other, *stage.accumulators[1:])))))
    assert any("is accumulated as something else" in each.message for each in found.problems)


# ---------------------------------------------------------------- what is given


def test_inputs_and_parameters_are_those_of_the_file():
    state = program()
    stage = state.partitioned.stages[0]
    (tokens,) = stage.inputs
    value = evolve(tokens.value, layout=layout_of((("data", SUM),)))

    def given(**changes: object) -> str:
        return problem(evolve(state, partitioned=staged(evolve(stage, **changes)))).message

    assert "KeyError" in given(inputs=(evolve(tokens, name="words"),))
    assert "is not laid out as a shard of i64" in given(
        inputs=(evolve(tokens, value=evolve(value, layout=REPLICATED)),)
    )
    assert "is read before it is made, or is not made at all" in given(inputs=())
    first, *others = stage.parameters
    assert "is another parameter than declared" in given(parameters=(evolve(first, decays=not first.decays), *others))
    elsewhere = evolve(first.value, layout=layout_of((("data", "vocab"), ("tensor", "embed"))))
    place = next(places(state))
    moved = place.changed({first.value: elsewhere}, made=True)
    assert "a parameter is not as it is stored" in problem(moved).message


def test_the_data_yields_no_parts_of_sums():
    state = compiled(FILE.replace("shard batch -> data", "shard embed -> data"))
    assert validate(state).passed
    stage = state.partitioned.stages[0]
    (tokens,) = stage.inputs
    place = next(places(state))
    split = evolve(tokens.value, layout=layout_of((("data", SUM),)))
    found = problem(place.changed({tokens.value: split}, made=True))
    assert "inputs cannot be partial, as `tokens` claims to be" in found.message
    assert found.span.line == 8


# ---------------------------------------------------------------- what is no program at all


def test_anything_is_a_finding_and_never_an_exception():
    state = program()
    for changes in (
        {"partitioned": None},
        {"update": None},
        {"program": None},
        {"sharded": None},
        {"step": None},
        {"update": evolve(state.update, totals=())},
        {"update": evolve(state.update, step_metrics=((),))},
        {"partitioned": evolve(state.partitioned, stages=())},
        {"partitioned": evolve(state.partitioned, stages=state.partitioned.stages[::-1])},
        {"partitioned": evolve(state.partitioned, stages=state.partitioned.stages[:1])},
    ):
        assert not validate(evolve(state, **changes)).passed, changes
