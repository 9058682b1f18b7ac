"""Every defect of communication or of a layout shows: the certificate refuses it, and the program computes otherwise.

Mutants are those of the examples' shrunken copies, which can be run. A mutant of a layout changes no instruction: the
certificate alone must refuse it. One of communication must be refused and must fail when it is run, by other numbers,
a deadlock or an error, but for what `EQUIVALENT` lists: programs that compute the same, with the reason.

`make test` takes of every kind of mutant some, from all parts of the program; `make soak` takes all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

import pytest
import torch
from attrs import frozen
from hypothesis import HealthCheck, assume, event, given, note, settings
from hypothesis import strategies as st

from partita.compiler.graph import Node, Value
from partita.compiler.ops.collective import AllReduce, KeepOnFirst
from partita.compiler.ops.loss import ExpSum
from partita.compiler.ops.optimizer import Accumulate
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.reduce import Reduce
from partita.compiler.ops.shape import Expand
from partita.compiler.pipeline import compile_spec
from partita.compiler.verify.equivalence import validate
from partita.dsl.load import load
from partita.runtime.verification.experiment import Experiment, Figures, experiments, settled
from tests.compiler.verify.layout_mutants import layout_mutants
from tests.compiler.verify.mutants import Mutant, communication_mutants, executed, first_step, refused, some
from tests.files import SPECS, checked
from tests.marks import examples, soak
from tests.programs import Program, sharded_programs

CASES = {
    "mlp": ("mlp.par",),
    "tiny": ("tiny.par",),
    "llama": ("llama.par",),
    "llama zero1": ("llama.par", "layout=zero1"),
    "gpt": ("gpt.par",),
}


@cache
def experiment(name: str) -> tuple[Experiment, Figures]:
    """A shrunken example, and what one step of it computes as it is."""
    file, *overrides = CASES[name]
    spec, diagnostics = load(SPECS / file, overrides)
    assert spec is not None, diagnostics
    torch.set_num_threads(1)
    found = next(experiments(spec))
    assert validate(found.plan.training).passed
    return found, first_step(found, found.plan.training)


# ---------------------------------------------------------------- layouts


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "count"),
    [("mlp", 15), ("llama", 5), ("mlp", 40), ("llama", 20), ("llama zero1", 10), ("gpt", 5)],
)
def test_a_wrong_layout_is_refused(name: str, count: int):
    found, _ = experiment(name)
    mutants = some(layout_mutants(found.plan.training), count)
    assert len(mutants) == 2 * count  # of values, and of records
    escaped = [str(mutant) for mutant in mutants if not refused(mutant)]
    assert not escaped


# ---------------------------------------------------------------- communication


@frozen
class Equivalent:
    """Mutants that compute the same, and why."""

    reason: str
    holds: Callable[[Mutant], bool]

    def __str__(self) -> str:
        return self.reason


def again_the_same(mutant: Mutant) -> bool:
    op = mutant.instead
    return mutant.kind == "double" and (isinstance(op, KeepOnFirst) or (isinstance(op, AllReduce) and op.maximum))


def shifted_otherwise(mutant: Mutant) -> bool:
    summed = mutant.op == "all_reduce" and isinstance(mutant.instead, AllReduce) and not mutant.instead.maximum
    return summed and redirected(mutant) and any(isinstance(node.op, ExpSum) for node in readers(mutant, mutant.value))


def equal_everywhere(mutant: Mutant) -> bool:
    """Where nothing is gathered, a number is read in place of the parts, if it is known."""
    if not (mutant.op == "all_gather" and (redirected(mutant) or mutant.kind == "drop")):
        return False
    made = [node for node in mutant.nodes if source(mutant) in node.outputs]
    numbers = {value for node in mutant.nodes for value in node.outputs if node.op.literal is not None}
    return any(
        isinstance(node.op, Expand)
        and not node.inputs[0].type.axes
        and (mutant.kind == "redirect" or node.inputs[0] in numbers)
        for node in made
    )


def only_added(mutant: Mutant) -> bool:
    if not (mutant.op == "reduce_scatter" and redirected(mutant)):
        return False
    values = [mutant.value]
    for value in values:
        found = readers(mutant, value)
        if not found or not all(map(adds, found)):
            return False
        values += [result for node in found for result in node.outputs]
    return True


def adds(node: Node) -> bool:
    """Whether a node only adds up, or scales, towards the loss or a metric."""
    if isinstance(node.op, Accumulate):
        return node.op.target == "loss" or node.op.target.startswith("metric ")
    linear = isinstance(node.op, Pointwise) and node.op.function in ("add", "subtract", "multiply")
    return linear or (isinstance(node.op, Reduce) and node.op.function == "sum")


def redirected(mutant: Mutant) -> bool:
    """Whether another change of layout makes a result of the same type."""
    same = mutant.instead is not None and mutant.instead.infer(source(mutant).type)[0] == mutant.value.type
    return mutant.kind == "redirect" and same


def source(mutant: Mutant) -> Value:
    """The operand of the change of layout."""
    (node,) = (node for node in mutant.nodes if mutant.value in node.outputs)
    return node.inputs[node.outputs.index(mutant.value)]


def readers(mutant: Mutant, value: Value) -> list[Node]:
    return [node for node in mutant.nodes if value in node.inputs]


EQUIVALENT = (
    Equivalent("the maximum of what all ranks have alike is that; zeros off the first rank stay zeros", again_the_same),
    Equivalent("log-sum-exp is the same for any shift that all ranks share: a sum of maxima too", shifted_otherwise),
    Equivalent("the cotangent of a mean is equal everywhere: any parts, gathered, make the same", equal_everywhere),
    Equivalent("only the sum over all ranks is used: it is the same along whichever axis it begins", only_added),
)


def reasons(mutant: Mutant) -> list[str]:
    """Why a mutant computes the same; nothing for all that do not."""
    return [str(each) for each in EQUIVALENT if each.holds(mutant)]


def survey(name: str, mutants: Iterable[Mutant]) -> Counter[str]:
    """Certify and run each. How many there were, and how many of `EQUIVALENT`."""
    found, expected = experiment(name)
    counts: Counter[str] = Counter()
    for mutant in mutants:
        assert refused(mutant), f"{name}: {mutant} is certified"
        failure, why = executed(found, expected, mutant), reasons(mutant)
        assert failure or why, f"{name}: {mutant} computes the same, and nothing says why"
        assert not (failure and why), f"{name}: {mutant} fails by {failure}, though {why}"
        counts.update(["mutants", *why])
    return counts


@pytest.mark.soak
@pytest.mark.parametrize(("name", "count"), [("mlp", 5), ("tiny", 3), ("llama", 3), ("llama zero1", 2), ("gpt", 1)])
def test_wrong_communication_is_refused(name: str, count: int):
    found, _ = experiment(name)
    mutants = some(communication_mutants(found.plan.training), count)
    escaped = [str(mutant) for mutant in mutants if not refused(mutant)]
    assert not escaped


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "count"), [("mlp", 9), *soak(("tiny", 5), ("llama", 1), ("llama zero1", 2), ("gpt", 1))]
)
def test_wrong_communication_fails(name: str, count: int):
    found, _ = experiment(name)
    survey(name, some(communication_mutants(found.plan.training), count))


@pytest.mark.soak
def test_there_are_enough_of_them():
    counts: Counter[str] = Counter()
    for name in CASES:
        found, _ = experiment(name)
        mutants = list(communication_mutants(found.plan.training))
        assert {mutant.kind for mutant in mutants} == {"drop", "double", "redirect"}, name
        counts.update(["mutants"] * len(mutants) + [why for mutant in mutants for why in reasons(mutant)])
        if name in ("llama", "gpt"):
            ops = {mutant.op for mutant in mutants}
            assert ops >= {"all_gather", "reduce_scatter", "all_reduce", "part", "once", "send", "receive"}, name
    assert counts["mutants"] >= 3000
    assert all(counts[str(each)] for each in EQUIVALENT), "a reason for which there is no mutant"


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_every_mutant_is_caught(name: str):
    found, _ = experiment(name)
    counts = survey(name, communication_mutants(found.plan.training))
    layouts = 0
    for mutant in layout_mutants(found.plan.training):
        layouts += 1
        assert refused(mutant), f"{name}: {mutant} is certified"
    print(f"{name}: {layouts} mutants of layouts; of communication {dict(counts)}")


# ---------------------------------------------------------------- the examples as they are, and any program


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", *soak("gpt")])
def test_the_certificate_of_a_whole_file_refuses(name: str):
    """Of the file itself, with all its stages, chunks and layers, which is too large to be run here."""
    file, *overrides = CASES[name]
    spec, _ = load(SPECS / file, overrides)
    state = compile_spec(spec)
    for mutant in (*some(communication_mutants(state), 2), *some(layout_mutants(state), 20)):
        assert refused(mutant), mutant


def refused_or_the_same(program: Program, data: st.DataObject, count: int) -> None:
    """So many mutants of each sort are refused; one that is certified computes the same."""
    note(program.text)
    spec = checked(program.text, "random.par")
    state = compile_spec(spec)
    for sort in (communication_mutants, layout_mutants):
        mutants = list(sort(state))
        places = st.integers(0, len(mutants) - 1)
        for index in data.draw(st.lists(places, min_size=count, max_size=count)) if mutants else ():
            event(f"{sort.__name__}: {mutants[index].kind}")
            if not refused(mutants[index]):
                found = settled(spec)
                assume(found is not None)
                # The same mutant of the program as it is run, with a limit and a rate of its own.
                mutant = list(sort(found.plan.training))[index]
                expected = first_step(found, found.plan.training)
                assert executed(found, expected, mutant) is None, mutant


@given(program=sharded_programs(), data=st.data())
@examples(3, suppress_health_check=[HealthCheck.too_slow])
def test_mutants_of_any_program_are_refused_or_compute_the_same(program: Program, data: st.DataObject):
    refused_or_the_same(program, data, 3)


@pytest.mark.soak
@given(program=sharded_programs(), data=st.data())
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
def test_mutants_of_any_program_are_refused_or_compute_the_same_at_length(program: Program, data: st.DataObject):
    refused_or_the_same(program, data, 5)
