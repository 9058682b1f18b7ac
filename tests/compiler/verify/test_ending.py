"""The certificate: gradients, statistics and updates at the end of a step."""

from __future__ import annotations

from functools import cache

import pytest
from attrs import evolve

from partita.compiler.graph import Value
from partita.compiler.layout import REPLICATED
from partita.compiler.ops.collective import AllGather, Part
from partita.compiler.ops.optimizer import Ema, Store, Update
from partita.compiler.ops.pointwise import Constant
from partita.compiler.optimizers.adamw import AdamW
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.compiler.verify.equivalence import validate
from tests.compiler.verify.broken import FILE, Edit, compiled, gathering, output, problem, program
from tests.compiler.verify.changes import Place, places
from tests.compiler.verify.layout_mutants import kept_mutants
from tests.compiler.verify.mutants import Mutant, some
from tests.compiler.verify.node_mutants import node_mutants
from tests.compiler.verify.record_mutants import others
from tests.files import ROOT, checked
from tests.marks import soak

FILES = ROOT / "tests" / "planted" / "files"

# ---------------------------------------------------------------- any node

# Programs, and how many mutants there are at least: of groups that train apart, tied parameters, shared work on whole
# matrices and means, buffers, flat parameters, states and parameters in the host's memory, and tables.
PROGRAMS = {
    "groups": 170,
    "groups cluster.data=2": 170,  # two on each rank
    "groups layout=host": 250,
    "groups layout=host cluster.data=2 train.precision=bf16": 220,
    "tied": 190,
    "rules": 1000,
    "buffers": 550,
    "flat": 160,
    "offload": 210,
    "parameters": 170,
    "tables": 60,
}
USUAL = ("groups cluster.data=2", "groups layout=host cluster.data=2 train.precision=bf16", "offload")


@cache
def compiled_file(case: str) -> Compilation:
    name, *overrides = case.split()
    state = compile_spec(checked((FILES / f"{name}.par").read_text(encoding="utf-8"), f"{name}.par", overrides))
    assert validate(state).passed
    return state


@cache
def mutants(name: str) -> list[Mutant]:
    return list(node_mutants(compiled_file(name)))


def landed(mutant: Mutant) -> bool:
    """A copy that has landed is read under the name that it had on its way."""
    arrives = (node for node in mutant.nodes[1:] if node.op.name == "land" and mutant.value is node.inputs[0])
    return any(node.output in mutant.nodes[0].inputs for node in arrives)


@pytest.mark.parametrize("name", [*USUAL, *soak(*(each for each in PROGRAMS if each not in USUAL))])
@pytest.mark.parametrize("of_each", [2, *soak(2000)])
def test_no_node_can_be_left_out_or_done_again_or_read_something_else(name: str, of_each: int):
    assert len(mutants(name)) >= PROGRAMS[name]
    escaped = [mutant for mutant in some(mutants(name), of_each) if validate(mutant.build()).passed]
    assert [str(mutant) for mutant in escaped if not landed(mutant)] == []


# Those of which each kind of what is kept has few.
SMALL = [
    *soak("rules", "buffers", "tied", "groups layout=host"),
    *("groups cluster.data=2", "flat", "offload", "parameters", "tables"),
    "groups layout=host cluster.data=2 train.precision=bf16",
]


@pytest.mark.few(2)
@pytest.mark.parametrize("of_each", [20, *soak(200)])
@pytest.mark.parametrize("name", SMALL)
def test_nothing_that_is_kept_can_lie_otherwise(name: str, of_each: int):
    """Nor in the other memory."""
    state = compiled_file(name)
    escaped = [str(mutant) for mutant in some(kept_mutants(state), of_each) if validate(mutant.build()).passed]
    update = state.update
    kept = [value for each in update.parameters for value in (each.master, *each.states, each.gradient)]
    kept += [value for each in update.outer for value in (*each.masters, *each.states)]
    end = Place(state, "the end of the step", ())
    for value in kept:
        elsewhere = end.changed({value: evolve(value, host=not value.host)}, made=True)
        escaped += [value.name] * validate(elsewhere).passed
    assert escaped == []


