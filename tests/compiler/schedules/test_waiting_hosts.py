"""Hosts that wait for their devices in actions: whatever schedule it is, all ranks get to the end (invariant 10). With
one that has a name they do even if all streams of a device share one queue of the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
from attrs import define, evolve, field
from hypothesis import event, given
from hypothesis import strategies as st

from partita.compiler.instructions import Compute, Instruction, Message, PostReceive, PostSend
from partita.compiler.schedules import communication
from partita.compiler.schedules.communication import _receive_in_time, communicate, default_messages
from partita.compiler.schedules.hardware_queues import queues
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.schedules.stream_invariants import check_launches
from partita.compiler.streams import START, Launch, enqueued, launches_of
from partita.dsl.diagnostic import Refused
from partita.testing import messages, schedules
from tests.marks import examples

NAMED = {
    **dict.fromkeys(("gpipe", "one_f_one_b", "zb_h1", "zb_h2"), 1),
    **dict.fromkeys(("interleaved_1f1b", "looped_bfs", "zb_v", "v_half", "v_min", "dualpipe_v"), 2),
}


@define(eq=False)
class Machine:
    """A rank: its host has given `queues` what is in `order` before `next`, and goes on behind an action only once they
    are empty.
    """

    program: Sequence[Instruction]
    launches: Sequence[Launch]
    next: int = 0
    queues: dict[str, list[int]] = field(factory=dict)
    ended: set[int] = field(factory=lambda: {START})

    def give(self) -> bool:
        """Let the host go on. Whether it could."""
        order, before = enqueued(self.launches), self.next
        while self.next < len(order) and not (
            self.next and isinstance(self.program[order[self.next - 1]], Compute) and any(self.queues.values())
        ):
            self.queues.setdefault(self.launches[order[self.next]].stream, []).append(order[self.next])
            self.next += 1
        return self.next > before

    def ready(self) -> dict[object, list[int]]:
        """What is first on its stream and behind nothing that has not ended: by the transfer, or by None."""
        found: dict[object, list[int]] = {}
        for queue in self.queues.values():
            if queue and self.ended.issuperset(self.launches[queue[0]].after):
                first = self.program[queue[0]]
                of = first.transfer if isinstance(first, (PostSend, PostReceive)) else None
                found.setdefault(of, []).append(queue[0])
        return found

    def end(self, i: int) -> None:
        self.queues[self.launches[i].stream].remove(i)
        self.ended.add(i)


def ends(programs: Sequence[Sequence[Instruction]], launches: Sequence[Sequence[Launch]]) -> bool:
    """Whether all ranks get to the end, if hosts wait in each action."""
    machines = [Machine(*each) for each in zip(programs, launches, strict=True)]
    moved = True
    while moved:
        moved = sum(machine.give() for machine in machines) > 0
        peers: dict[object, list[tuple[Machine, int]]] = {}
        for machine in machines:
            for of, found in machine.ready().items():
                for i in found:
                    if of is None:
                        machine.end(i)
                        moved = True
                    else:
                        peers.setdefault(of, []).append((machine, i))
        for both in peers.values():
            if len(both) == 2:
                for machine, i in both:
                    machine.end(i)
                moved = True
    return all(len(machine.ended) == len(machine.program) + 1 for machine in machines)


def accepted(programs: Sequence[Sequence[Instruction]], launches: Sequence[Sequence[Launch]]) -> bool:
    try:
        check_launches(programs, launches, {})
    except Refused:
        return False
    return True


@examples(20)
@given(schedules(), st.data())
def test_every_schedule_gets_to_the_end(schedule: Schedule, data: st.DataObject):
    programs = communicate(schedule, data.draw(messages(schedule.stages)))
    launches = [launches_of(own) for own in programs]
    check_launches(programs, launches, {})
    assert ends(programs, launches)


def test_what_one_action_sends_does_not_wait_for_its_receivers():
    """More to the third rank than two buffers hold, ahead of what the second needs so that the third can begin."""
    schedule = make("interleaved_1f1b", 3, 3, 1)
    skips = [Message(f"skip{stage}", 0, stage, "forward", 8) for stage in range(1, schedule.stages)]
    late = Message("aux", 0, schedule.stages - 1, "forward", 8)
    programs = communicate(schedule, (*skips, late, *default_messages(schedule.stages)))
    launches = [launches_of(own) for own in programs]
    check_launches(programs, launches, {})
    assert ends(programs, launches)


@examples(20)
@given(schedules(), st.data())
def test_what_is_lawful_gets_to_the_end_and_nothing_else(schedule: Schedule, data: st.DataObject):
    """With some receives in the way of the next action, as all would be without `Launch.behind`; or some too late."""
    with patch.object(communication, "_receive_in_time", data.draw(st.sampled_from([_receive_in_time, too_late]))):
        programs = communicate(schedule, default_messages(schedule.stages))
    chance = data.draw(st.sampled_from([0, 1, 2]))
    at_once = st.booleans() if chance == 1 else st.just(chance == 2)
    launches = [
        [
            evolve(each, behind=None) if each.behind is not None and data.draw(at_once) else each
            for each in launches_of(own)
        ]
        for own in programs
    ]
    lawful = accepted(programs, launches)
    event("lawful" if lawful else "refused")
    assert lawful == ends(programs, launches)


@pytest.mark.parametrize("name", ["zb_h2", "interleaved_1f1b", "looped_bfs", "zb_v", "v_half", "v_min", "dualpipe_v"])
def test_receives_that_are_posted_too_late_are_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    """Both ends of two transfers are behind actions whose hosts wait for the other's send."""
    monkeypatch.setattr(communication, "_receive_in_time", too_late)
    schedule = make(name, 2, NAMED[name], 4)
    programs = communicate(schedule, default_messages(schedule.stages))
    launches = [launches_of(own) for own in programs]
    assert not accepted(programs, launches)
    assert not ends(programs, launches)


def too_late(*_: object) -> None:
    """Receives are where they are first put."""


def test_receives_in_the_way_of_the_next_action_are_refused():
    schedule = make("interleaved_1f1b", 2, 2, 4)
    programs = communicate(schedule, default_messages(4))
    launches = [[evolve(each, behind=None) for each in launches_of(own)] for own in programs]
    assert not ends(programs, launches)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMED)
def test_streams_may_share_a_hardware_queue_with_any_schedule_that_has_a_name(name: str):
    for ranks, microbatches in ((2, 2), (2, 4), (4, 4), (4, 8), (4, 9), (8, 16)):
        try:
            schedule = make(name, ranks, NAMED[name], microbatches)
        except Refused:
            continue  # it takes other numbers of microbatches
        assert queues(communicate(schedule, default_messages(schedule.stages))) == 1


def test_streams_that_would_wait_in_a_circle_need_queues_of_their_own():
    """Receives ahead of the next action keep what is behind them in the queue from starting."""
    schedule = make("interleaved_1f1b", 2, 2, 4)
    programs = communicate(schedule, default_messages(4))
    launches = [[evolve(each, behind=None) for each in launches_of(own)] for own in programs]
    assert queues(programs, launches) == max(len({each.stream for each in own}) for own in launches) > 1
