"""Copies to the host's memory in a schedule: what a microbatch keeps on a stage lies there between F and its backward.

Two actions of their own mark for which time that is, O and L, as in PipeOffload (arXiv 2503.01328). The copy starts
right behind F and is complete at O, where the device's memory is free again; at L that memory is taken again, the copy
back starts, and the backward pass waits for it. In between a microbatch takes none of the device's memory, whatever
else runs.

    F0.0 F0.1 O0.0 F0.2 O0.1 L0.0 BW0.0 …

A copy overlaps with the rank's compute, and with its waiting for others. So O comes before the first action that begins
late enough for the copy to be complete, and L as late as a copy still ends before the backward pass begins, in the
timeline of the schedule without copies; those of one rank in one direction run one after the other. A microbatch is
copied if an action runs between O and L: otherwise copies would free nothing, or delay the rank. One whose backward
pass follows F at once stays on the device, as on the last stage of 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from attrs import evolve, field, frozen

from partita.compiler.schedules.schedule import (
    COPIES,
    FORWARD,
    LOAD,
    OFFLOAD,
    WEIGHT,
    Action,
    Schedule,
    peak_live,
)
from partita.compiler.schedules.timeline import Interval, Timeline

# A chunk and a microbatch.
Pair = tuple[int, int]


def with_copies(schedule: Schedule, copies: Mapping[int, float], timeline: Timeline) -> Schedule:
    """The schedule with O and L of stages that keep something to copy; `copies` are the seconds of one copy by stage,
    and `timeline` is that of the schedule. One that has copies of its own, or no place for any, is returned as it is.
    """
    if not copies or not schedule.training or schedule.copies:
        return schedule
    lines = []
    for rank, (actions, stages) in enumerate(zip(schedule.actions, schedule.placement, strict=True)):
        line = _Line(actions, timeline.actions[rank], _joined(schedule, rank))
        line.insert({chunk: copies[stage] for chunk, stage in enumerate(stages) if stage in copies})
        lines.append(line)
    if not any(line.offloads for line in lines):
        return schedule
    orders = tuple(line.order() for line in lines)
    pairs = tuple(line.pairs() for line in lines) if schedule.pairs else ()
    bound = tuple(map(min, schedule.bound, map(peak_live, orders)))
    return evolve(schedule, actions=orders, pairs=pairs, bound=bound, spans=())


def without_copies(schedule: Schedule) -> tuple[Schedule, tuple[Mapping[int, Sequence[Action]], ...]]:
    """The schedule without O and L, and for each rank the copies before each of its other actions, by position."""
    if not schedule.copies:
        return schedule, ({},) * schedule.ranks
    orders, pairs, all_copies = [], [], []
    for rank, actions in enumerate(schedule.actions):
        order: list[Action] = []
        copies: dict[int, list[Action]] = {}
        joined = set()
        for i, action in enumerate(actions):
            if action.kind in COPIES:
                copies.setdefault(len(order), []).append(action)
                continue
            if i in _joined(schedule, rank):
                joined.add(len(order))
            order.append(action)
        orders.append(tuple(order))
        pairs.append(frozenset(joined))
        all_copies.append(copies)
    plain = evolve(schedule, actions=tuple(orders), pairs=tuple(pairs) if schedule.pairs else (), spans=())
    return plain, tuple(all_copies)


def copied(actions: Iterable[Action]) -> frozenset[tuple[int, int]]:
    """The (chunk, microbatch) pairs that a rank copies to the host's memory."""
    return frozenset((action.chunk, action.microbatch) for action in actions if action.kind == OFFLOAD)


def _joined(schedule: Schedule, rank: int) -> frozenset[int]:
    return schedule.pairs[rank] if schedule.pairs else frozenset()


@frozen(eq=False)
class _Line:
    """A rank's actions with their times, and the copies inserted before each. Nothing comes between those of a pair."""

    actions: Sequence[Action]
    times: Sequence[Interval]
    joined: frozenset[int]
    offloads: dict[int, list[Action]] = field(factory=dict)
    loads: dict[int, list[Action]] = field(factory=dict)

    def insert(self, copies: Mapping[int, float]) -> None:
        """Insert the copies of all microbatches of some chunks, each of which takes so long."""
        forward: dict[Pair, int] = {}
        backward: dict[Pair, int] = {}
        for i, action in enumerate(self.actions):
            if action.chunk in copies and action.kind != WEIGHT:
                positions = forward if action.kind == FORWARD else backward
                positions[action.chunk, action.microbatch] = i
        reached = [0.0, *(interval.end for interval in self.times)]  # when a rank gets to each position
        out: dict[Pair, int] = {}
        free = 0.0
        for pair, i in forward.items():
            first = i + 1 + (i in self.joined)
            ended = max(free, reached[first]) + copies[pair[0]]
            position = first
            while position < backward[pair] and (self.times[position].start < _about(ended) or self._inside(position)):
                position += 1
            if position < backward[pair]:
                out[pair], free = position, ended
                reached[position] = max(reached[position], ended)
        latest = inf
        for pair, i in reversed(backward.items()):
            if pair not in out:
                continue
            position = last = i - self._inside(i)
            latest = min(latest, self.times[last].start) - copies[pair[0]]
            while position > out[pair] and (_about(reached[position]) > latest or self._inside(position)):
                position -= 1
            if position > out[pair]:
                self.offloads.setdefault(out[pair], []).append(Action(OFFLOAD, *pair))
                self.loads.setdefault(position, []).append(Action(LOAD, *pair))

    def _inside(self, position: int) -> bool:
        """Whether a position is between the actions of a pair."""
        return position - 1 in self.joined

    def order(self) -> tuple[Action, ...]:
        """The actions with the copies: first those that free memory, then those that take it, in order of their use."""
        order: list[Action] = []
        for i, action in enumerate(self.actions):
            order += reversed(self.offloads.get(i, ()))
            order += reversed(self.loads.get(i, ()))
            order.append(action)
        return tuple(order)

    def pairs(self) -> frozenset[int]:
        """The positions of pairs among these."""
        shifted, before = set(), 0
        for i in range(len(self.actions)):
            before += len(self.offloads.get(i, ())) + len(self.loads.get(i, ()))
            if i in self.joined:
                shifted.add(i + before)
        return frozenset(shifted)


def _about(seconds: float) -> float:
    """A time, less what may be rounding."""
    return seconds * (1 - 1e-9)
