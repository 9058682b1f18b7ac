"""What every schedule must do, as assertions for tests."""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.communication import communicate, default_messages
from partita.compiler.instructions import Message
from partita.compiler.laws import check_program, check_schedule
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, WHOLE_BACKWARD, Schedule
from partita.compiler.simulator import Costs, equal_costs, simulate
from partita.compiler.timeline import Timeline


def assert_lawful(
    schedule: Schedule,
    costs: Costs | None = None,
    messages: Sequence[Message] | None = None,
    lookahead: int = 1,
) -> Timeline:
    """Hold a schedule to all laws, and return its timeline.

    `costs` are equal ones and free transfers unless given; `messages` the chain from stage to stage. Raises
    Refused with the law, the ranks and the actions for laws 1 to 4 and 6, AssertionError for law 5.
    """
    costs = costs or equal_costs()
    if messages is None:
        messages = default_messages(schedule.stages, schedule.training)
    check_schedule(schedule)
    programs = communicate(schedule, messages, lookahead=lookahead)
    check_program(programs)
    timeline = simulate(programs, costs)
    span = timeline.makespan
    slack = 1e-9 * span
    bound = dependency_bound(schedule, costs, messages)
    assert span >= max(timeline.busy) - slack, f"invariant 5: makespan {span}, busiest rank {max(timeline.busy)}"
    assert span >= bound - slack, f"invariant 5: makespan {span}, critical path {bound}"
    return timeline


def dependency_bound(schedule: Schedule, costs: Costs, messages: Sequence[Message]) -> float:
    """Seconds that one microbatch needs by itself: the longest path of its actions and transfers.

    Whatever the order of a schedule, its step cannot be shorter.
    """
    home = {stage: rank for rank, stages in enumerate(schedule.placement) for stage in stages}
    runs = {
        (schedule.placement[rank][action.chunk], action.kind)
        for rank, line in enumerate(schedule.actions)
        for action in line
    }

    def pass_through(stages: Sequence[int], kinds: Sequence[str], ready: list[float]) -> list[float]:
        """When each stage's quickest action of these kinds ends, if it may begin once the stage is ready."""
        ends = [0.0] * len(ready)
        for stage in stages:
            begin = ready[stage]
            for message in messages:
                producer = message.source
                onward = message.destination > producer
                if message.destination == stage and onward == (FORWARD in kinds):
                    crossing = home[producer] != home[stage]
                    begin = max(begin, ends[producer] + (costs.transfer(message) if crossing else 0.0))
            ends[stage] = begin + min(costs.action(stage, kind) for kind in kinds if (stage, kind) in runs)
        return ends

    stages = range(schedule.stages)
    ends = pass_through(stages, (FORWARD,), [0.0] * len(stages))
    if schedule.training:
        # A whole backward may replace B on some stages, and may be quicker.
        ends = pass_through(stages[::-1], (BACKWARD, WHOLE_BACKWARD), ends)
    return max(ends)
