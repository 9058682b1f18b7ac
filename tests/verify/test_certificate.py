"""The certificate: what it demands of a program, and how it says what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve

from partita.compiler.certificate import certify
from partita.compiler.cut import StageGraph, message_of
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import WHOLE, layout_of
from partita.compiler.ops.collective import AllGather, AllReduce, Part
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.ops.op import MAX, SUM
from partita.compiler.ops.optimizer import Accumulate, AdamW, Store, Update
from partita.compiler.ops.pointwise import Constant, Pointwise
from partita.compiler.ops.position import Random
from partita.compiler.pipeline import Compilation, compile_run, compile_spec
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.load import load, load_text
from tests.verify.mutants import Place, places

SPECS = Path(__file__).parents[2] / "specs"

FILE = """axis batch = 8, seq = 4, embed = 8, ffn = 12, vocab = 10
block mlp(x: [batch, seq, embed]) {
  param up: [embed, ffn] ~ normal(0.5)
  param down: [ffn, embed] ~ normal(0.5)
  let h = tanh(dot(rms_norm(x, over = embed), up, over = embed))
  return x + dot(h, down, over = ffn)
}
model m(tokens: i64[batch, seq], targets: i64[batch, seq]) {
  param wte: [vocab, embed] ~ normal(0.5)
  let x = dropout(embedding(tokens, wte, over = vocab), rate = 0.1)
  repeat 4 as layer { let x = mlp(x) }
  let logits = dot(x, wte, over = embed)
  loss cross_entropy(logits, targets, over = vocab)
  metric accuracy = accuracy(logits, targets, over = vocab)
}
mesh cluster(pipe = 2, data = 2, tensor = 2)
layout parts on cluster {
  shard batch -> data
  shard ffn, vocab -> tensor
  shard seq -> tensor
  shard state -> data
  stage layer -> pipe
}
schedule s = one_f_one_b(microbatches = 4)
train { data = random() optimizer = adamw(lr = 1e-3) steps = 1 clip = 1.0 }
"""


def compiled(text: str = FILE) -> Compilation:
    spec, diagnostics = load_text(text, "part.par")
    assert spec is not None, "\n\n".join(d.render() for d in diagnostics)
    return compile_spec(spec)


@cache
def program() -> Compilation:
    """The program that is broken below; frozen, so that one will do."""
    return compiled()


# ---------------------------------------------------------------- what is right


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
            found = certify(state)
            assert found.passed, "\n\n".join(d.render() for d in found.problems)
            assert found.nodes >= len(state.step.nodes)
            assert found.messages == len(state.partitioned.messages)
            assert found.parameters == len(state.step.parameters)


def test_a_program_of_one_rank_is_certified():
    text = FILE.replace("(pipe = 2, data = 2, tensor = 2)", "(pipe = 1, data = 1, tensor = 1)")
    found = certify(compiled(text))
    assert found.passed
    assert (found.moves, found.messages) == (0, 0)


def the(state: Compilation, name: str) -> tuple[Place, Node]:
    """The node that makes a value, by the value's name, and where it stands."""
    return next(
        (place, node) for place in places(state) for node in place.nodes for v in node.outputs if v.name == name
    )


def output(node: Node) -> Value:
    return node.outputs[0]


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
    assert certify(place.changed({}, {node: (summed, part)})).passed
    again = moved(node, reduced, AllGather("tensor", 2, ("seq",)), whole, "gathered")
    cut = moved(node, output(again), Part("tensor", 2, "seq"), reduced.layout, "cut")
    found = certify(place.changed({reduced: output(cut)}, {node: (node, again, cut)}))
    assert found.passed
    assert found.moves == certify(program()).moves + 2


def test_another_order_of_independent_nodes_is_certified():
    place, node = the(program(), "m.embedding.reduced")
    mask = next(n for n in place.nodes if isinstance(n.op, Random))
    assert certify(place.changed({}, {mask: (), node: (node, mask)})).passed


