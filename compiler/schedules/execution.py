"""From a plan to an order: each rank follows its plan, and fills the time that it would wait.

A rank runs the next F or B of its plan as soon as it can. While that has to wait for its input, the rank runs another F
or B that is ready, or a W; W also runs where the next F needs its memory. An F is run ahead of the plan only if the
rest of the plan still fits in memory with each W right after its B. So a plan that fits never gets stuck: what a rank
has run is a part of the plan, and what it runs ahead is ready.

Waiting is worth it where the next action would start soon: `WaitPolicy` says how soon.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf

from attrs import define, field, frozen

from partita.compiler.schedules.conditions import SLACK, Memory, StageTimes
from partita.compiler.schedules.estimate import Codes, code
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, KINDS, WEIGHT

_F, _B, _W = (KINDS.index(kind) for kind in (FORWARD, BACKWARD, WEIGHT))


@frozen
class WaitPolicy:
    """How much of its own time an action may delay the next one of the plan by: an F or B of `1 - ahead` of it, and a W
    of `1 - weight`.
    """

    ahead: float
    weight: float


def fits(plan: Sequence[Codes], placement: Sequence[Sequence[int]], memory: Memory) -> bool:
    """Whether a plan fits in memory with each W right after its B."""
    for rank, (codes, stages) in enumerate(zip(plan, placement, strict=True)):
        changes = _changes(stages, memory)
        if not memory.holds(rank, max(accumulate(changes[each] for each in codes))):
            return False
    return True


def most_held(codes: Codes) -> int:
    """The most microbatches that a rank's chunks hold at once under a plan with each W right after its B."""
    return max(accumulate(1 if each & 3 == _F else -1 for each in codes))


def executed(
    plan: Sequence[Codes],
    placement: Sequence[Sequence[int]],
    microbatches: int,
    prices: StageTimes,
    memory: Memory,
    wait_policy: WaitPolicy,
) -> list[Codes]:
    """The orders of all ranks, from a plan that fits in memory."""
    return _Execution(plan, placement, microbatches, prices, memory, wait_policy).run()


def _changes(stages: Sequence[int], memory: Memory) -> list[float]:
    """The change of a rank's memory by code, where a B is followed by its W, and a microbatch is charged its peak."""
    changes = [0.0] * (len(KINDS) * len(stages))
    for chunk, stage in enumerate(stages):
        peak = memory.one([stage])
        changes[code(FORWARD, chunk)], changes[code(BACKWARD, chunk)] = peak, -peak
    return changes


@define(eq=False)
class _RankState:
    """A rank: its plan, and what of it has run."""

    plan: Codes
    seconds: list[float]
    changes: list[float]
    kept: list[float]  # what is left after B, by code of B
    limit: float
    arrivals: list[list[float]]  # when the inputs are there, by code
    positions: list[list[int]]  # of the actions in the plan, by code
    order: list[int] = field(factory=list)
    pending: list[int] = field(factory=list)  # codes of the W that are left to run
    codes: tuple[int, ...] = field(init=False)  # of F and B
    ran: list[int] = field(init=False)
    gone: bytearray = field(init=False)
    head: int = 0
    free: float = 0.0
    held: float = 0.0
    waiting: float = 0.0  # the part of `held` that W would free

    def __attrs_post_init__(self) -> None:
        self.codes = tuple(sorted(set(self.plan)))
        self.ran = [0] * len(self.seconds)
        self.gone = bytearray(len(self.plan))

    def ready(self, which: int) -> float:
        """When the next action of a code could start."""
        arrivals, number = self.arrivals[which], self.ran[which]
        return arrivals[number] if number < len(arrivals) else inf

    def choose(self, now: float, wait_policy: WaitPolicy) -> int | None:
        """The code of the action to run now."""
        while self.head < len(self.plan) and self.gone[self.head]:
            self.head += 1
        if self.head == len(self.plan):
            return self.pending[0] if self.pending else None
        following = self.plan[self.head]
        wait = self.ready(following) - now
        if wait <= 0:
            if following & 3 == _F and self.held + self.changes[following] > self.limit and self.pending:
                return self.pending[0]
            return following
        best, where = None, len(self.plan)
        for each in self.codes:
            number, arrivals = self.ran[each], self.arrivals[each]
            if number < len(arrivals) and arrivals[number] <= now and wait >= wait_policy.ahead * self.seconds[each]:
                position = self.positions[each][number]
                if position < where and self._may_go(each, position):
                    best, where = each, position
        if best is None and self.pending and wait >= wait_policy.weight * self.seconds[self.pending[0]]:
            return self.pending[0]
        return best

    def _may_go(self, which: int, position: int) -> bool:
        """Whether the rest of the plan fits in memory if an action goes ahead."""
        change = self.changes[which]
        if change <= 0:
            return True
        if self.held + change > self.limit:
            return False
        level = self.held - self.waiting + change
        for i in range(self.head, position):
            if not self.gone[i]:
                level += self.changes[self.plan[i]]
                if level > self.limit:
                    return False
        return True

    def take(self, which: int) -> None:
        """Run an action."""
        self.order.append(which)
        kind = which & 3
        if kind == _W:
            self.pending.pop(0)
            residual = self.kept[which]
            self.held, self.waiting = self.held - residual, self.waiting - residual
        else:
            self.gone[self.positions[which][self.ran[which]]] = 1
            self.held += self.changes[which]
            if kind == _B:
                residual = self.kept[which - _B + _W]
                self.pending.append(which - _B + _W)
                self.held, self.waiting = self.held + residual, self.waiting + residual
        self.ran[which] += 1


