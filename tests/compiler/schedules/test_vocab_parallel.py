"""Schedules of pipelines whose ranks share the vocabulary: every schedule with the passes over its parts."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.generator import SCHEDULES
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import FORWARD, Action, Schedule, SharedVocabulary, peak_live
from partita.compiler.schedules.simulator import equal_costs, simulate
from partita.compiler.schedules.vocab_parallel import _Insertion, part_messages, with_spread
from partita.dsl.diagnostic import Refused
from partita.testing import assert_lawful, costs, shared_schedules
from partita.testing.strategies import FIXED, named_schedules, shapes
from tests.marks import examples


def shared(schedule: Schedule, inputs: bool = True, outputs: bool = True) -> Schedule:
    spread = SharedVocabulary(schedule.ranks, schedule.stages, inputs, outputs)
    return with_spread(schedule, spread, equal_costs().action)


def instructions(schedule: Schedule) -> tuple:
    assert schedule.spread is not None
    messages = default_messages(schedule.spread.stages, schedule.training)
    return communicate(schedule, (*messages, *part_messages(schedule.spread, schedule.training)))


@examples(20)
@given(named_schedules(shapes(5, 3, 9)), st.booleans(), st.booleans())
def test_invariants_hold_for_every_schedule(schedule, inputs, outputs):
    found = shared(schedule, inputs, outputs)
    check_schedule(found)
    check_program(instructions(found))
    # What was there keeps its order, forwards and backwards each by themselves, on every rank.
    for before, after, stages in zip(schedule.actions, found.actions, schedule.placement, strict=True):
        own = [each for each in after if each.chunk < len(stages)]
        for forward in (True, False):
            assert [a for a in own if (a.kind == FORWARD) is forward] == [
                a for a in before if (a.kind == FORWARD) is forward
            ]


@examples(15)
@given(shared_schedules(shapes(5, 3, 9)), st.data())
def test_they_keep_all_laws_at_any_costs(schedule, data):
    assert_lawful(schedule, data.draw(costs(schedule.stages)))


@pytest.mark.soak
@pytest.mark.parametrize("name", FIXED)
def test_they_keep_all_laws_in_every_small_shape(name):
    generator = SCHEDULES[name]
    for ranks, microbatches in product(range(1, 5), range(1, 7)):
        for chunks in [generator.chunks] if generator.chunks else (1, 2):
            schedule = make(name, ranks, chunks, microbatches)
            for inputs, outputs in ((False, True), (True, False), (True, True)):
                spread = SharedVocabulary(ranks, schedule.stages, inputs, outputs)
                assert_lawful(generator.shared(schedule, spread, equal_costs(2.0, 2.0, 2.0).action))


def test_two_more_microbatches_are_in_flight():
    """Yeung et al. (arXiv 2411.05288 §4): the first algorithm keeps P + 2 on the first rank, instead of P."""
    found = shared(make("one_f_one_b", 4, 1, 12), inputs=False)
    own = [[each for each in line if each.chunk == 0] for line in found.actions]
    assert [peak_live(line) for line in own] == [6, 5, 4, 3]


def test_nobody_waits_in_the_steady_state():
    """The bubble is that of filling and draining: it does not grow with the number of microbatches."""

    def lost(microbatches: int) -> float:
        found = shared(make("one_f_one_b", 4, 1, microbatches), inputs=False)
        timeline = simulate(instructions(found), equal_costs(1, 1, 1))
        return timeline.makespan - max(timeline.busy)

    assert lost(40) == pytest.approx(lost(24))


def test_the_interlaced_order():
    """S and T of a microbatch follow each other on every rank, and half as many again as in 1F1B are in flight."""
    schedule = make("interlaced", 4, 1, 12)
    found = SCHEDULES["interlaced"].shared(schedule, SharedVocabulary(4, 4, outputs=True), equal_costs().action)
    check_schedule(found)
    check_program(instructions(found))
    assert [peak_live(line) for line in schedule.actions] == [6, 5, 4, 3]
    for rank, line in enumerate(found.actions):
        names = [found.passes(rank, each) for each in line]
        own = [name for name in names if name in ("", "S", "T")]
        assert all(after == "T" for name, after in pairwise(own) if name == "S")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda line: line[::-1], "runs BW1.7 before"),
        (lambda line: [each for each in line if each != Action(FORWARD, 1, 3)], "never runs F1.3"),
        (lambda line: [*line, Action(FORWARD, 1, 7)], "runs F1.7 2 times"),
    ],
)
def test_wrong_orders_are_refused(broken, words):
    found = shared(make("one_f_one_b", 2, 1, 8), inputs=False)
    wrong = evolve(found, actions=(tuple(broken(found.actions[0])), found.actions[1]))
    with pytest.raises(Refused, match=words):
        check_schedule(wrong)


def test_a_rank_that_runs_its_part_late_is_a_deadlock():
    """S of one rank behind the backward that waits for it: the cycle is reported."""
    found = shared(make("one_f_one_b", 2, 1, 4), inputs=False)
    late = [each for each in found.actions[0] if each != Action(FORWARD, 1, 0)]
    late.insert(late.index(next(a for a in late if a.chunk == 1)), Action(FORWARD, 1, 0))
    late = [each for each in late if each.chunk == 0] + [each for each in late if each.chunk == 1]
    with pytest.raises(Refused, match="wait for each other"):
        check_program(instructions(evolve(found, actions=(tuple(late), found.actions[1]))))


def test_many_microbatches_take_as_long_each_as_few(monkeypatch):
    """Each action is looked at a few times, however many others are there: not as often as others are run."""
    looked = []
    ready = _Insertion._ready
    monkeypatch.setattr(_Insertion, "_ready", lambda self, *given: looked.append(given) or ready(self, *given))
    counts = []
    for microbatches in (16, 128):
        looked.clear()
        shared(make("one_f_one_b", 4, 1, microbatches))
        counts.append(len(looked) / microbatches)
    assert counts[1] <= 1.2 * counts[0]