def test_work_that_is_done_twice_is_certified():
    """Each reader has its own copy: wasteful, and not wrong."""
    place, node = the(program(), "m.layer.0.mlp.h")
    copy = evolve(node, outputs=(evolve(output(node), name="copy"),))
    gradient = next(n for n in place.nodes if isinstance(n.op, Pointwise) and n.op.function == "tanh_gradient")
    assert certify(place.changed({}, {node: (node, copy), gradient: (gradient,)})).passed


# ---------------------------------------------------------------- what is wrong


def problem(state: Compilation) -> Diagnostic:
    """The first problem of a program that is not certified."""
    found = certify(state)
    assert not found.passed
    first = found.problems[0]
    assert first.code == "E0701"
    assert first.help is not None
    return first


Edit = Callable[[Node], Sequence[Node]]


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
        "`all_reduce` leads from max to whole along mesh axis `tensor`, and its operand lies otherwise",
        13,
        "m.max.reduced: f32[batch=1, seq=4] on each rank, laid out as batch/data",
    ),
    "a maximum that is summed": (
        lambda: op("m.max.reduced", maximum=False),
        "`all_reduce` leads from sum to whole along mesh axis `tensor`, and its operand lies otherwise",
        13,
        "m.max: f32[batch=1, seq=4] on each rank, laid out as batch/data max/tensor",
    ),
    "a sum along the wrong mesh axis": (
        lambda: op(f"{DOT}.reduced", over="data"),
        "`reduce_scatter` leads from sum to seq along mesh axis `data`, and its operand lies otherwise",
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
        "mesh axis `tensor` has not 1 ranks",
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
        "along mesh axis `tensor` no rule of `dot` leads from (ffn, ffn) to (whole)",
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
    # Operations: those of the whole program, on operands that mean the same.
    "another operation": (
        lambda: op("m.layer.0.mlp.h", function="sigmoid"),
        "the whole program has no `sigmoid` of these operands (`m.layer.0.mlp.h`)",
        5,
        "m.layer.0.mlp.dot: f32[batch=1, seq=4, ffn=6] on each rank, laid out as batch/data ffn/tensor",
    ),
    "another constant": (
        lambda: op("m.x", rate=0.2),
        "the whole program has no `dropout` of these operands (`m.x`)",
        10,
        "m.embedding.reduced: ",
    ),
    "another random number": (
        lambda: op("m.keep", key="other"),
        "the whole program has no `keep` of these operands (`m.keep`)",
        10,
        "on stage 0",
    ),
    "another operand": (
        lambda: reading("m.layer.1.mlp.rms_norm", "m.x"),
        # The norm of `x` there is; the product of that with this turn's parameter there is not.
        "the whole program has no `dot` of these operands (`m.layer.1.mlp.dot`)",
        5,
        "m.layer.1.mlp.up: f32[embed=8, ffn=6] on each rank, laid out as ffn/tensor",
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
    assert "`m.layer.0.mlp.up` gets 0 contributions, and 1 in the whole program" in lost.message
    assert any("laid out as sum/data ffn/tensor" in note for note in lost.notes)
    assert "gets 2 contributions, and 1 in the whole program" in problem(contributions(lambda nodes: nodes * 2)).message
    _, gradient = the(program(), "d(m.layer.1.mlp.up)")

    def of_another_turn(nodes: list[Node]) -> list[Node]:
        return [evolve(nodes[0], inputs=gradient.outputs)]

    assert "`m.layer.0.mlp.up` gets other contributions" in problem(contributions(of_another_turn)).message


def test_contributions_are_added_in_the_order_of_the_whole_program():
    """Addition is not associative in floats: the order is part of what a program means."""
    text = FILE.replace("let x = mlp(x) }", "let x = mlp(x) + dot(dot(x, w, over = embed), w, over = ffn) }")
    text = text.replace("  let x = dropout", "  param w: [embed, ffn] ~ normal(0.5)\n  let x = dropout")
    state = compiled(text)
    assert certify(state).passed
    place = next(places(state))
    own = [n for n in place.nodes if isinstance(n.op, Accumulate) and n.op.target == "m.w"]
    assert len(own) > 1
    found = problem(place.changed({}, {own[0]: (), own[-1]: (own[-1], own[0])}))
    assert "`m.w` gets other contributions than in the whole program" in found.message


def test_an_accumulation_is_of_the_layout_that_it_says():
    value = program().partitioned.stages[0].accumulators[0].value
    place = next(places(program()))
    found = problem(place.changed({value: evolve(value, layout=layout_of((("tensor", "ffn"),)))}, made=True))
    assert "is accumulated in another layout than its own" in found.message


def test_accumulators_are_those_of_the_whole_program():
    state = program()
    stage = state.partitioned.stages[0]
    fewer = evolve(stage, accumulators=stage.accumulators[1:])
    found = certify(evolve(state, partitioned=staged(fewer)))
    assert any("has no accumulator" in each.message for each in found.problems)
    assert any("has other accumulators than the whole" in each.message for each in found.problems)
    other = evolve(stage.accumulators[0], maximum=True)
    found = certify(evolve(state, partitioned=staged(evolve(stage, accumulators=(other, *stage.accumulators[1:])))))
    assert any("is accumulated as something else" in each.message for each in found.problems)


def staged(stage: StageGraph):
    """The partitioned program with another stage of that number."""
    partitioned = program().partitioned
    stages = tuple(stage if each.index == stage.index else each for each in partitioned.stages)
    sends = [node for each in stages for node in each.nodes if isinstance(node.op, Send)]
    return evolve(partitioned, stages=stages, messages=tuple(message_of(node) for node in sends))


# ---------------------------------------------------------------- what is given


def test_inputs_and_parameters_are_those_of_the_file():
    state = program()
    stage = state.partitioned.stages[0]
    (tokens,) = stage.inputs
    value = evolve(tokens.value, layout=layout_of((("data", SUM),)))

    def given(**changes: object) -> str:
        return problem(evolve(state, partitioned=staged(evolve(stage, **changes)))).message

    assert "KeyError" in given(inputs=(evolve(tokens, name="words"),))
    assert "is not laid out as a part of i64" in given(inputs=(evolve(tokens, value=evolve(value, layout=WHOLE)),))
    assert "is read before it is made, or is not made at all" in given(inputs=())
    first, *others = stage.parameters
    assert "is another parameter than declared" in given(parameters=(evolve(first, decays=not first.decays), *others))
    elsewhere = evolve(first.value, layout=layout_of((("data", "vocab"),)))
    place = next(places(state))
    moved = place.changed({first.value: elsewhere}, made=True)
    assert "a parameter is not as it is stored" in problem(moved).message


def test_the_data_yields_no_parts_of_sums():
    state = compiled(FILE.replace("shard batch -> data", "shard embed -> data"))
    assert certify(state).passed
    stage = state.partitioned.stages[0]
    (tokens,) = stage.inputs
    place = next(places(state))
    split = evolve(tokens.value, layout=layout_of((("data", SUM),)))
    found = problem(place.changed({tokens.value: split}, made=True))
    assert "the data yields no parts of sums, as `tokens` is said to be" in found.message
    assert found.span.line == 8


# ---------------------------------------------------------------- messages


def ends() -> tuple[tuple[Place, Node], tuple[Place, Node]]:
    """The send and the receive of the activation between the two stages."""
    found = {type(node.op): (place, node) for place in places(program()) for node in place.nodes if onward(node)}
    return found[Send], found[Receive]


def onward(node: Node) -> bool:
    return isinstance(node.op, (Send, Receive)) and node.op.direction == "forward"


def sent(edit: Edit, end: int = 0) -> str:
    """What is wrong with a program with another send (or receive)."""
    place, node = ends()[end]
    return problem(place.changed({}, {node: edit(node)})).message


NAME = "`m.layer.1.mlp.add`"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda node: (), f"{NAME} is received but never sent"),
        (lambda node: (node, node), f"{NAME} is sent twice"),
        (lambda node: (evolve(node, op=evolve(node.op, destination=2)),), "is sent but never received"),
        (lambda node: (evolve(node, op=evolve(node.op, direction="backward")),), "travels against its direction"),
        (lambda node: (evolve(node, op=evolve(node.op, direction="tied")),), f"{NAME} has no direction"),
        (lambda node: (evolve(node, op=evolve(node.op, value="other")),), f"{NAME} is sent as `other`"),
        (lambda node: (evolve(node, phase=Phase.WEIGHT),), f"{NAME} is sent in phase W"),
    ],
)
def test_a_send_is_as_it_should_be(edit: Edit, message: str):
    assert message in sent(edit)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda node: (), f"{NAME} is sent but never received"),
        (lambda node: (node, evolve(node, outputs=(evolve(output(node)),))), f"{NAME} is received twice"),
        (lambda node: (evolve(node, op=evolve(node.op, source=2)),), "travels against its direction"),
        (lambda node: (evolve(node, op=evolve(node.op, type=node.op.type.resized("seq", 4))),), "differ in type"),
    ],
)
def test_a_receive_is_as_it_should_be(edit: Edit, message: str):
    assert message in sent(edit, end=1)


