"""The simulator: law 5, published figures, and what it does not depend on."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.instructions import Compute, PostReceive, Transfer
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Action
from partita.compiler.schedules.simulator import Costs, equal_costs, simulate
from partita.testing import assert_lawful, costs, messages, schedules, shapes
from tests.files import GOLDEN
from tests.marks import examples

ZERO_BUBBLE = json.loads((GOLDEN / "zero_bubble.json").read_text())


@pytest.mark.few(1)
@pytest.mark.parametrize("row", ZERO_BUBBLE["rows"], ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_the_bubble_of_1f1b_is_the_published_one(row):
    schedule = make("one_f_one_b", row["stages"], 1, row["microbatches"])
    timeline = assert_lawful(schedule, equal_costs(row["T_F"], row["T_B"], row["T_W"], row["T_comm"]))
    assert round(timeline.bubble, 4) == row["bubble"]["one_f_one_b"]


@examples(20)
@given(schedules(), st.data())
def test_timelines_are_those_of_the_lists_and_their_costs(schedule, data):
    prices = data.draw(costs(schedule.stages))
    timeline = assert_lawful(schedule, prices)
    for rank, (line, actions) in enumerate(zip(timeline.actions, schedule.actions, strict=True)):
        assert tuple(interval.work for interval in line) == actions
        free = 0.0
        for interval in line:
            stage = schedule.placement[rank][interval.work.chunk]
            assert interval.rank == rank
            assert interval.start >= free
            assert interval.duration == pytest.approx(prices.action(stage, interval.work.kind))
            free = interval.end
    for channel, line in timeline.transfers.items():
        free = 0.0
        for index, interval in enumerate(line):
            assert (interval.work.channel, interval.work.index) == (channel, index)
            assert interval.start >= free
            assert interval.duration == pytest.approx(prices.transfer(interval.work.message))
            free = interval.end


@examples(20)
@given(schedules(), st.data())
def test_nothing_runs_before_what_it_needs(schedule, data):
    """Each action starts after the last action or transfer that feeds it; checked from the intervals alone."""
    chain = data.draw(messages(schedule.stages))
    timeline = assert_lawful(schedule, data.draw(costs(schedule.stages)), chain)
    ready = {}
    for program in communicate(schedule, chain):
        before = None
        for instruction in program:
            if isinstance(instruction, Compute):
                before = instruction
            elif isinstance(instruction, PostReceive):
                ready[instruction.transfer.message, instruction.transfer.microbatch] = before
    ends = {
        (schedule.placement[rank][interval.work.chunk], interval.work): interval.end
        for rank, line in enumerate(timeline.actions)
        for interval in line
    }
    when = {}
    for rank, line in enumerate(timeline.actions):
        for interval in line:
            direction = {"F": "forward", "B": "backward", "BW": "backward"}.get(interval.work.kind)
            if direction:
                stage = schedule.placement[rank][interval.work.chunk]
                when[stage, direction, interval.work.microbatch] = interval
    arrivals = {
        (interval.work.message, interval.work.microbatch): interval
        for line in timeline.transfers.values()
        for interval in line
    }
    for message in chain:
        for m in range(schedule.microbatches):
            produced = when[message.source, message.direction, m]
            consumed = when[message.destination, message.direction, m]
            arrival = arrivals.get((message, m))
            assert (arrival is None) == (produced.rank == consumed.rank)
            if arrival is None:
                assert produced.end <= consumed.start
            else:
                assert produced.end <= arrival.start
                assert arrival.end <= consumed.start
                # The receiver posts after the action before, and no transfer runs before both have posted.
                action = ready[message, m]
                assert action is None or ends[action.stage, action.action] <= arrival.start


@examples(20)
@given(schedules(), st.data())
def test_the_critical_path_has_no_gap_and_is_as_long_as_the_step(schedule, data):
    timeline = assert_lawful(schedule, data.draw(costs(schedule.stages)))
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for before, after in pairwise(path):
        assert before.end == after.start
    assert sum(interval.duration for interval in path) == pytest.approx(timeline.makespan)
    assert all(isinstance(interval.work, (Action, Transfer)) for interval in path)


@examples(20)
@given(schedules(), st.data(), st.integers(1, 5))
def test_slower_actions_and_transfers_make_no_step_shorter(schedule, data, factor):
    prices = data.draw(costs(schedule.stages))
    stage = data.draw(st.integers(0, schedule.stages - 1))
    slower = Costs(
        lambda s, kind: prices.action(s, kind) * (factor if s == stage else 1),
        lambda message: prices.transfer(message) + factor,
    )
    programs = communicate(schedule, default_messages(schedule.stages))
    assert simulate(programs, slower).makespan >= simulate(programs, prices).makespan
    doubled = Costs(lambda s, kind: 2 * prices.action(s, kind), lambda m: 2 * prices.transfer(m))
    assert simulate(programs, doubled).makespan == 2 * simulate(programs, prices).makespan


@examples(20)
@given(shapes(), st.sampled_from((0.0, 0.5)))
def test_a_slow_channel_delays_only_what_needs_it(shape, transfer):
    """With one microbatch and one chunk a rank, the step is the chain there and back."""
    P = shape.ranks
    timeline = assert_lawful(make("gpipe", P, 1, 1), equal_costs(2.0, 3.0, 1.0, transfer))
    assert timeline.makespan == 6 * P + 2 * transfer * (P - 1)
    first, last = timeline.actions[0], timeline.actions[-1]
    assert [interval.start for interval in first] == [0, timeline.makespan - 4]
    assert last[0].end == last[1].start


def test_the_busiest_rank_and_the_longest_occupied_one_make_the_bubble():
    """By hand: 2 ranks, 2 microbatches, gpipe; rank 1 takes twice as long.

    Rank 1 is the busiest, and rank 0 the one that is occupied for longest.
    """
    speeds = {0: 1, 1: 2}
    kinds = {"F": 1, "BW": 2}
    timeline = assert_lawful(make("gpipe", 2, 1, 2), Costs(lambda s, k: speeds[s] * kinds[k], lambda m: 0))
    spans = [[(i.start, i.end) for i in line] for line in timeline.actions]
    assert spans == [[(0, 1), (1, 2), (9, 11), (13, 15)], [(1, 3), (3, 5), (5, 9), (9, 13)]]
    assert timeline.makespan == 15
    assert timeline.busy == (6, 12)
    assert timeline.bubble == (15 - 12) / 15
    assert timeline.peak_live == (2, 2)
