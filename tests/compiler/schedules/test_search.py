"""`auto` and what it is made of: the lower bound, the estimate, list scheduling, memory."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from attrs import evolve
from hypothesis import assume, event, given
from hypothesis import strategies as st

from partita.compiler.schedules.auto import auto
from partita.compiler.schedules.building_block import in_a_v
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.conditions import Conditions, Memory, Placement, StageTimes, prices
from partita.compiler.schedules.estimate import Estimate, codes, decoded
from partita.compiler.schedules.execution import WaitPolicy, executed, fits
from partita.compiler.schedules.listing import ALTERNATING, list_orders
from partita.compiler.schedules.lower_bound import fillings, lower_bound
from partita.compiler.schedules.one_by_one import one_by_one
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import (
    BACKWARD,
    FORWARD,
    FULL_BACKWARD,
    Schedule,
    loop_placement,
    peak_live,
    v_placement,
)
from partita.compiler.schedules.simulator import Costs, equal_costs, simulate
from partita.dsl.diagnostic import Refused
from partita.testing import assert_lawful, costs, memories, named_schedules, random_orders, schedules, shapes
from tests.compiler.schedules.test_communication import without_bounds
from tests.marks import examples


def chain(schedule: Schedule, given_costs: Costs) -> Conditions:
    return Conditions(given_costs, default_messages(schedule.stages))


def with_hasty_backwards(data: st.DataObject, given_costs: Costs) -> Costs:
    """Costs with whole backwards that take less than B and W together, as where W hides collectives; or more."""
    factor = data.draw(st.sampled_from((0.6, 0.8, 1.0, 1.1)))

    def action(stage: int, kind: str) -> float:
        return given_costs.action(stage, kind) * (factor if kind == FULL_BACKWARD else 1)

    return evolve(given_costs, action=action)


# ---------------------------------------------------------------- the lower bound


def tight(schedule: Schedule, memory: Memory) -> Memory:
    """Memory whose limits are just what a schedule needs."""
    peaks = (memory.peak(line, own) for line, own in zip(schedule.actions, schedule.placement, strict=True))
    return evolve(memory, limit=tuple(peaks))


@examples(50)
@given(schedules(shapes(4, 3, 8)), st.data())
def test_no_lawful_schedule_costs_less_than_the_bound(schedule, data):
    """Whatever its order, its costs, and the memory that it needs."""
    given_costs = with_hasty_backwards(data, data.draw(costs(schedule.stages)))
    memory = data.draw(st.none() | memories(schedule.placement).map(lambda each: tight(schedule, each)))
    timeline = assert_lawful(schedule, given_costs)
    found = prices(chain(schedule, given_costs), schedule.placement)
    least = lower_bound(schedule.placement, schedule.microbatches, found, memory)
    event(f"{timeline.cost / least:.1f} times the bound")
    assert timeline.cost >= least * (1 - 1e-9)


@examples(8)
@given(named_schedules(shapes(8, 1, 24), names=("one_f_one_b", "zb_h1", "zb_h2", "auto")), st.data())
def test_no_good_schedule_costs_less_than_the_bound_either(schedule, data):
    """Where costs differ little, these come near the bound."""
    part = st.integers(8, 12).map(float)
    table = {(s, kind): data.draw(part) for s in range(schedule.stages) for kind in ("F", "B", "W")}
    table |= {(s, "BW"): table[s, "B"] + table[s, "W"] for s in range(schedule.stages)}
    transfer = data.draw(st.sampled_from((0.0, 0.5, 4.0)))
    given_costs = Costs(lambda stage, kind: table[stage, kind], lambda message: transfer)
    each = (1.0,) * schedule.stages
    memory = tight(schedule, Memory((), each, tuple(data.draw(st.sampled_from((0.25, 0.5, 1.0))) for _ in each)))
    timeline = assert_lawful(schedule, given_costs)
    found = prices(chain(schedule, given_costs), schedule.placement)
    for limit in (memory, None):
        least = lower_bound(schedule.placement, schedule.microbatches, found, limit)
        assert timeline.cost >= least * (1 - 1e-9)


@pytest.mark.parametrize(("limit", "least"), [(3.0, 9), (2.0, 10), (1.0, 13)])
def test_the_bound_by_hand(limit, least):
    """Two ranks, three microbatches, F = B = W = 1, at least 9. Rank 0's first B starts no sooner than at 3: in
    memory for two it runs two forwards and idles for 1. In memory for one it idles for 2, and for 2 after its last F.
    """
    placement = loop_placement(2, 1)
    given_prices = prices(Conditions(equal_costs(), default_messages(2)), placement)
    memory = Memory((limit, limit), (1.0, 1.0), (1.0, 1.0))
    assert lower_bound(placement, 3, given_prices, memory) == pytest.approx(least)


@pytest.mark.parametrize(("limit", "counts"), [(1.0, (1, 1, 1)), (2.0, (2, 2, 1)), (3.0, (3, 3, 1)), (9.0, (5, 3, 1))])
def test_what_fills_a_pipeline(limit, counts):
    """At equal costs the first B is back after 2(P−r)−1 forwards, of which there are as many as memory holds."""
    placement = loop_placement(3, 1)
    given_prices = prices(Conditions(equal_costs(), default_messages(3)), placement)
    memory = Memory((limit,) * 3, (1.0,) * 3, (0.5,) * 3)
    assert fillings(placement, 12, given_prices, memory)[0][1] == counts


# ---------------------------------------------------------------- the estimate


@examples(20)
@given(schedules(shapes(5, 3, 10)), st.data())
def test_an_estimate_is_at_most_what_the_simulator_says(schedule, data):
    given_costs = data.draw(costs(schedule.stages))
    estimate = Estimate(schedule.placement, prices(chain(schedule, given_costs), schedule.placement))
    cost, makespan, _ = estimate([codes(line) for line in schedule.actions])
    timeline = assert_lawful(schedule, given_costs)
    assert cost <= timeline.cost * (1 + 1e-9)
    assert makespan <= timeline.makespan * (1 + 1e-9)


@examples(20)
@given(named_schedules(shapes(5, 3, 10)))
def test_at_equal_costs_and_with_free_transfers_it_is_the_same(schedule):
    estimate = Estimate(schedule.placement, prices(chain(schedule, equal_costs()), schedule.placement))
    timeline = assert_lawful(schedule)
    assert estimate([codes(line) for line in schedule.actions]) == (
        timeline.cost,
        timeline.makespan,
        sum(line[-1].end - line[0].start for line in timeline.actions),
    )


def test_orders_in_which_ranks_wait_for_each_other_cost_infinitely_much():
    placement = loop_placement(2, 1)
    estimate = Estimate(placement, prices(Conditions(equal_costs(), default_messages(2)), placement))
    first, (forward, backward, *rest) = (codes(line) for line in make("zb_h1", 2, 1, 2).actions)
    assert estimate([first, (forward, backward, *rest)])[0] < inf
    assert estimate([first, (backward, forward, *rest)]) == (inf, inf, inf)


# ---------------------------------------------------------------- list scheduling


@examples(20)
@given(shapes(5, 3, 12), st.data())
def test_lists_are_lawful_in_any_memory_that_holds_a_microbatch(shape, data):
    placement = data.draw(st.sampled_from((loop_placement, v_placement)))(shape.ranks, shape.chunks)
    given_costs = data.draw(costs(shape.ranks * shape.chunks))
    memory = data.draw(memories(placement))
    assume(all(memory.holds(rank, memory.one(own)) for rank, own in enumerate(placement)))
    prefer, split = data.draw(st.sampled_from((FORWARD, BACKWARD, ALTERNATING))), data.draw(st.booleans())
    patient = data.draw(st.booleans())
    conditions = Conditions(given_costs, default_messages(shape.ranks * shape.chunks))
    orders = list_orders(placement, shape.microbatches, prices(conditions, placement), memory, prefer, split, patient)
    schedule = Schedule("list", shape.microbatches, placement, orders, tuple(map(peak_live, orders)))
    assert_lawful(schedule, given_costs)
    assert memory.fits(schedule)


@examples(20)
@given(shapes(5, 3, 12), st.data())
def test_a_policy_keeps_its_bound_and_idles_only_while_it_must(shape, data):
    in_flight = data.draw(st.integers(shape.chunks, 3 * shape.ranks * shape.chunks))
    given_costs = evolve(data.draw(costs(shape.ranks * shape.chunks)), transfer=lambda message: 0.0)
    conditions = Conditions(given_costs, default_messages(shape.ranks * shape.chunks))
    arguments = {
        "in_flight": in_flight,
        "prefer": data.draw(st.sampled_from(("forward", "backward"))),
        "split_backward": data.draw(st.booleans()),
        "placement": data.draw(st.sampled_from(("loop", "v"))),
    }
    size = shape.ranks, shape.chunks, shape.microbatches
    schedule = make("policy", *size, conditions=conditions, **arguments)
    assert_lawful(schedule, given_costs)
    assert max(schedule.bound) <= in_flight
    # Waits for buffers, of which list scheduling knows nothing, are put off to the end.
    programs = communicate(schedule, default_messages(schedule.stages))
    timeline = simulate([without_bounds(program) for program in programs], given_costs)
    ends = {}
    for line, stages in zip(timeline.actions, schedule.placement, strict=True):
        ends |= {(i.work.kind[0], stages[i.work.chunk], i.work.microbatch): i.end for i in line}
    for line, stages in zip(timeline.actions, schedule.placement, strict=True):
        for before, after in pairwise(line):
            stage = stages[after.work.chunk]
            if after.start > before.end and after.work.kind != FORWARD:
                source = (FORWARD, stage) if stage == schedule.stages - 1 else ("B", stage + 1)
                # It waited for this backward, which began when its input came; W waits for nothing.
                assert after.work.kind != "W"
                assert ends[(*source, after.work.microbatch)] == pytest.approx(after.start)


@pytest.mark.parametrize(
    ("prefer", "patient", "order"),
    [
        (ALTERNATING, True, "F0.0 F0.1 B0.0 B0.1 F0.2 W0.0 W0.1 B0.2 W0.2"),
        (ALTERNATING, False, "F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2"),
        (BACKWARD, False, "F0.0 F0.1 B0.0 W0.0 B0.1 F0.2 W0.1 B0.2 W0.2"),
    ],
)
def test_greedy_constructions_by_hand(prefer, patient, order):
    """Two ranks, F = B = 2, W = 3, a transfer takes 1, and memory on rank 0 is for two. Its first B ends at 10, and it
    knows that the second one's input comes at 12: too soon for a W, if it is patient. Otherwise there is memory again
    at 13, for the forward whose turn it is.
    """
    placement = loop_placement(2, 1)
    given_prices = prices(Conditions(equal_costs(2.0, 2.0, 3.0, 1.0), default_messages(2)), placement)
    memory = Memory((2.0, 3.0), (1.0, 1.0), (0.5, 0.5))
    first, _ = list_orders(placement, 3, given_prices, memory, prefer, True, patient)
    assert " ".join(map(str, first)) == order


def test_policies():
    """Forwards first is GPipe. Backwards first, with P microbatches in flight, begins as 1F1B does."""
    assert make("policy", 2, 1, 3, prefer="forward").actions == make("gpipe", 2, 1, 3).actions
    assert str(make("policy", 2, 1, 3, in_flight=2)) == (
        "F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2\nF0.0 BW0.0 F0.1 BW0.1 F0.2 BW0.2"
    )
    assert str(make("policy", 1, 2, 2, split_backward=True, prefer="forward")) == (
        "F0.0 F1.0 F0.1 F1.1 B1.0 B0.0 B1.1 B0.1 W0.0 W0.1 W1.0 W1.1"
    )
    assert make("policy", 3, 2, 2, placement="v").placement == v_placement(3)


# ---------------------------------------------------------------- auto


@examples(5)
@given(shapes(5, 3, 10), st.data())
def test_auto_keeps_within_memory_and_is_no_worse_than_what_fits(shape, data):
    """It finds an order wherever memory holds one microbatch, and none of those that users can name costs less."""
    ranks, chunks, microbatches = shape.ranks, shape.chunks, shape.microbatches
    stages = ranks * chunks

    def holds_one(placement: Placement, memory: Memory) -> bool:
        return all(memory.holds(rank, memory.one(own)) for rank, own in enumerate(placement))

    given_costs = with_hasty_backwards(data, data.draw(costs(stages)))
    both = (loop_placement(ranks, chunks), v_placement(ranks, chunks))
    by_placement = {placement: data.draw(memories(placement)) for placement in both}
    conditions = Conditions(given_costs, default_messages(stages), by_placement.__getitem__)
    try:
        schedule = auto(ranks, chunks, microbatches, conditions)
    except ValueError:
        event("refused")
        assert not any(holds_one(placement, by_placement[placement]) for placement in both[: 1 + (chunks == 2)])
        return
    event(schedule.search.family)
    memory = by_placement[schedule.placement]
    assert memory.fits(schedule)
    timeline = assert_lawful(schedule, given_costs)
    assert timeline.cost == pytest.approx(schedule.search.cost)
    assert timeline.cost >= schedule.search.least * (1 - 1e-9)
    for name in ("one_f_one_b", "zb_h1", "zb_h2", "interleaved_1f1b", "zb_v", "v_half", "v_min", "dualpipe_v"):
        try:
            other = make(name, ranks, chunks, microbatches)
        except Refused:
            continue
        if other.placement == schedule.placement and memory.fits(other):
            assert timeline.cost <= assert_lawful(other, given_costs).cost * (1 + 1e-9), name


@pytest.mark.soak
@given(shapes(4, 2, 6), st.data())
def test_a_search_finds_the_same_again(shape, data):
    conditions = Conditions(data.draw(costs(shape.ranks * shape.chunks)), default_messages(shape.ranks * shape.chunks))
    first, second = (auto(shape.ranks, shape.chunks, shape.microbatches, conditions) for _ in range(2))
    assert first == second
    assert first.search == second.search


@pytest.mark.parametrize(("limit", "worst"), [(4.0, 0.015), (6.0, 0.0)])
def test_auto_uses_unequal_costs(limit, worst):
    """The second of four stages takes half as long again. ZB-H1, which knows nothing of it, has a bubble of 2.9 %, and
    ZB-H2 wants memory for seven.
    """
    given_costs = Costs(lambda s, kind: (1.5 if s == 1 else 1.0) * (1 + (kind == FULL_BACKWARD)), lambda message: 0.1)
    memory = Memory((limit,) * 4, (1.0,) * 4, (0.5,) * 4)
    conditions = Conditions(given_costs, default_messages(4), lambda placement: memory)
    assert assert_lawful(make("zb_h1", 4, 1, 12), given_costs).bubble == pytest.approx(0.0288, abs=5e-5)
    assert assert_lawful(auto(4, 1, 12, conditions), given_costs).bubble <= worst


@pytest.mark.parametrize(
    ("size", "times", "limit"),
    [
        ((4, 1, 13), (3.0, 2.0, 2.0), 1.5),
        ((3, 2, 5), (1.0, 1.0, 0.3), 2.0),
        ((4, 2, 8), (1.0, 1.0, 0.3), 2.0),
    ],
)
def test_greedy_constructions_reach_bounds_that_others_miss(size, times, limit):
    """`limit` is for so many times P microbatches, of which 0.4 stays until W; a transfer takes 0.1."""
    ranks, chunks, _ = size
    stages = ranks * chunks
    memory = Memory((limit * ranks,) * ranks, (1 / chunks,) * stages, (0.4 / chunks,) * stages)
    given_costs = equal_costs(*(each / chunks for each in times), 0.1)
    schedule = auto(*size, Conditions(given_costs, default_messages(stages), lambda placement: memory))
    assert schedule.search.cost == pytest.approx(schedule.search.least)
    assert assert_lawful(schedule, given_costs).cost == schedule.search.cost


def test_auto_says_what_memory_lacks():
    memory = Memory((3.0, 1.5), (1.0, 2.0), (0.5, 0.5))
    conditions = Conditions(equal_costs(), default_messages(2), lambda placement: memory)
    with pytest.raises(Refused) as refused:
        make("auto", 2, 1, 4, conditions=conditions)
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code == "E0505"
    assert diagnostic.message == ("schedule `auto`: rank 1 has room for 1.5 of activations, but one microbatch needs 2")
    assert diagnostic.help == "`recompute`, smaller microbatches or more ranks need less memory"


@examples(20)
@given(random_orders(shapes(4, 3, 6)))
def test_one_after_the_other_takes_the_least_memory(schedule):
    least = one_by_one(schedule.placement, schedule.microbatches)
    assert_lawful(least)
    assert least.bound == (schedule.chunks,) * schedule.ranks
    each = (1.0,) * schedule.stages
    memory = tight(least, Memory((), each, each))
    assert memory.limit == (float(schedule.chunks),) * schedule.ranks


def test_a_simulation_of_pairs_needs_their_time():
    """Without it, the two run one after the other."""
    schedule = make("dualpipe_v", 2, 2, 4)
    programs = communicate(schedule, default_messages(4), overlap=True)
    apart = simulate(programs, equal_costs())
    assert apart == simulate(programs, equal_costs(pair=3.0))
    assert simulate(programs, equal_costs(pair=2.0)).makespan < apart.makespan


@given(st.integers(1, 5), st.integers(1, 8), st.data())
def test_a_plan_that_fits_is_executed_within_memory(ranks: int, microbatches: int, data: st.DataObject):
    """Whatever the steps of a block, the costs and the patience: the order is lawful and fits as the plan does."""
    numbers = st.floats(0.1, 4.0)
    steps, turns = (data.draw(st.tuples(*[numbers] * n)) for n in (4, 3))
    placement, stages = v_placement(ranks), 2 * ranks
    plan = in_a_v(ranks, steps, turns).plan(placement, microbatches)
    forward = data.draw(st.tuples(*[numbers] * stages))
    memory = Memory((), forward, tuple(each * data.draw(st.floats(0.0, 1.0)) for each in forward))
    at_once = evolve(memory, weight=(0.0,) * stages)  # each W right after its B
    held = (at_once.peak(decoded(each), own) for each, own in zip(plan, placement, strict=True))
    memory = evolve(memory, limit=tuple(held))
    assert fits(plan, placement, memory)
    seconds = st.lists(st.floats(0.0, 3.0), min_size=stages, max_size=stages).map(tuple)
    times = StageTimes(*(data.draw(seconds) for _ in range(4)), *(data.draw(seconds)[1:] for _ in range(2)))
    wait_policy = WaitPolicy(data.draw(st.floats(0.0, 2.0)), data.draw(st.floats(0.0, 2.0)))
    orders = executed(plan, placement, microbatches, times, memory, wait_policy)
    actions = tuple(map(decoded, orders))
    schedule = Schedule("executed", microbatches, placement, actions, tuple(map(peak_live, actions)))
    assert_lawful(schedule)
    assert memory.fits(schedule)