def test_both_ends_of_a_message_lie_alike():
    place, node = ends()[1]
    value = output(node)
    other = evolve(value, layout=layout_of((("data", "seq"), ("tensor", "batch"))))
    found = problem(place.changed({value: other}, made=True))
    assert f"the ends of {NAME} differ in layout" in found.message
    assert found.notes[0].endswith("laid out as batch/data seq/tensor")
    assert found.notes[1].endswith("laid out as seq/data batch/tensor")


def test_a_stage_does_not_pass_on_what_it_was_sent():
    """A reader two stages on is served directly: a value has one sender."""
    state = compiled(FILE.replace("pipe = 2", "pipe = 4"))
    place = list(places(state))[1]
    receive = next(node for node in place.nodes if isinstance(node.op, Receive))
    send = evolve(receive, op=Send(output(receive).name, 2, "forward"), inputs=receive.outputs, outputs=())
    assert "a stage sends what it was sent itself" in problem(place.changed({}, {receive: (receive, send)})).message


def test_stages_do_not_wait_for_each_other():
    """The backward message is read before the forward one is sent that it follows from."""
    place, send = ends()[0]
    back = next(n for n in place.nodes if isinstance(n.op, Receive))
    gradient = next(n for n in place.nodes if back.outputs[0] in n.inputs)
    early = place.changed({}, {send: (back, send), back: ()})
    assert gradient is not None
    assert "is sent only after what follows from it" in problem(early).message