@pytest.mark.few(1)
@pytest.mark.parametrize("distance", [4, *soak(1)])
@pytest.mark.parametrize("name", SMALL)
def test_no_record_of_an_update_can_say_anything_else(name: str, distance: int):
    """`make test` tries each fourth."""
    state = compiled_file(name)
    kinds = ("parameters", "buffers", "stacked", "outer", "masters")
    wrong = [(kind, what, new) for kind in kinds for what, new in others(getattr(state.update, kind))]
    escaped = [
        what
        for kind, what, new in wrong[::distance]
        if validate(evolve(state, update=evolve(state.update, **{kind: new}))).passed
    ]
    assert escaped == []


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

    (*_, first), (*_, second) = tied.totals
    assert "is not the sum of all totals" in changed(gradient=first, finish=())
    (added,) = tied.finish
    reversed_ = evolve(added, inputs=(second, first))
    assert "is not the sum of all totals" in changed(finish=(reversed_,))
    assert "the totals are not those of all stages that make any" in changed(totals=tied.totals[:1])
    assert "is not updated on the stages that have it" in changed(stages=(0,))


def test_each_entry_of_the_statistics_counts_once():
    update = program().update
    loss, accuracy, *squares = update.step_metrics
    message = "the entries are not loss, accuracy, square 0, square 1"
    assert message in problem(ended(step_metrics=(loss, *squares))).message
    assert message in problem(ended(step_metrics=(accuracy, loss, *squares))).message
    mixed = (loss, ("accuracy", *loss[1:]), *squares)
    assert "is not the `accuracy` of the single-device program" in problem(ended(step_metrics=mixed)).message
    (name, value, stage), *rest = squares
    # The squares of the first stage, but for the last one that is added.
    place = next(p for p in places(program()) if p.name == "the squares of stage 0")
    last = place.nodes[-1]
    assert last.outputs == (value,)
    fewer = ended(step_metrics=(loss, accuracy, (name, last.inputs[0], stage), *rest))
    assert "does not add the square of each gradient once" in problem(fewer).message
    twice = place.changed({}, {last: (evolve(last, inputs=(last.inputs[0], last.inputs[0])),)})
    assert "does not add the square of each gradient once" in problem(twice).message
    whole = place.changed({value: evolve(value, layout=REPLICATED)}, made=True)
    assert not validate(whole).passed


def test_an_entry_that_every_rank_has_would_count_many_times():
    """Without `once`, a loss that is whole on every rank would be added up over them."""
    state = compiled(FILE.replace("  metric", "+ mean(wte * wte)\n  metric"))
    assert validate(state).passed
    place = next(place for place in places(state) if place.name == "the metrics")
    once = next(node for node in place.nodes if node.op.name == "once")
    found = problem(place.changed({once.outputs[0]: once.inputs[0]}, {once: ()}))
    assert "no sharding rule of" in found.message or "counts once if it is parts of a sum" in found.message


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
    assert validate(clipped).passed
    lent = evolve(clipped, update=evolve(clipped.update, clip=update.clip, norms=update.norms))
    assert not validate(lent).passed


# ---------------------------------------------------------------- updates


def updated(edit: Edit, kind: type = Update) -> str:
    """What is wrong with a program with another update of its first parameter."""
    place = next(p for p in places(gathering()) if p.name == "the update of m.wte")
    node = next(n for n in place.nodes if isinstance(n.op, kind))
    return problem(place.changed({}, {node: edit(node)})).message


def unclipped() -> Value:
    return gathering().update.parameters[0].gradient


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda node: (), "`new(m.wte)` is not available"),
        (lambda node: (evolve(node, op=evolve(node.op, beta1=0.8)),), "is not updated as the optimizer is declared"),
        (lambda node: (evolve(node, op=evolve(node.op, decay=0.5)),), "is not updated as the optimizer is declared"),
        (
            lambda node: (evolve(node, inputs=(*node.inputs[:2], *reversed(node.inputs[2:]))),),
            "is updated from something else than itself and its own",
        ),
        (
            lambda node: (
                evolve(node, inputs=(node.inputs[0], gathering().update.parameters[0].gradient, *node.inputs[2:])),
            ),
            "is updated from something else than itself and its own",
        ),
    ],
)
def test_a_parameter_is_updated_as_declared(edit: Edit, message: str):
    assert isinstance(gathering().update.parameters[0].update[3].op, AdamW)
    assert message in updated(edit)


