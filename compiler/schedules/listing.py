"""List scheduling: at each moment a rank that is free runs the ready action with the best priority.

Backwards before forwards, or forwards before backwards, and W where neither can run. Of forwards the latest stage goes
first, of backwards the earliest: whichever is nearest to its end.

The greedy constructions of Qi et al. (arXiv 2401.10241 §3.1, and 2405.15362) differ in two things. After its first B a
rank takes a forward and a backward in turn (`TURNS`). And W fills only gaps that it fits into, unless a forward waits
for the memory that it gives back (`patient`): an input that is known to come sooner is waited for.

A forward runs only where the memory holds it beside the same microbatch's later stages on its rank. So the oldest
microbatch can always go on: ranks never wait for each other, whatever the memory is, if only it holds one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from attrs import define, field

from partita.compiler.schedules.conditions import Memory, Placement, Prices
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, WEIGHT, WHOLE_BACKWARD, Action

# Forwards and backwards in turn.
TURNS = "turns"


def list_orders(
    placement: Placement,
    microbatches: int,
    prices: Prices,
    memory: Memory,
    prefer: str,
    split: bool,
    patient: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """The orders of all ranks; with `split`, of B and W. `prefer` is F, B or TURNS."""
    backward = BACKWARD if split else WHOLE_BACKWARD
    first = (FORWARD, backward) if prefer == FORWARD else (backward, FORWARD)
    kinds = (*first, WEIGHT) if split else first
    return _Pipeline(placement, microbatches, prices, memory, kinds, backward, prefer == TURNS, patient).run()


@define(eq=False)
class _Pipeline:
    """The pipeline while it is scheduled: for each kind and stage, how many microbatches have run, and when the inputs
    of each are there.

    `held` is what each rank's memory holds, where a microbatch takes up from the start what it will take up at most.
    """

    placement: Placement
    microbatches: int
    prices: Prices
    memory: Memory
    kinds: Sequence[str]
    backward: str
    turns: bool
    patient: bool
    orders: list[list[Action]] = field(init=False)
    held: list[float] = field(init=False)
    ran: dict[tuple[str, int], int] = field(init=False)
    there: dict[tuple[str, int], list[float]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        stages = range(len(self.prices.forward))
        self.orders = [[] for _ in self.placement]
        self.held = [0.0] * len(self.placement)
        self.ran = {(kind, stage): 0 for kind in self.kinds for stage in stages}
        self.there = {key: [] for key in self.ran}
        self.there[FORWARD, 0] = [0.0] * self.microbatches

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Schedule everything."""
        free = [0.0] * len(self.placement)
        home = {stage: rank for rank, stages in enumerate(self.placement) for stage in stages}
        # Moments at which a rank may find something to run: when it is free, and when an input arrives.
        moments = [(0.0, rank) for rank in range(len(self.placement))]
        while moments:
            now, rank = heappop(moments)
            chosen = next(self._ready(rank, now), None) if now >= free[rank] else None
            if chosen is None:
                continue
            kind, chunk = chosen
            free[rank] = now + self._take(rank, kind, chunk)
            heappush(moments, (free[rank], rank))
            for stage, arrival in self._arrivals(kind, self.placement[rank][chunk], free[rank]):
                heappush(moments, (arrival, home[stage]))
        return tuple(map(tuple, self.orders))

    def _ready(self, rank: int, now: float) -> Iterator[tuple[str, int]]:
        """What a rank can run now, best first: kind and chunk."""
        stages = self.placement[rank]
        for kind in self._kinds(rank):
            if kind == WEIGHT and self.patient and self._soon(rank, now):
                return
            for stage in sorted(stages, reverse=kind == FORWARD):
                there, m = self.there[kind, stage], self.ran[kind, stage]
                if m < len(there) and there[m] <= now:
                    needed = self.memory.one([other for other in stages if other >= stage])
                    if kind != FORWARD or self.memory.holds(rank, self.held[rank] + needed):
                        yield kind, stages.index(stage)

    def _kinds(self, rank: int) -> Sequence[str]:
        """The kinds of actions, best first."""
        if not self.turns:
            return self.kinds
        before = next((each.kind for each in reversed(self.orders[rank]) if each.kind != WEIGHT), FORWARD)
        if before == self.backward:
            return (FORWARD, self.backward, *self.kinds[2:])
        return self.kinds

    def _soon(self, rank: int, now: float) -> bool:
        """Whether a forward or a backward that memory holds can run sooner than a W would be done."""
        stages = self.placement[rank]
        for stage in stages:
            end = now + self.prices.weight[stage]
            for kind in (FORWARD, self.backward):
                there, m = self.there[kind, stage], self.ran[kind, stage]
                if m < len(there) and now < there[m] < end:
                    needed = self.memory.one([other for other in stages if other >= stage])
                    if kind != FORWARD or self.memory.holds(rank, self.held[rank] + needed):
                        return True
        return False

    def _take(self, rank: int, kind: str, chunk: int) -> float:
        """Put an action at the end of a rank's order. Its seconds."""
        stage = self.placement[rank][chunk]
        self.orders[rank].append(Action(kind, chunk, self.ran[kind, stage]))
        self.ran[kind, stage] += 1
        most, prices = self.memory.one([stage]), self.prices
        seconds, change = {
            FORWARD: (prices.forward, most),
            BACKWARD: (prices.backward, self.memory.weight[stage] - most),
            WEIGHT: (prices.weight, -self.memory.weight[stage]),
            WHOLE_BACKWARD: (prices.whole, -most),
        }[kind]
        self.held[rank] += change
        return seconds[stage]

    def _arrivals(self, kind: str, stage: int, end: float) -> Iterator[tuple[int, float]]:
        """What an action that ends lets run, noted down: the stage, and from when on."""
        prices, last = self.prices, len(self.prices.forward) - 1
        follows = []
        if kind == FORWARD:
            onward = (FORWARD, stage + 1, end + prices.onward[stage]) if stage < last else (self.backward, stage, end)
            follows.append(onward)
        elif kind != WEIGHT and stage > 0:
            follows.append((self.backward, stage - 1, end + prices.back[stage - 1]))
        if kind == BACKWARD:
            follows.append((WEIGHT, stage, end))
        for which, where, arrival in follows:
            self.there[which, where].append(arrival)
            yield where, arrival