# ---------------------------------------------------------------- the end of the step


def ended(**changes: object) -> Compilation:
    """The program with another end of its step."""
    return evolve(program(), update=evolve(program().update, **changes))


def test_gradients_are_reduced_to_where_they_are_wanted():
    update = program().update
    (stage, (bucket, *others)), second = update.reduce
    assert not others
    found = problem(ended(reduce=(second,)))
    assert "is no total of" in found.message
    assert any("the reductions of stage 0" in note for note in found.notes)
    twice = (stage, (bucket, bucket))
    assert "is made twice" in problem(ended(reduce=(twice, second))).message
    # What the stage has accumulated, as if it were reduced already.
    own = program().partitioned.stages[0].accumulators[0].value
    totals = ((own, *update.totals[0][1:]), *update.totals[1:])
    assert "a gradient is not reduced to embed/data" in problem(ended(totals=totals)).message


def test_a_tied_gradient_is_the_sum_of_all_its_totals():
    update = program().update
    tied = next(each for each in update.parameters if len(each.totals) == 2)

    def changed(**changes: object) -> str:
        others = tuple(evolve(tied, **changes) if each is tied else each for each in update.parameters)
        return problem(ended(parameters=others)).message

    (_, first), (_, second) = tied.totals
    assert "is not the sum of all totals" in changed(gradient=first, finish=())
    (added,) = tied.finish
    reversed_ = evolve(added, inputs=(second, first))
    assert "is not the sum of all totals" in changed(finish=(reversed_,))
    assert "the totals are not those of all stages that make any" in changed(totals=tied.totals[:1])
    assert "is not updated on the stages that have it" in changed(stages=(0,))


