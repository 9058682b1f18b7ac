"""From F and B to an order: each W where it costs least.

A plan is each rank's F and B (or BW) in the order in which they run. As the rank waits for an input, it runs every
pending W that ends in time. What is left of the wait is too short for a W: either the rank idles, or it runs one all
the same and delays what other ranks wait for. It idles while its idle time is below an allowance. So ranks that have
time to lose keep the pipeline punctual, and the busiest rank fills its gaps: Qi et al., Zero Bubble Pipeline
Parallelism, arXiv 2401.10241 §3.1, whose allowance is what the ranks have idled so far. A W also runs where memory
needs it, and all others at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import define, field, frozen

from partita.compiler.schedules.conditions import SLACK, Memory
from partita.compiler.schedules.estimate import VISIT, Codes, Estimate
from partita.compiler.schedules.schedule import BACKWARD, FULL_BACKWARD, KINDS, WEIGHT

_B, _W, _BW = (KINDS.index(kind) for kind in (BACKWARD, WEIGHT, FULL_BACKWARD))


@frozen
class Allowance:
    """For how many seconds each rank may idle before a W delays others, and the part of a W's time that a wait must
    have for one to run in it nevertheless.
    """

    idle: tuple[float, ...]
    part: float


@define(eq=False)
class GapFilling:
    """Makes orders of plans for the placement of an estimate, within memory."""

    estimate: Estimate
    memory: Memory
    _changes: list[list[float]] = field(init=False)  # of a rank's memory, by code
    _limits: list[float] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._changes = []
        for stages in self.estimate.placement:
            by_kind = [self.memory.changes(stage) for stage in stages]
            self._changes.append([each[kind] for each in by_kind for kind in KINDS])
        self._limits = [limit * (1 + SLACK) for limit in self.memory.limit]

    def within(self, rank: int, order: Codes) -> bool:
        """Whether a rank's order fits in memory, and each W follows its B and each B its F."""
        changes, limit, usage = self._changes[rank], self._limits[rank], 0.0
        ran = [0] * len(changes)
        for each in order:
            usage += changes[each]
            if usage > limit:
                return False
            ran[each] += 1
            kind = each & 3
            if kind and ran[each] > ran[each - (kind if kind == _BW else 1)]:
                return False
        return True

    def orders(self, plan: Sequence[Codes], allowance: Allowance) -> list[Codes] | None:
        """The orders of all ranks; None if they deadlock, or if memory does not hold the plan."""
        ranks = [_RankGaps(line) for line in plan]
        ends: list[list[float]] = [[] for _ in range(2 * sum(map(len, self.estimate.placement)))]
        waiting = [-1] * len(ends)  # the rank that waits for the next entry of a list
        ready = deque(range(len(ranks)))
        self.estimate.steps += VISIT * len(ranks)
        while ready:
            number = ready.popleft()
            rank = ranks[number]
            begin = len(rank.order)
            if not self._advance(rank, number, allowance, ends, waiting, ready):
                return None
            self.estimate.steps += len(rank.order) - begin + VISIT
        if any(rank.position < len(rank.plan) for rank in ranks):
            return None
        return [(*rank.order, *rank.pending) for rank in ranks]

    def _advance(
        self,
        rank: _RankGaps,
        number: int,
        allowance: Allowance,
        ends: list[list[float]],
        waiting: list[int],
        ready: deque[int],
    ) -> bool:
        """Runs a rank until it has to wait for another one. Returns False if its memory is too small."""
        seconds, sources, way, targets = self.estimate.tables[number]
        changes, limit = self._changes[number], self._limits[number]
        idle, part = allowance.idle[number], allowance.part
        plan, order, pending = rank.plan, rank.order, rank.pending
        clock, usage, lost = rank.clock, rank.held, rank.lost
        for position in range(rank.position, len(plan)):
            each = plan[position]
            own, source, arrival = ends[targets[each]], sources[each], 0.0
            if source >= 0:
                source_ends, number_ = ends[source], len(own)
                if number_ >= len(source_ends):
                    waiting[source] = number
                    break
                arrival = source_ends[number_] + way[each]
            while pending and (clock + seconds[pending[0]] <= arrival * (1 + SLACK) or usage + changes[each] > limit):
                weight = pending.popleft()
                order.append(weight)
                clock += seconds[weight]
                usage += changes[weight]
            if usage + changes[each] > limit:
                return False
            if position and arrival > clock and pending:
                weight = pending[0]
                if lost + arrival - clock > idle and arrival - clock >= part * seconds[weight]:
                    order.append(pending.popleft())
                    clock += seconds[weight]
                    usage += changes[weight]
            if arrival > clock:
                lost += arrival - clock if position else 0.0
                clock = arrival
            clock += seconds[each]
            own.append(clock)
            order.append(each)
            usage += changes[each]
            if each & 3 == _B:
                pending.append(each - _B + _W)
            if waiting[targets[each]] >= 0:
                ready.append(waiting[targets[each]])
                waiting[targets[each]] = -1
        else:
            position = len(plan)
        rank.position, rank.clock, rank.held, rank.lost = position, clock, usage, lost
        return True


@define(eq=False)
class _RankGaps:
    """A rank, and what of its plan has run."""

    plan: Codes
    order: list[int] = field(factory=list)
    pending: deque[int] = field(factory=deque)  # W that are left to run
    position: int = 0
    clock: float = 0.0
    held: float = 0.0
    lost: float = 0.0