@define(eq=False)
class _Execution:
    """The execution of a plan by all ranks."""

    plan: Sequence[Codes]
    placement: Sequence[Sequence[int]]
    microbatches: int
    prices: StageTimes
    memory: Memory
    wait_policy: WaitPolicy

    def run(self) -> list[Codes]:
        """The orders."""
        ranks = [self._rank(rank) for rank in range(len(self.placement))]
        followers = self._followers(ranks)
        first = next(rank for rank, stages in enumerate(self.placement) if 0 in stages)
        chunk = self.placement[first].index(0)
        ranks[first].arrivals[code(FORWARD, chunk)].extend([0.0] * self.microbatches)
        # Moments at which a rank may find something to run.
        moments = [(0.0, number) for number in range(len(ranks))]
        heapify(moments)
        while moments:
            now, number = heappop(moments)
            rank = ranks[number]
            if now < rank.free:
                continue
            chosen = rank.choose(now, self.wait_policy)
            if chosen is None:
                start = rank.ready(rank.plan[rank.head]) if rank.head < len(rank.plan) else inf
                if start < inf:
                    heappush(moments, (start, number))
                continue
            rank.take(chosen)
            rank.free = now + rank.seconds[chosen]
            heappush(moments, (rank.free, number))
            for other, which, seconds in followers[number][chosen]:
                arrival = rank.free + seconds
                ranks[other].arrivals[which].append(arrival)
                heappush(moments, (arrival, other))
        return [tuple(rank.order) for rank in ranks]

    def _rank(self, number: int) -> _RankState:
        stages, plan = self.placement[number], self.plan[number]
        prices, memory = self.prices, self.memory
        seconds, residuals = [], []
        for stage in stages:
            seconds += [prices.forward[stage], prices.backward[stage], prices.weight[stage], prices.whole[stage]]
            residuals += [0.0, 0.0, memory.weight[stage], 0.0]
        positions: list[list[int]] = [[] for _ in seconds]
        for position, each in enumerate(plan):
            positions[each].append(position)
        limit = memory.limit[number] * (1 + SLACK)
        arrivals: list[list[float]] = [[] for _ in seconds]
        return _RankState(plan, seconds, _changes(stages, memory), residuals, limit, arrivals, positions)

    def _followers(self, ranks: Sequence[_RankState]) -> list[list[list[tuple[int, int, float]]]]:
        """What the end of an action makes ready, by rank and code: a rank, a code, and the seconds that it takes."""
        at = {stage: (rank, chunk) for rank, stages in enumerate(self.placement) for chunk, stage in enumerate(stages)}
        last, prices = len(at) - 1, self.prices
        followers: list[list[list[tuple[int, int, float]]]] = [[[] for _ in rank.seconds] for rank in ranks]
        for stage, (rank, chunk) in at.items():
            if stage < last:
                other, its = at[stage + 1]
                followers[rank][code(FORWARD, chunk)].append((other, code(FORWARD, its), prices.send_forward[stage]))
            else:
                followers[rank][code(FORWARD, chunk)].append((rank, code(BACKWARD, chunk), 0.0))
            if stage:
                other, its = at[stage - 1]
                followers[rank][code(BACKWARD, chunk)].append(
                    (other, code(BACKWARD, its), prices.send_backward[stage - 1])
                )
        return followers