def test_each_entry_of_the_statistics_counts_once():
    update = program().update
    loss, accuracy, *squares = update.statistics
    message = "the entries are not loss, accuracy, square 0, square 1"
    assert message in problem(ended(statistics=(loss, *squares))).message
    assert message in problem(ended(statistics=(accuracy, loss, *squares))).message
    mixed = (loss, ("accuracy", *loss[1:]), *squares)
    assert "is not the `accuracy` of the whole program" in problem(ended(statistics=mixed)).message
    (name, value, stage), *rest = squares
    # The squares of the first stage, but for the last one that is added.
    place = next(p for p in places(program()) if p.name == "the squares of stage 0")
    last = place.nodes[-1]
    assert last.outputs == (value,)
    fewer = ended(statistics=(loss, accuracy, (name, last.inputs[0], stage), *rest))
    assert "does not add the square of each gradient once" in problem(fewer).message
    twice = place.changed({}, {last: (evolve(last, inputs=(last.inputs[0], last.inputs[0])),)})
    assert "does not add the square of each gradient once" in problem(twice).message
    whole = place.changed({value: evolve(value, layout=WHOLE)}, made=True)
    assert not certify(whole).passed


def test_an_entry_that_every_rank_has_would_count_many_times():
    """Without `once`, a loss that is whole on every rank would be added up over them."""
    state = compiled(FILE.replace("  metric", "+ mean(wte * wte)\n  metric"))
    assert certify(state).passed
    place = next(place for place in places(state) if place.name == "the metrics")
    once = next(node for node in place.nodes if node.op.name == "once")
    found = problem(place.changed({once.outputs[0]: once.inputs[0]}, {once: ()}))
    assert "is no rule of" in found.message or "counts once if it is parts of a sum" in found.message


def test_gradients_are_clipped_by_the_norm_of_all():
    update = program().update
    assert "has no `add`" not in problem(ended(clip=update.clip[:-1])).message
    message = "the coefficient is not min(1, clip / (norm + ε))"
    assert message in problem(ended(clip=update.clip[:-1])).message
    for node in update.clip:
        if isinstance(node.op, Constant):
            other = evolve(node, op=evolve(node.op, value=node.op.value * 2))
            assert message in problem(ended(clip=tuple(other if n is node else n for n in update.clip))).message
    add = update.clip[0]
    first = evolve(add, inputs=(add.inputs[0], add.inputs[0]))
    assert message in problem(ended(clip=(first, *update.clip[1:]))).message
    clipped = compiled(FILE.replace(" clip = 1.0", ""))
    assert certify(clipped).passed
    lent = evolve(clipped, update=evolve(clipped.update, clip=update.clip, norms=update.norms))
    assert not certify(lent).passed


# ---------------------------------------------------------------- updates


def updated(edit: Edit, kind: type = Update) -> str:
    """What is wrong with a program with another update of its first parameter."""
    place = next(p for p in places(program()) if p.name == "the update of m.wte")
    node = next(n for n in place.nodes if isinstance(n.op, kind))
    return problem(place.changed({}, {node: edit(node)})).message


def unclipped() -> Value:
    return program().update.parameters[0].gradient


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda node: (), "`new(m.wte)` is not there to be read"),
        (lambda node: (evolve(node, op=evolve(node.op, beta1=0.8)),), "is not updated as the optimizer is declared"),
        (lambda node: (evolve(node, op=evolve(node.op, decay=0.5)),), "is not updated as the optimizer is declared"),
        (
            lambda node: (evolve(node, inputs=(*node.inputs[:2], *reversed(node.inputs[2:]))),),
            "is updated from something else than itself and its own",
        ),
        (
            lambda node: (
                evolve(node, inputs=(node.inputs[0], program().update.parameters[0].gradient, *node.inputs[2:])),
            ),
            "is updated from something else than itself and its own",
        ),
    ],
)
def test_a_parameter_is_updated_as_declared(edit: Edit, message: str):
    assert isinstance(program().update.parameters[0].update[3].op, AdamW)
    assert message in updated(edit)


