"""Copies to the host's memory in schedules: where O and L stand, what they cost, and what of it must hold."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import HealthCheck, assume, event, given
from hypothesis import strategies as st

from partita.compiler.instructions import Compute, PostCopy, WaitCopy
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.forms import json_form, read, text, torch_csv
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.offload import copied, with_copies, without_copies
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import COPIES, LOAD, OFFLOAD, Action, peak_live
from partita.compiler.schedules.simulator import equal_costs, simulate
from partita.dsl.diagnostic import Refused
from partita.dsl.syntax.source import Source
from partita.testing import (
    assert_lawful,
    copied_schedules,
    mutants,
    named_schedules,
    schedules,
    shapes,
    shared_schedules,
)
from tests.marks import examples

small = shapes(4, 2, 6, max_slices=2)
orders = schedules(small) | shared_schedules(shapes(3, 2, 5))
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@given(copied_schedules(orders))
def test_copies_are_lawful_and_delay_nothing(given_):
    """Their order takes as long as without them, though those of a rank in one direction wait for each other."""
    schedule, found, costs = given_
    before, after = assert_lawful(schedule, costs), assert_lawful(found, costs)
    assert after.makespan == pytest.approx(before.makespan)
    event(f"copies: {found.copies}")
    for rank, line in enumerate(after.copies):
        for kind in COPIES:
            own = [interval for interval in line if interval.work.kind == kind]
            assert all(one.end <= other.start + 1e-9 for one, other in pairwise(own))
        assert sorted(str(each.work) for each in line) == sorted(
            str(each) for each in found.actions[rank] if each.kind in COPIES
        )


@examples(20)
@given(copied_schedules(orders))
def test_without_its_copies_a_schedule_is_what_it_was(given_):
    schedule, found, _ = given_
    plain, places = without_copies(found)
    assert (plain.actions, plain.pairs) == (schedule.actions, schedule.pairs)
    assert plain.placement == schedule.placement
    counts = Counter(each.kind for each in (a for line in found.actions for a in line) if each.kind in COPIES)
    assert counts[OFFLOAD] == counts[LOAD] == sum(map(len, map(copied, found.actions)))
    assert sum(len(each) for line in places for each in line.values()) == counts.total()
    timeline = simulate(communicate(plain, ()), equal_costs())
    assert not found.copies or with_copies(found, {0: 1.0}, timeline) is found


@examples(20)
@given(copied_schedules(orders))
def test_no_rank_keeps_more_than_before(given_):
    schedule, found, _ = given_
    for before, after, bound in zip(schedule.actions, found.actions, found.bound, strict=True):
        assert peak_live(after) <= min(bound, peak_live(before))


@examples(20)
@given(copied_schedules(orders))
def test_instructions_copy_what_the_schedule_says(given_):
    """In each program a copy out runs from F to O, and one back from L to the backward pass."""
    _, found, _ = given_
    programs = communicate(found, default_messages(found.stages if found.spread is None else found.spread.stages))
    for rank, program in enumerate(programs):
        stages = found.placement[rank]
        seen = [
            (type(each).__name__, each.action)
            for each in program
            if isinstance(each, Compute)
            or (isinstance(each, WaitCopy) and each.action.kind == OFFLOAD)
            or (isinstance(each, PostCopy) and each.action.kind == LOAD)
        ]
        assert [action for _, action in seen] == list(found.actions[rank])
        for before, each in pairwise(program):
            if isinstance(each, (PostCopy, WaitCopy)):
                assert each.stage == stages[each.action.chunk]
            if isinstance(before, WaitCopy) and before.action.kind == LOAD:
                assert isinstance(each, (Compute, WaitCopy)) or type(each).__name__ == "WaitReceive"


@examples(20)
@given(copied_schedules(orders), st.data())
def test_every_form_that_can_say_copies_reads_them_back(given_, data):
    schedule, found, _ = given_
    assume(found.ascending)
    for written, name in ((text.write(found), "o.sched"), (None, "o.json")):
        if written is None:
            written = json.dumps(json_form.as_json(found))
        again = read(Source(name, written))
        assert (again.actions, again.placement, again.pairs) == (found.actions, found.placement, found.pairs)
    if found.slices == 1 and found.spread is None:
        assert torch_csv.write(found) == torch_csv.write(schedule)


@pytest.mark.soak
@examples(60, suppress_health_check=SLOW)
@given(st.data())
def test_a_mistake_is_found_or_makes_no_difference(data):
    """A schedule with copies in which one action is changed is refused, or copies each microbatch once and in time."""
    _, schedule, _ = data.draw(copied_schedules(schedules(shapes(3, 2, 4))).filter(lambda each: each[1].copies))
    _, changed, mistake = data.draw(mutants(st.just(schedule)))
    try:
        assert_lawful(changed)
    except Refused as refused:
        event(str({each.code for each in refused.diagnostics}))
        return
    event("lawful")
    for rank, actions in enumerate(changed.actions):
        at = {each: i for i, each in enumerate(actions)}
        assert len(at) == len(actions), mistake
        for pair in copied(actions):
            there = [at[Action(kind, *pair)] for kind in ("F", OFFLOAD, LOAD)]
            backward = at.get(Action("B", *pair), at.get(Action("BW", *pair)))
            assert there == sorted(there), (mistake, rank)
            assert there[-1] < backward, (mistake, rank)


def one(order: str):
    """A schedule of one rank in this order."""
    return read(Source("one.sched", order))


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("O0.0 F0.0 L0.0 BW0.0", "runs O0.0 before F0.0"),
        ("F0.0 L0.0 O0.0 BW0.0", "runs L0.0 before O0.0"),
        ("F0.0 O0.0 BW0.0 L0.0", "runs BW0.0 before L0.0"),
        ("F0.0 O0.0 BW0.0", "runs BW0.0 before L0.0"),
        ("F0.0 L0.0 BW0.0", "runs L0.0 before O0.0"),
        ("F0.0 O0.0 O0.0 L0.0 BW0.0", "runs O0.0 2 times"),
        ("F0.0 O0.0 L0.0 L0.0 B0.0 W0.0", "runs L0.0 2 times"),
    ],
)
def test_orders_that_copy_wrongly_are_refused(order: str, said: str):
    with pytest.raises(Refused, match=said.replace(".", r"\.")):
        check_schedule(one(order))


def test_instructions_that_copy_wrongly_are_refused():
    """Each copy is started and awaited once, and in this order."""
    (program,) = communicate(one("F0.0 F0.1 O0.0 L0.0 BW0.0 BW0.1"), ())
    check_program([program])
    positions = [i for i, each in enumerate(program) if isinstance(each, (PostCopy, WaitCopy))]
    assert len(positions) == 4
    for i in positions:
        with pytest.raises(Refused, match="E0501"):
            check_program([(*program[:i], *program[i + 1 :])])
        with pytest.raises(Refused, match="E0501"):
            check_program([(*program[:i], program[i], *program[i:])])
    for i in range(len(program) - 1):
        if {i, i + 1} & set(positions) and program[i].action.microbatch == program[i + 1].action.microbatch:
            with pytest.raises(Refused, match="E0501"):
                check_program([(*program[:i], program[i + 1], program[i], *program[i + 2 :])])


@pytest.mark.soak
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_a_rank_keeps_two_microbatches_if_a_copy_takes_no_longer_than_a_forward(name: str):
    """One that leaves or comes beside the one that is computed with, however long the pipeline. The last rank of 1F1B
    copies none, and that of GPipe has one more at the turn.
    """
    for ranks in (4, 8, 12):
        schedule = make(name, ranks, 1, 3 * ranks)
        costs = evolve(equal_costs(), copy=lambda stage: 1.0)
        timeline = simulate(communicate(schedule, default_messages(ranks)), costs)
        found = with_copies(schedule, dict.fromkeys(range(ranks), 1.0), timeline)
        assert set(map(peak_live, found.actions[:-1])) == {2}
        assert peak_live(found.actions[-1]) == (1 if name == "one_f_one_b" else 3)
        assert (not copied(found.actions[-1])) == (name == "one_f_one_b")
        after = assert_lawful(found, costs)
        assert after.makespan == timeline.makespan
        assert all(map(int.__le__, after.peak_live, map(peak_live, found.actions)))


@examples(20)
@given(named_schedules(shapes(4, 2, 6)))
def test_what_takes_longer_than_the_step_is_not_copied(schedule):
    timeline = simulate(communicate(schedule, default_messages(schedule.stages)), equal_costs())
    assert with_copies(schedule, {0: timeline.makespan + 1}, timeline) is schedule