def test_a_parameter_is_stored_once():
    assert "`m.wte` is stored 0 times" in updated(lambda node: (), Store)
    assert "`m.wte` is stored 2 times" in updated(lambda node: (node, node), Store)
    store = next(n for n in gathering().update.parameters[0].update if isinstance(n.op, Store))

    def of(value: Value) -> Edit:
        return lambda node: (evolve(node, inputs=(*node.inputs[:-1], value)),)

    assert "`master(m.wte)` is not the updated `m.wte`" in updated(of(store.inputs[0]), Store)
    part = next(n for n in gathering().update.parameters[0].update if isinstance(n.op, Part))
    assert "what an update wrote to is read after it" in updated(of(output(part)), AllGather)


@cache
def averaged() -> Compilation:
    """A program that keeps means of its parameters."""
    return compiled(FILE.replace(" clip = 1.0", " ema = 0.9"))


def of_means(edit: Edit) -> str:
    """What is wrong with a program that updates the mean of its first parameter in another way."""
    place = next(p for p in places(averaged()) if p.name == "the update of m.wte")
    node = next(n for n in place.nodes if isinstance(n.op, Ema))
    return problem(place.changed({}, {node: edit(node)})).message


def test_the_mean_of_a_parameter_follows_it_once_as_declared():
    assert validate(averaged()).passed
    assert "the mean of `m.wte` is updated 0 times" in of_means(lambda node: ())
    twice = of_means(lambda node: (node, evolve(node, outputs=(evolve(output(node), name="again"),))))
    assert "the mean of `m.wte` is updated 2 times" in twice
    behind = of_means(
        lambda node: (
            node,
            evolve(node, inputs=(output(node), node.inputs[1]), outputs=(evolve(output(node), name="again"),)),
        )
    )
    assert "is read after it is updated" in behind
    slower = of_means(lambda node: (evolve(node, op=Ema(0.99)),))
    assert "is not updated as declared" in slower
    turned = of_means(lambda node: (evolve(node, inputs=node.inputs[::-1]),))
    assert "the mean of `m.wte` is updated in a copy" in turned
    old = next(n for n in averaged().update.parameters[0].update if isinstance(n.op, Update)).inputs[0]
    before = of_means(lambda node: (evolve(node, inputs=(node.inputs[0], old)),))
    assert "what an update wrote to is read after it" in before


def test_a_mean_is_kept_if_it_is_declared_and_read_where_it_lies():
    state = averaged()
    train = evolve(state.train, ema=None)
    assert "`m.wte` has states mean, square" in problem(evolve(state, train=train)).message
    first = state.update.parameters[0]
    moved = evolve(first, states=(*first.states[:-1], evolve(first.states[-1], layout=REPLICATED)))
    others = (moved, *state.update.parameters[1:])
    assert "is not stored as" in problem(evolve(state, update=evolve(state.update, parameters=others))).message
    records = [
        evolve(each, states=tuple(evolve(s, copy=False) for s in each.states)) for each in state.program.parameters
    ]
    zeros = evolve(state, program=evolve(state.program, parameters=tuple(records)))
    assert "begins as something else" in problem(zeros).message


def test_every_parameter_is_updated_and_no_other():
    update = program().update
    message = "not every trained parameter is updated once"
    assert any(message in each.message for each in validate(ended(parameters=update.parameters[1:])).problems)
    twice = (*update.parameters, update.parameters[0])
    assert not validate(ended(parameters=twice)).passed
    idle = (evolve(update.parameters[0], update=()), *update.parameters[1:])
    assert "`m.wte` is updated 0 times" in problem(ended(parameters=idle)).message
