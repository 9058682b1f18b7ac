"""Assertions for tests of schedules."""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.instructions import Message
from partita.compiler.schedules.communication import communicate
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, FULL_BACKWARD, Schedule, ranks_of
from partita.compiler.schedules.simulator import Costs, equal_costs, simulate
from partita.compiler.schedules.stream_invariants import check_launches
from partita.compiler.schedules.timeline import Timeline
from partita.compiler.streams import launches_of
from partita.testing.strategies import messages_of


def assert_lawful(
    schedule: Schedule,
    costs: Costs | None = None,
    messages: Sequence[Message] | None = None,
) -> Timeline:
    """Check a schedule against all invariants, and return its timeline.

    By default `costs` are equal with free transfers, and `messages` are the chain from stage to stage, and those of
    the parts that all ranks share. Raises Refused with the invariant, the ranks and the actions for invariants 1 to 4,
    6 to 10, AssertionError for invariant 5.
    """
    costs = costs or equal_costs()
    if messages is None:
        messages = messages_of(schedule)
    check_schedule(schedule)
    programs = communicate(schedule, messages)
    check_program(programs)
    check_launches(programs, tuple(map(launches_of, programs)), {})
    timeline = simulate(programs, costs)
    span = timeline.makespan
    slack = 1e-9 * span
    bound = dependency_bound(schedule, costs, messages)
    assert span >= max(timeline.busy) - slack, f"invariant 5: makespan {span}, busiest rank {max(timeline.busy)}"
    assert span >= bound - slack, f"invariant 5: makespan {span}, critical path {bound}"
    return timeline


def dependency_bound(schedule: Schedule, costs: Costs, messages: Sequence[Message]) -> float:
    """Seconds that one microbatch needs alone: the longest path of its actions and transfers.

    It is a lower bound of the makespan in any order.
    """
    rank_of = ranks_of(schedule.placement)
    runs = {
        (schedule.placement[rank][action.chunk], action.kind)
        for rank, line in enumerate(schedule.actions)
        for action in line
    }

    def pass_through(stages: Sequence[int], kinds: Sequence[str], ready: list[float]) -> list[float]:
        """The end of each stage's fastest action of these kinds, if it starts once the stage is ready."""
        ends = [0.0] * len(ready)
        for stage in stages:
            begin = ready[stage]
            for message in messages:
                producer = message.source
                forward = message.direction == "forward"
                if message.destination == stage and forward == (FORWARD in kinds):
                    crossing = rank_of[producer] != rank_of[stage]
                    begin = max(begin, ends[producer] + (costs.transfer(message) if crossing else 0.0))
            ends[stage] = begin + min(costs.action(stage, kind) for kind in kinds if (stage, kind) in runs)
        return ends

    stages = sorted(range(schedule.stages), key=schedule.depth)
    ends = pass_through(stages, (FORWARD,), [0.0] * len(stages))
    if schedule.training:
        # BW may replace B on some stages, and may be faster.
        ends = pass_through(stages[::-1], (BACKWARD, FULL_BACKWARD), ends)
    return max(ends)