def test_a_parameter_is_stored_once():
    assert "`m.wte` is stored 0 times" in updated(lambda node: (), Store)
    assert "`m.wte` is stored 2 times" in updated(lambda node: (node, node), Store)
    store = next(n for n in program().update.parameters[0].update if isinstance(n.op, Store))

    def of(value: Value) -> Edit:
        return lambda node: (evolve(node, inputs=(*node.inputs[:-1], value)),)

    assert "`master(m.wte)` is not the updated `m.wte`" in updated(of(store.inputs[0]), Store)
    part = next(n for n in program().update.parameters[0].update if isinstance(n.op, Part))
    assert "what an update wrote to is read after it" in updated(of(output(part)), AllGather)


def test_every_parameter_is_updated_and_no_other():
    update = program().update
    message = "not every parameter is updated once"
    assert any(message in each.message for each in certify(ended(parameters=update.parameters[1:])).problems)
    twice = (*update.parameters, update.parameters[0])
    assert not certify(ended(parameters=twice)).passed
    idle = (evolve(update.parameters[0], update=()), *update.parameters[1:])
    assert "`m.wte` is updated 0 times" in problem(ended(parameters=idle)).message


# ---------------------------------------------------------------- transfers


def test_messages_that_are_promised_are_posted():
    state = program()
    quiet = tuple(evolve(rank, instructions=()) for rank in state.program.ranks)
    found = problem(evolve(state, program=evolve(state.program, ranks=quiet)))
    assert f"{NAME} from stage 0 to stage 1 is never posted" in found.message
    alone = evolve(state.partitioned, messages=state.partitioned.messages[:1])
    other = certify(evolve(state, partitioned=alone)).problems
    assert "the list of messages is not that of the sends" in other[0].message
    assert "from stage 1 to stage 0 is posted on channel 1->0 backward" in other[1].message


def test_instructions_are_held_to_the_laws():
    state = program()
    ranks = [evolve(rank, instructions=rank.instructions[1:]) for rank in state.program.ranks]
    found = problem(evolve(state, program=evolve(state.program, ranks=tuple(ranks))))
    assert any("law" in note for note in found.notes)


def transferred(rank: int, **changes: object) -> str:
    """What is wrong with a program in which one rank has other records."""
    ranks = list(program().program.ranks)
    ranks[rank] = evolve(ranks[rank], **changes)
    return problem(evolve(program(), program=evolve(program().program, ranks=tuple(ranks)))).message


def test_totals_of_tied_parameters_reach_every_copy():
    first, second = program().program.ranks
    assert first.sends
    assert first.receives
    total = "the total of `m.wte` of stage 0, from rank 0 to rank 1, is"
    assert f"{total} not sent" in transferred(0, sends=())
    assert f"{total} not received" in transferred(1, receives=())
    assert f"{total} once too often sent" in transferred(0, sends=first.sends * 2)
    assert "has no end of channel" in transferred(0, sends=second.sends)


def test_a_stage_is_reduced_once_when_it_has_run():
    reductions = program().program.ranks[0].reductions
    assert "does not reduce each of its stages once" in transferred(0, reductions={})
    early = {0: next(iter(reductions.values()))}
    assert "does not reduce each of its stages once" in transferred(0, reductions=early)


def test_a_rank_gives_the_statistics_of_its_stages():
    assert "rank 0 does not give the statistics of its stages" in transferred(0, statistics=())


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
        {"update": evolve(state.update, statistics=((),))},
        {"partitioned": evolve(state.partitioned, stages=())},
        {"partitioned": evolve(state.partitioned, stages=state.partitioned.stages[::-1])},
        {"partitioned": evolve(state.partitioned, stages=state.partitioned.stages[:1])},
    ):
        assert not certify(evolve(state, **changes)).passed, changes
