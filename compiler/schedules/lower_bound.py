"""A lower bound on the cost of a step under any schedule, where the cost is the longest time that any rank is occupied,
from the start of its first action to the end of its last.

Five terms that no valid schedule can avoid, for a rank r with a memory limit L:

work    Its F, B and W of all microbatches.
head    Before its first B it can run only forwards, as many as fit in L, and that B starts no sooner than the first
        microbatch has gone from r to the last stage and back. Forwards that do not fit into this time delay the B, and
        with it the first B of earlier ranks; omitting them leaves r idle. The choice that is best for the worst rank is
        found from the last rank to the first, over all combinations.
tail    After its last F it can run only the B and W of what it then holds, at most L, and its last B starts no sooner
        than the last microbatch has gone to the last stage and back.
hold    A microbatch occupies memory on r until it has come back and its W is done, which limits the throughput.
chain   Rank 0, if it is not r, waits until the first microbatch has reached r, until r has run all its F and B and the
        W that L does not let it defer, and until the last gradient is back; then it still has a W to run.

If ranks have several stages, head counts only how many forwards fit in L, and tail is omitted.

The bound on the end of the step (`whole`) adds the time after which the first microbatch can reach r at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from attrs import evolve, field, frozen

from partita.compiler.schedules.conditions import SLACK, Memory, StageTimes

# Beyond this number of combinations, adjacent ones are merged into one with the smaller value of each time.
_MOST = 64


def lower_bound(
    placement: Sequence[Sequence[int]],
    microbatches: int,
    prices: StageTimes,
    memory: Memory | None,
    whole: bool = False,
) -> float:
    """The bound, in the unit of `prices`. `placement[rank]` are a rank's stages by chunk. With `whole` it is one on the
    end of the last action.
    """
    if all(len(stages) == 1 for stages in placement):
        return fillings(placement, microbatches, prices, memory, whole)[0][0]
    pipe = _Bounds(_split(prices), microbatches, memory, whole)
    ranks = [_RankBound(rank, tuple(sorted(stages))) for rank, stages in enumerate(placement)]
    return max(pipe.cost(each, max(0.0, pipe.trip(each) - pipe.forwards(each))) for each in ranks)


def fillings(
    placement: Sequence[Sequence[int]],
    microbatches: int,
    prices: StageTimes,
    memory: Memory | None,
    whole: bool = False,
) -> list[tuple[float, tuple[int, ...]]]:
    """Bounds, and the number of forwards that each stage runs before its first B, in a pipeline of one stage per rank;
    best first.
    """
    pipe = _Bounds(_split(prices), microbatches, memory, whole)
    ranks = sorted(
        (_RankBound(rank, tuple(stages)) for rank, stages in enumerate(placement)), key=lambda each: each.stages
    )
    # The time from the end of a stage's first F to the start of its first B, the bound, and the later stages' counts.
    starts: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for stage in reversed(range(len(ranks))):
        rank, forward = ranks[stage], pipe.prices.forward[stage]
        limit, tail = pipe.most(rank), pipe.tail(rank)
        candidates = []
        for away, worst, counts in starts:
            fitting = min(limit, floor((forward + away) / forward)) if forward else limit
            for count in {fitting, min(fitting + 1, limit)}:
                start = max(forward + away, count * forward)
                idle = start - count * forward
                # If all forwards run before the first B, that idle time is part of the tail's.
                rest = tail if count < microbatches else max(0.0, tail - idle)
                candidates.append((start, max(worst, pipe.cost(rank, idle, rest)), (count, *counts)))
        starts = _pareto_front(candidates)
        if stage:
            trip = (
                pipe.prices.send_forward[stage - 1] + pipe.prices.backward[stage] + pipe.prices.send_backward[stage - 1]
            )
            starts = [(start + trip, worst, counts) for start, worst, counts in starts]
    return sorted((worst, counts) for _, worst, counts in starts)


def _split(prices: StageTimes) -> StageTimes:
    """With B + W at most BW, so that the bound holds for split and for full backwards."""
    backward = tuple(map(min, prices.backward, prices.whole))
    rest = (max(0.0, whole - b) for whole, b in zip(prices.whole, backward, strict=True))
    return evolve(prices, backward=backward, weight=tuple(map(min, prices.weight, rest)))


@frozen
class _RankBound:
    """A rank and its stages in ascending order."""

    number: int
    stages: tuple[int, ...]


@frozen
class _Bounds:
    """The terms of the bound for each rank, in seconds."""

    prices: StageTimes
    microbatches: int
    memory: Memory | None
    whole: bool
    from_first: list[float] = field(init=False)
    to_first: list[float] = field(init=False)

    @from_first.default
    def _from_first(self) -> list[float]:
        return self.prices.from_first()

    @to_first.default
    def _to_first(self) -> list[float]:
        return self.prices.to_first()

    def cost(self, rank: _RankBound, idle: float, tail: float = 0.0) -> float:
        """The bound from a rank that idles for `idle` before its first B and for `tail` before its last."""
        prices, first = self.prices, rank.stages[0]
        weight = self.microbatches * sum(prices.weight[stage] for stage in rank.stages)
        busy = weight + idle
        busy += self.microbatches * sum(prices.forward[stage] + prices.backward[stage] for stage in rank.stages)
        bound = max(busy + tail, self._holding(rank))
        if self.whole:
            bound += self.from_first[first]
        if first:
            late = min(weight, self._count(rank, "weight") * max(prices.weight[stage] for stage in rank.stages))
            bound = max(bound, self.from_first[first] + busy - late + self.to_first[first] + prices.weight[0])
        return bound

    def _holding(self, rank: _RankBound) -> float:
        """The bound from the time for which microbatches occupy a rank's memory (hold)."""
        if self.memory is None:
            return 0.0
        occupancy = 0.0
        for stage in rank.stages:
            away = self.trip(evolve(rank, stages=(stage,))) - self.prices.forward[stage] + self.prices.backward[stage]
            forward, weight = self.memory.forward[stage], self.memory.weight[stage]
            occupancy += forward * away + min(forward, weight) * self.prices.weight[stage]
        limit = self.memory.limit[rank.number]
        return (
            self.prices.forward[rank.stages[0]] + self.microbatches * occupancy / (limit * (1 + SLACK))
            if limit
            else 0.0
        )

    def trip(self, rank: _RankBound) -> float:
        """The least time from the start of a microbatch's first F on a rank to the start of its first B there."""
        prices, first, last = self.prices, rank.stages[0], rank.stages[-1]
        outbound = self.from_first[-1] - self.from_first[first] + prices.forward[-1]
        return outbound + prices.backward[-1] + self.to_first[-1] - self.to_first[last] - prices.backward[last]

    def forwards(self, rank: _RankBound) -> float:
        """The most seconds of forwards that a rank can run before its first B."""
        seconds = [self.prices.forward[stage] for stage in rank.stages]
        return min(self.microbatches * sum(seconds), self._count(rank, "forward") * max(seconds))

    def most(self, rank: _RankBound) -> int:
        """How many microbatches a rank of one stage can hold after F, at least 1."""
        return max(1, int(self._count(rank, "forward")))

    def tail(self, rank: _RankBound) -> float:
        """The least time that a rank of one stage idles after its last F."""
        prices, (stage,) = self.prices, rank.stages
        away = self.trip(rank) - prices.forward[stage]
        backward, weight = prices.backward[stage], prices.weight[stage]
        busy = 0.0
        for forwards in range(1, self.most(rank) + 1):
            # It holds `forwards` microbatches that await B, including the last, and others that await W.
            others = float(self.microbatches - forwards)
            if self.memory is not None and self.memory.weight[stage] > 0:
                left = self.memory.limit[rank.number] - forwards * self.memory.forward[stage]
                others = min(others, max(0.0, left * (1 + SLACK)) // self.memory.weight[stage])
            busy = max(busy, (forwards - 1) * backward + (forwards - 1 + others) * weight)
        return max(0.0, away - busy)

    def _count(self, rank: _RankBound, kind: str) -> float:
        """How many (stage, microbatch) pairs a rank can hold after F, or after B."""
        pairs = float(self.microbatches * len(rank.stages))
        if self.memory is None:
            return pairs
        sizes = self.memory.forward if kind == "forward" else self.memory.weight
        return min(pairs, self.memory.most(rank.number, min(sizes[stage] for stage in rank.stages)))


def _pareto_front(starts: list[tuple[float, float, tuple[int, ...]]]) -> list[tuple[float, float, tuple[int, ...]]]:
    """The Pareto front of both times, merged down to _MOST."""
    front: list[tuple[float, float, tuple[int, ...]]] = []
    for start in sorted(starts):
        if not front or start[1] < front[-1][1]:
            front.append(start)
    step = -(-len(front) // _MOST)
    groups = [front[i : i + step] for i in range(0, len(front), step)]
    return [(group[0][0], group[-1][1], group[-1][2]) for group in groups]
