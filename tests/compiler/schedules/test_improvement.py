"""What improves orders: gap filling, the critical path, local search, and what all of it minimizes."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hypothesis import assume, event, given
from hypothesis import strategies as st

from partita.compiler.schedules.auto import auto
from partita.compiler.schedules.communication import default_messages
from partita.compiler.schedules.conditions import Conditions, Memory, prices
from partita.compiler.schedules.critical_path import critical_blocks
from partita.compiler.schedules.estimate import Estimate, codes, decoded
from partita.compiler.schedules.gap_filling import Allowance, GapFilling
from partita.compiler.schedules.improvement import Candidate, Improvement, plain
from partita.compiler.schedules.lower_bound import lower_bound
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import WEIGHT, Schedule, loop_placement, peak_live, v_placement
from partita.compiler.schedules.simulator import equal_costs
from partita.testing import assert_lawful, costs, named_schedules, schedules, shapes
from tests.files import GOLDEN
from tests.marks import examples, soak

ZERO_BUBBLE_V = json.loads((GOLDEN / "zero_bubble_v.json").read_text())["rows"]


def estimate_of(schedule: Schedule, given_costs, whole: bool = False) -> Estimate:
    conditions = Conditions(given_costs, default_messages(schedule.stages))
    return Estimate(schedule.placement, prices(conditions, schedule.placement), whole)


def plan_of(schedule: Schedule) -> list[tuple[int, ...]]:
    return [codes(each for each in line if each.kind != WEIGHT) for line in schedule.actions]


def lawful(schedule: Schedule, orders) -> Schedule:
    actions = tuple(map(decoded, orders))
    made = evolve(schedule, actions=actions, bound=tuple(map(peak_live, actions)), pairs=())
    assert_lawful(made)
    return made


def memory_for(schedule: Schedule, weight: float) -> Memory:
    each = (1.0,) * schedule.stages
    memory = Memory((), each, (weight,) * schedule.stages)
    limit = tuple(memory.peak(line, own) for line, own in zip(schedule.actions, schedule.placement, strict=True))
    return evolve(memory, limit=limit)


SPLIT = ("zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "auto")
parts = st.floats(0.0, 1.0)


@pytest.mark.soak
@examples(20)
@given(named_schedules(shapes(5, 2, 10), names=SPLIT), parts, st.data())
def test_filled_gaps_are_lawful_and_within_memory(schedule, weight, data):
    """Whatever the costs, the allowances, and the memory, from that of the plan with each W right after its B."""
    assume(plain([codes(line) for line in schedule.actions]))
    given_costs = data.draw(costs(schedule.stages))
    memory = memory_for(schedule, weight)
    allowance = Allowance(data.draw(st.tuples(*[st.floats(0.0, 20.0)] * schedule.ranks)), data.draw(parts))
    orders = GapFilling(estimate_of(schedule, given_costs), memory).orders(plan_of(schedule), allowance)
    assert orders is not None
    assert memory.fits(lawful(schedule, orders))


@pytest.mark.parametrize(
    ("idle", "part", "first", "second"),
    [
        (9.0, 0.0, "F0.0 F0.1 B0.0 B0.1 F0.2 W0.0 B0.2 W0.1 W0.2", "F0.0 B0.0 F0.1 B0.1 W0.0 F0.2 B0.2 W0.1 W0.2"),
        (0.0, 0.5, "F0.0 F0.1 B0.0 W0.0 B0.1 F0.2 W0.1 B0.2 W0.2", "F0.0 B0.0 F0.1 B0.1 W0.0 F0.2 B0.2 W0.1 W0.2"),
        (0.0, 0.0, "F0.0 F0.1 B0.0 W0.0 B0.1 F0.2 W0.1 B0.2 W0.2", "F0.0 B0.0 F0.1 B0.1 W0.0 W0.1 F0.2 B0.2 W0.2"),
    ],
)
def test_gap_filling_by_hand(idle, part, first, second):
    """F, B and W take 2, 1 and 3. Rank 0 ends its first B at 6, and the input of the next one comes at 8: it idles, if
    it may, or runs a W and sends its last F at 12 instead of 11. For that rank 1 waits from 8: a W fits, and of another
    one a third.
    """
    schedule = make("zb_h1", 2, 1, 3)
    filling = GapFilling(estimate_of(schedule, equal_costs(2.0, 1.0, 3.0)), Memory((9.0, 9.0), (1.0, 1.0), (0.5, 0.5)))
    forward, backward = 0, 1
    plan = [
        (forward, forward, backward, backward, forward, backward),
        (forward, backward, forward, backward, forward, backward),
    ]
    orders = filling.orders(plan, Allowance((idle,) * 2, part))
    assert str(lawful(schedule, orders)) == f"{first}\n{second}"


def test_filling_says_what_does_not_fit_or_deadlocks():
    schedule = make("zb_h1", 2, 1, 3)
    each = (1.0, 1.0)
    estimate = estimate_of(schedule, equal_costs())
    little, enough = (GapFilling(estimate, Memory((limit,) * 2, each, each)) for limit in (1.0, 2.0))
    plan, none = plan_of(schedule), Allowance((0.0, 0.0), 0.0)
    assert enough.orders(plan, none) is not None
    assert little.orders(plan, none) is None
    first, second = plan
    assert enough.orders([first, (second[1], second[0], *second[2:])], none) is None


@pytest.mark.soak
@examples(20)
@given(schedules(shapes(5, 3, 10)), st.booleans(), st.data())
def test_the_critical_path_accounts_for_the_time_that_counts(schedule, whole, data):
    """From the end of the rank whose time counts back to a start, actions and transfers add up to it."""
    estimate = estimate_of(schedule, data.draw(costs(schedule.stages)), whole)
    orders = [codes(line) for line in schedule.actions]
    blocks = critical_blocks(orders, estimate)
    value, *_ = estimate(orders)
    event(f"{min(len(blocks), 10)} blocks")
    seconds = sum(
        estimate.tables[block.rank][0][each]
        for block in blocks
        for each in orders[block.rank][block.first : block.last + 1]
    )
    for block in blocks[:-1]:
        seconds += estimate.tables[block.rank][2][orders[block.rank][block.first]]
    rank = blocks[0].rank
    first = orders[rank][0]
    assert blocks[0].last == len(orders[rank]) - 1
    assert blocks[-1].first == 0
    if whole:
        assert seconds == pytest.approx(value)
    else:
        assert seconds >= value * (1 - 1e-9)
        if schedule.placement[rank][first // 4] == 0:
            assert seconds == pytest.approx(value)


@examples(8)
@given(named_schedules(shapes(5, 2, 8), names=SPLIT), parts, st.booleans(), st.data())
def test_improved_orders_are_lawful_fit_and_cost_no_more(schedule, weight, whole, data):
    assume(plain([codes(line) for line in schedule.actions]))
    estimate = estimate_of(schedule, data.draw(costs(schedule.stages)), whole)
    memory = memory_for(schedule, weight)
    orders = [codes(line) for line in schedule.actions]
    least = lower_bound(schedule.placement, schedule.microbatches, estimate.prices, memory, whole)
    search = Improvement(estimate, memory, least)
    now = Candidate(estimate(orders), orders)
    for step in (search.filled, lambda each: search.planned(each, 20_000), lambda each: search.refined(each, 20_000)):
        found = step(now)
        assert found.value <= now.value
        assert found.value == estimate(found.orders)
        assert memory.fits(lawful(schedule, found.orders))
        now = found
    assert now.value[0] >= least * (1 - 1e-9)


def searched(minimize: str, ranks: int = 4, microbatches: int = 4) -> tuple[Schedule, float, float]:
    given_costs = equal_costs(2.0, 1.0, 3.0, 1.5)
    memory = Memory((2.0 * ranks,) * ranks, (1.0,) * (2 * ranks), (0.5,) * (2 * ranks))
    conditions = Conditions(given_costs, default_messages(2 * ranks), lambda placement: memory)
    schedule = auto(ranks, 2, microbatches, conditions, minimize)
    timeline = assert_lawful(schedule, given_costs)
    assert memory.fits(schedule)
    return schedule, timeline.cost, timeline.makespan


def test_the_file_says_what_is_minimized():
    """One objective for loops and Vs: each is better by its own than the other, where the two differ."""
    bubble, cost, makespan = searched("bubble")
    step, other, shorter = searched("step_time")
    assert cost < other
    assert shorter < makespan
    assert (bubble.search.cost, step.search.cost) == (cost, shorter)
    assert bubble.search.least <= cost
    assert step.search.least <= shorter


@pytest.mark.soak
def test_a_search_is_deterministic():
    assert searched("bubble")[0].actions == searched("bubble")[0].actions


rows = pytest.mark.parametrize(
    "row", [ZERO_BUBBLE_V[0], *soak(*ZERO_BUBBLE_V[1:])], ids=lambda row: f"{row['stages']}-{row['microbatches']}"
)


@pytest.mark.soak
@rows
def test_auto_is_no_worse_than_the_published_zb_v(row):
    ranks, microbatches = row["stages"], row["microbatches"]
    given_costs = equal_costs(*(row[key] for key in ("T_F", "T_B", "T_W", "T_comm")))
    memory = Memory((2.0 * ranks,) * ranks, (1.0,) * (2 * ranks), (0.5,) * (2 * ranks))
    conditions = Conditions(given_costs, default_messages(2 * ranks), lambda placement: memory)
    schedule = make("auto", ranks, 2, microbatches, conditions=conditions)
    assert memory.fits(schedule)
    timeline = assert_lawful(schedule, given_costs)
    assert round(timeline.bubble, 4) <= row["bubble"]["zb_v"]
    assert schedule.placement in (v_placement(ranks), loop_placement(ranks, 2))


@pytest.mark.few(1)
@rows
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_h2"])
def test_published_bubbles_beside_zb_v(row, name):
    """A rank has all its layers in one stage: twice F, B and W."""
    given_costs = equal_costs(*(2 * row[key] for key in ("T_F", "T_B", "T_W")), row["T_comm"])
    timeline = assert_lawful(make(name, row["stages"], 1, row["microbatches"]), given_costs)
    assert round(timeline.bubble, 4) == row["bubble"][name]
