"""Where posts and waits stand: hand-overs, channels, posts ahead of time, buffers."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import event, given
from hypothesis import strategies as st

from partita.compiler.instructions import (
    Compute,
    Message,
    PostReceive,
    PostSend,
    WaitReceive,
    WaitSend,
)
from partita.compiler.schedules.communication import communicate, default_messages, peak_in_flight
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.simulator import equal_costs, simulate
from partita.testing import messages, named_schedules, schedules, shapes
from tests.marks import examples


@examples(20)
@given(schedules(), st.data())
def test_the_compute_actions_are_the_schedule_and_the_rest_its_messages(schedule, data):
    chain = data.draw(messages(schedule.stages))
    programs = communicate(schedule, chain)
    home = {stage: rank for rank, stages in enumerate(schedule.placement) for stage in stages}
    crossing = {message for message in chain if home[message.source] != home[message.destination]}
    wanted = {(message, m) for message in crossing for m in range(schedule.microbatches)}
    found = defaultdict(list)
    for rank, program in enumerate(programs):
        assert tuple(i.action for i in program if isinstance(i, Compute)) == schedule.actions[rank]
        for instruction in program:
            if isinstance(instruction, Compute):
                assert instruction.stage == schedule.placement[rank][instruction.action.chunk]
            else:
                transfer = instruction.transfer
                found[type(instruction)].append((transfer.message, transfer.microbatch))
    for kind in (PostSend, WaitSend, PostReceive, WaitReceive):
        assert len(found[kind]) == len(wanted)
        assert set(found[kind]) == wanted


@examples(20)
@given(schedules(), st.data())
def test_receives_are_posted_ahead_and_waited_for_when_needed(schedule, data):
    chain = data.draw(messages(schedule.stages))
    for program in communicate(schedule, chain):
        done = 0
        posted = {}
        for position, instruction in enumerate(program):
            if isinstance(instruction, Compute):
                done += 1
            elif isinstance(instruction, PostReceive):
                posted[instruction.transfer] = done
            elif isinstance(instruction, WaitReceive):
                consumer = next(i for i in program[position:] if isinstance(i, Compute))
                message, m = instruction.transfer.message, instruction.transfer.microbatch
                assert (consumer.stage, consumer.action.microbatch) == (message.destination, m)
                assert posted[instruction.transfer] <= max(0, done - 1)
            elif isinstance(instruction, PostSend):
                before = [i for i in program[:position] if isinstance(i, Compute)][-1]
                message, m = instruction.transfer.message, instruction.transfer.microbatch
                assert (before.stage, before.action.microbatch) == (message.source, m)


def without_bounds(program):
    """The same with all waits for sends at the end."""
    waits = [i for i in program if isinstance(i, WaitSend)]
    return [*(i for i in program if not isinstance(i, WaitSend)), *waits]


@examples(20)
@given(schedules(shapes(6, 3, 12)), st.data())
def test_at_equal_costs_no_rank_waits_for_a_buffer(schedule, data):
    programs = communicate(schedule, data.draw(messages(schedule.stages)))
    bounded = simulate(programs, equal_costs())
    assert bounded == simulate([without_bounds(program) for program in programs], equal_costs())


@examples(20)
@given(schedules(shapes(6, 3, 12)), st.data())
def test_channels_have_two_buffers_or_a_power_of_it(schedule, data):
    for program in communicate(schedule, data.draw(messages(schedule.stages))):
        unbounded = defaultdict(int)
        outstanding, most = defaultdict(int), defaultdict(int)
        for instruction in program:
            if isinstance(instruction, PostSend):
                channel = instruction.transfer.channel
                unbounded[channel] += 1
                outstanding[channel] += 1
                most[channel] = max(most[channel], outstanding[channel])
            elif isinstance(instruction, WaitSend):
                outstanding[instruction.transfer.channel] -= 1
        for channel, count in unbounded.items():
            buffers = most[channel]
            event(f"{buffers} buffers")
            assert buffers == count or buffers in (2, 4, 8, 16, 32, 64)


@examples(20)
@given(named_schedules(shapes(8, 1, 24), names=("gpipe", "one_f_one_b")))
def test_without_chunks_two_buffers_do(schedule):
    """Neighbours in gpipe and 1F1B are at most one action apart."""
    for program in communicate(schedule, default_messages(schedule.stages)):
        outstanding = defaultdict(int)
        for instruction in program:
            if isinstance(instruction, (PostSend, WaitSend)):
                channel = instruction.transfer.channel
                outstanding[channel] += 1 if isinstance(instruction, PostSend) else -1
                assert outstanding[channel] <= 2


def test_a_buffer_that_gets_free_when_it_is_wanted_is_not_counted_on():
    """At durations that differ by anything the sender would wait for it. Only what goes round the ring needs more, and
    backward it is received as soon as it is sent: while hosts wait for their devices, its sender could not go on.
    """
    most = defaultdict(int)
    for program in communicate(make("looped_bfs", 3, 2, 6), default_messages(6)):
        outstanding = defaultdict(int)
        for instruction in program:
            if isinstance(instruction, (PostSend, WaitSend)):
                channel = str(instruction.transfer.channel)
                outstanding[channel] += 1 if isinstance(instruction, PostSend) else -1
                most[channel] = max(most[channel], outstanding[channel])
    around = {"2->0 forward": 4}
    others = ("0->1 forward", "1->2 forward", "1->0 backward", "2->1 backward", "0->2 backward")
    assert most == around | dict.fromkeys(others, 2)


def test_two_ranks_with_two_chunks_have_a_channel_for_each_direction_and_way():
    """Rank 1 sends the output of its first chunk back to rank 0 *forward*; gradients have channels of their
    own.
    """
    programs = communicate(make("interleaved_1f1b", 2, 2, 4), default_messages(4))
    sends = defaultdict(list)
    for program in programs:
        for instruction in program:
            if isinstance(instruction, PostSend):
                transfer = instruction.transfer
                sends[str(transfer.channel)].append((transfer.message.source, transfer.microbatch))
    assert sends == {
        "0->1 forward": [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)],
        "1->0 forward": [(1, 0), (1, 1), (1, 2), (1, 3)],
        "1->0 backward": [(3, 0), (3, 1), (1, 0), (1, 1), (3, 2), (3, 3), (1, 2), (1, 3)],
        "0->1 backward": [(2, 0), (2, 1), (2, 2), (2, 3)],
    }


def test_bytes_in_flight():
    """1F1B on 2 ranks: two sends in flight, and on rank 0 two receives, on rank 1 one."""
    chain = (Message("x", 0, 1, "forward", 100), Message("x'", 1, 0, "backward", 1))
    first, second = communicate(make("one_f_one_b", 2, 1, 8), chain)
    assert peak_in_flight(first) == 202
    assert peak_in_flight(second) == 102
