"""The certificate: messages between stages, and what ranks and the runtime are told."""

from __future__ import annotations

import pytest
from attrs import evolve

from partita.compiler.graph import Node, Phase
from partita.compiler.layout import REPLICATED, SUM, layout_of
from partita.compiler.ops.communication import Receive, Send
from partita.compiler.pipeline import compile_spec
from partita.compiler.streams import launches_of
from partita.compiler.verify.equivalence import validate
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.load import load
from tests.compiler.verify.broken import FILE, Edit, compiled, output, problem, program
from tests.compiler.verify.changes import Place, places
from tests.compiler.verify.record_mutants import others
from tests.files import ROOT
from tests.marks import soak

FILES = ROOT / "tests" / "planted" / "files"

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


# ---------------------------------------------------------------- transfers


def test_messages_that_are_promised_are_posted():
    state = program()
    quiet = tuple(evolve(rank, instructions=(), launches=()) for rank in state.program.ranks)
    found = problem(evolve(state, program=evolve(state.program, ranks=quiet)))
    assert f"{NAME} from stage 0 to stage 1 is never posted" in found.message
    alone = evolve(state.partitioned, messages=state.partitioned.messages[:1])
    other = validate(evolve(state, partitioned=alone)).problems
    assert "the list of messages is not that of the sends" in other[0].message
    assert "from stage 1 to stage 0 is posted on channel 1->0 backward" in other[1].message


def test_instructions_are_held_to_the_laws():
    state = program()
    later = [(rank, rank.instructions[1:]) for rank in state.program.ranks]
    ranks = [evolve(rank, instructions=each, launches=launches_of(each)) for rank, each in later]
    found = problem(evolve(state, program=evolve(state.program, ranks=tuple(ranks))))
    assert any("invariant" in note for note in found.notes)


def test_launches_are_held_to_the_laws():
    """A send that does not wait for what makes what is sent."""
    state = program()
    ranks = [evolve(rank, launches=[evolve(each, after=()) for each in rank.launches]) for rank in state.program.ranks]
    found = problem(evolve(state, program=evolve(state.program, ranks=tuple(ranks))))
    assert "before what computes ahead of it has ended" in found.message


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
    assert f"{total} redundantly sent" in transferred(0, sends=first.sends * 2)
    assert "has no end of channel" in transferred(0, sends=second.sends)


def test_a_stage_is_reduced_once_when_it_has_run():
    reductions = program().program.ranks[0].reductions
    assert "does not reduce each of its stages once" in transferred(0, reductions={})
    early = {0: next(iter(reductions.values()))}
    assert "does not reduce each of its stages once" in transferred(0, reductions=early)


def test_a_rank_gives_the_statistics_of_its_stages():
    assert "rank 0 does not give the statistics of its stages" in transferred(0, step_metrics=())


def test_stages_of_one_rank_hand_over_what_they_would_send():
    state = compiled(FILE.replace("one_f_one_b(", "zb_v("))
    assert validate(state).passed
    giving = next(stage for stage in state.program.stages if stage.local_transfers)
    for local_transfers in ((), giving.local_transfers * 2):
        stages = list(state.program.stages)
        stages[giving.index] = evolve(giving, local_transfers=local_transfers)
        found = problem(evolve(state, program=evolve(state.program, stages=tuple(stages))))
        assert f"stage {giving.index} does not transfer to stage" in found.message


# ---------------------------------------------------------------- records


def recorded(stage: int | None = None, **changes: object) -> Diagnostic:
    """What is wrong with a program with another record of its first parameter, or of a stage."""
    records = program().program
    if stage is None:
        first, *others = records.parameters
        return problem(evolve(program(), program=evolve(records, parameters=(evolve(first, **changes), *others))))
    stages = list(records.stages)
    stages[stage] = evolve(stages[stage], **changes)
    return problem(evolve(program(), program=evolve(records, stages=tuple(stages))))


def test_the_runtime_is_told_how_parameters_are_stored():
    found = recorded(layout=REPLICATED)
    assert "`m.wte` is stored as replicated, not embed/data vocab/tensor" in found.message
    assert found.span.line == 9
    assert (
        "the optimizer's state of `m.wte` is stored as replicated, not embed"
        in recorded(state_layout=REPLICATED).message
    )
    assert "is on stages (0, 1), not (0,)" in recorded(stages=(0,)).message
    assert "has the optimizer's mean, square" in recorded(states=()).message
    assert "is another parameter than declared" in recorded(fans=(1, 1)).message


def test_no_parameter_is_stored_as_parts_of_a_sum():
    state = program()
    own = state.sharded.parameters["m.wte"]
    partial = evolve(own, grad=layout_of((("data", SUM), ("tensor", "vocab"))))
    sharded = evolve(state.sharded, parameters={**state.sharded.parameters, "m.wte": partial})
    updates = tuple(evolve(each, layouts=partial) if each.layouts is own else each for each in state.update.parameters)
    found = problem(evolve(state, sharded=sharded, update=evolve(state.update, parameters=updates)))
    assert "`m.wte` is said to be stored as parts of a sum" in found.message


def test_the_runtime_is_told_what_a_stage_has():
    inputs = program().program.stages[0].inputs
    assert "other parts of the inputs" in recorded(0, inputs=(evolve(inputs[0], layout=REPLICATED),)).message
    assert "other parts of the inputs" in recorded(0, inputs=()).message
    assert "the stage has other parameters" in recorded(0, parameters=()).message
    assert "the stage has other accumulators" in recorded(0, accumulators=()).message
    fewer = evolve(program().program, parameters=program().program.parameters[1:])
    assert "the program has other parameters" in problem(evolve(program(), program=fewer)).message


RECORDED = [
    "vocabulary train.sync=paired()",
    "offload train.ema=none train.precision=bf16 train.sync=paired()",
    *soak("groups", "groups layout=host", "offload", "tables", "rules", "buffers"),
    *soak("vocabulary", "vocabulary train.sync=delayed(1)", "tied train.sync=delayed(2)"),
]


@pytest.mark.parametrize("case", RECORDED)
def test_no_record_can_say_anything_else(case: str):
    """Of parameters, what is kept of them, and what stages add up."""
    name, *overrides = case.split()
    spec, _ = load(FILES / f"{name}.par", overrides)
    assert spec is not None
    state = compile_spec(spec)
    assert validate(state).passed
    program = state.program
    wrong = [(what, {"parameters": new}) for what, new in others(program.parameters)]
    for i, stage in enumerate(program.stages):
        for what, new in others(stage.accumulators):
            stages = (*program.stages[:i], evolve(stage, accumulators=new), *program.stages[i + 1 :])
            wrong.append((what, {"stages": stages}))
    wrong += [(field, {field: getattr(program, field) + 1}) for field in ("slices", "delay", "replicas_per_rank")]
    wrong.append(("paired", {"paired": not program.paired}))
    passed = [what for what, each in wrong if validate(evolve(state, program=evolve(program, **each))).passed]
    assert passed == []
