"""A lower bound of what a step costs, whatever its order: the longest time that some rank is occupied, from its first
action's start to its last one's end.

Five things no lawful schedule can avoid, on a rank r, whose memory holds a limit L:

work    its F, B and W of all microbatches.
head    Before its first B it can run forwards only, as many as L holds, and that B starts no sooner than the first
        microbatch has gone from r to the last stage and back. Forwards that do not fit into this time delay the B, and
        with it the first B of the ranks before; leaving them out leaves r idle. What is better for the worst rank is
        found from the last rank to the first, over all combinations.
tail    After its last F it can run the B and W of what it then holds, at most L, and its last B starts no sooner than
        the last microbatch has gone to the last stage and back.
hold    A microbatch takes up memory on r for as long as it is away and W is not done: only so many pass in a time.
chain   Rank 0, if it is not r, waits until the first microbatch has reached r, until r has run all its F and B, and
        those W that L does not let it put off, and until the last gradient is back; then it has a W to run.

Where ranks have several stages, head counts only how many forwards L holds, and tail is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from attrs import evolve, field, frozen

from partita.compiler.schedules.conditions import SLACK, Memory, Prices

# Of more combinations than this, neighbours are merged into one that is as good as each in what it is better at.
_MOST = 64


def least_cost(placement: Sequence[Sequence[int]], microbatches: int, prices: Prices, memory: Memory | None) -> float:
    """The bound, in the unit of the prices. `placement[rank]` are a rank's stages by chunk."""
    if all(len(stages) == 1 for stages in placement):
        return fillings(placement, microbatches, prices, memory)[0][0]
    pipe = _Pipe(_split(prices), microbatches, memory)
    ranks = [_Rank(rank, tuple(sorted(stages))) for rank, stages in enumerate(placement)]
    return max(pipe.cost(each, max(0.0, pipe.trip(each) - pipe.forwards(each))) for each in ranks)


def fillings(
    placement: Sequence[Sequence[int]], microbatches: int, prices: Prices, memory: Memory | None
) -> list[tuple[float, tuple[int, ...]]]:
    """Ways to fill a pipeline of one stage a rank, best first: how many forwards each stage runs before its first B,
    with the bound that this has.
    """
    pipe = _Pipe(_split(prices), microbatches, memory)
    ranks = sorted((_Rank(rank, tuple(stages)) for rank, stages in enumerate(placement)), key=lambda each: each.stages)
    # From the end of a stage's first F to the start of its first B; the bound and the numbers of the stages from there.
    ways: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for stage in reversed(range(len(ranks))):
        rank, forward = ranks[stage], pipe.prices.forward[stage]
        most, tail = pipe.most(rank), pipe.tail(rank)
        found = []
        for away, worst, counts in ways:
            fitting = min(most, floor((forward + away) / forward)) if forward else most
            for count in {fitting, min(fitting + 1, most)}:
                start = max(forward + away, count * forward)
                idle = start - count * forward
                # With all forwards before the first B, the time before the last B is no other than that.
                rest = tail if count < microbatches else max(0.0, tail - idle)
                found.append((start, max(worst, pipe.cost(rank, idle, rest)), (count, *counts)))
        ways = _better(found)
        if stage:
            back = pipe.prices.onward[stage - 1] + pipe.prices.backward[stage] + pipe.prices.back[stage - 1]
            ways = [(start + back, worst, counts) for start, worst, counts in ways]
    return sorted((worst, counts) for _, worst, counts in ways)


def _split(prices: Prices) -> Prices:
    """With a W that takes no longer than what B leaves of a whole backward, so that both ways to run it are bounded."""
    backward = tuple(map(min, prices.backward, prices.whole))
    rest = (max(0.0, whole - b) for whole, b in zip(prices.whole, backward, strict=True))
    return evolve(prices, backward=backward, weight=tuple(map(min, prices.weight, rest)))


@frozen
class _Rank:
    """A rank and its stages in ascending order."""

    number: int
    stages: tuple[int, ...]


@frozen
class _Pipe:
    """What ranks cannot avoid, in seconds."""

    prices: Prices
    microbatches: int
    memory: Memory | None
    onto: list[float] = field(init=False)
    home: list[float] = field(init=False)

    @onto.default
    def _onto(self) -> list[float]:
        return self.prices.onto()

    @home.default
    def _home(self) -> list[float]:
        return self.prices.home()

    def cost(self, rank: _Rank, idle: float, tail: float = 0.0) -> float:
        """The bound by a rank that idles so long before its first B and before its last one."""
        prices, first = self.prices, rank.stages[0]
        weight = self.microbatches * sum(prices.weight[stage] for stage in rank.stages)
        busy = weight + idle
        busy += self.microbatches * sum(prices.forward[stage] + prices.backward[stage] for stage in rank.stages)
        found = max(busy + tail, self._holding(rank))
        if first:
            late = min(weight, self._count(rank, "weight") * max(prices.weight[stage] for stage in rank.stages))
            found = max(found, self.onto[first] + busy - late + self.home[first] + prices.weight[0])
        return found

    def _holding(self, rank: _Rank) -> float:
        """The bound by the time for which microbatches take up a rank's memory."""
        if self.memory is None:
            return 0.0
        held = 0.0
        for stage in rank.stages:
            away = self.trip(evolve(rank, stages=(stage,))) - self.prices.forward[stage] + self.prices.backward[stage]
            forward, weight = self.memory.forward[stage], self.memory.weight[stage]
            held += forward * away + min(forward, weight) * self.prices.weight[stage]
        limit = self.memory.limit[rank.number]
        return self.prices.forward[rank.stages[0]] + self.microbatches * held / (limit * (1 + SLACK)) if limit else 0.0

    def trip(self, rank: _Rank) -> float:
        """From the start of a microbatch's first F on a rank to the start of its first B there."""
        prices, first, last = self.prices, rank.stages[0], rank.stages[-1]
        there = self.onto[-1] - self.onto[first] + prices.forward[-1]
        return there + prices.backward[-1] + self.home[-1] - self.home[last] - prices.backward[last]

    def forwards(self, rank: _Rank) -> float:
        """The forwards that a rank can run before its first B."""
        seconds = [self.prices.forward[stage] for stage in rank.stages]
        return min(self.microbatches * sum(seconds), self._count(rank, "forward") * max(seconds))

    def most(self, rank: _Rank) -> int:
        """How many microbatches a rank of one stage can hold after F; one where it cannot hold any."""
        return max(1, int(self._count(rank, "forward")))

    def tail(self, rank: _Rank) -> float:
        """How long a rank of one stage idles after its last F, at least."""
        prices, (stage,) = self.prices, rank.stages
        away = self.trip(rank) - prices.forward[stage]
        backward, weight = prices.backward[stage], prices.weight[stage]
        most = 0.0
        for forwards in range(1, self.most(rank) + 1):
            # It holds so many of which B is to come, the last microbatch among them, and others of which W is.
            others = float(self.microbatches - forwards)
            if self.memory is not None and self.memory.weight[stage] > 0:
                left = self.memory.limit[rank.number] - forwards * self.memory.forward[stage]
                others = min(others, max(0.0, left * (1 + SLACK)) // self.memory.weight[stage])
            most = max(most, (forwards - 1) * backward + (forwards - 1 + others) * weight)
        return max(0.0, away - most)

    def _count(self, rank: _Rank, kept: str) -> float:
        """How many (stage, microbatch) pairs a rank can hold after F, or after B."""
        pairs = float(self.microbatches * len(rank.stages))
        if self.memory is None:
            return pairs
        sizes = self.memory.forward if kept == "forward" else self.memory.weight
        return min(pairs, self.memory.most(rank.number, min(sizes[stage] for stage in rank.stages)))


def _better(ways: list[tuple[float, float, tuple[int, ...]]]) -> list[tuple[float, float, tuple[int, ...]]]:
    """Those that no other one is better than in both times, merged where they are many."""
    front: list[tuple[float, float, tuple[int, ...]]] = []
    for way in sorted(ways):
        if not front or way[1] < front[-1][1]:
            front.append(way)
    step = -(-len(front) // _MOST)
    groups = [front[i : i + step] for i in range(0, len(front), step)]
    return [(group[0][0], group[-1][1], group[-1][2]) for group in groups]
