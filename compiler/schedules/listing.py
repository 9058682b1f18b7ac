"""List scheduling: whenever a rank is free, it runs the ready action with the highest priority.

Backwards go before forwards or vice versa, and W runs when neither can. Among forwards the latest stage goes first,
among backwards the earliest: the one closest to completion.

The greedy constructions of Qi et al. (arXiv 2401.10241 §3.1, and 2405.15362) differ in two ways. After its first B a
rank alternates forwards and backwards (`ALTERNATING`). And with `patient`, W fills only gaps that it fits into: a rank
waits for an input that will arrive sooner, unless that forward needs the memory that W frees.

A forward runs only if memory holds it together with the same microbatch's later stages on its rank. So the oldest
microbatch can always proceed, and ranks cannot deadlock as long as memory holds one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from attrs import define, field

from partita.compiler.schedules.conditions import Memory, Placement, StageTimes
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, FULL_BACKWARD, WEIGHT, Action, ranks_of

# Forwards and backwards alternate.
ALTERNATING = "alternating"


def list_orders(
    placement: Placement,
    microbatches: int,
    prices: StageTimes,
    memory: Memory,
    prefer: str,
    split: bool,
    patient: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """The orders of all ranks; with `split`, backwards are B and W. `prefer` is F, B or ALTERNATING."""
    backward = BACKWARD if split else FULL_BACKWARD
    first = (FORWARD, backward) if prefer == FORWARD else (backward, FORWARD)
    kinds = (*first, WEIGHT) if split else first
    return _Pipeline(placement, microbatches, prices, memory, kinds, backward, prefer == ALTERNATING, patient).run()


@define(eq=False)
class _Pipeline:
    """The state of the scheduler: by kind and stage, how many microbatches `ran`, and when the inputs of each arrive
    (`there`).

    `held` is what each rank's memory holds; a microbatch is charged its peak from the start.
    """

    placement: Placement
    microbatches: int
    prices: StageTimes
    memory: Memory
    kinds: Sequence[str]
    backward: str
    alternating: bool
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
        """Runs the scheduler to the end and returns the orders."""
        free = [0.0] * len(self.placement)
        rank_of = ranks_of(self.placement)
        # Events at which a rank may find something to run: it becomes free, or an input arrives.
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
                heappush(moments, (arrival, rank_of[stage]))
        return tuple(map(tuple, self.orders))

    def _ready(self, rank: int, now: float) -> Iterator[tuple[str, int]]:
        """The (kind, chunk) that a rank can run now, best first."""
        stages = self.placement[rank]
        for kind in self._kinds(rank):
            if kind == WEIGHT and self.patient and self._soon(rank, now):
                return
            for stage in sorted(stages, reverse=kind == FORWARD):
                arrivals, m = self.there[kind, stage], self.ran[kind, stage]
                if m < len(arrivals) and arrivals[m] <= now:
                    needed = self.memory.one([other for other in stages if other >= stage])
                    if kind != FORWARD or self.memory.holds(rank, self.held[rank] + needed):
                        yield kind, stages.index(stage)

    def _kinds(self, rank: int) -> Sequence[str]:
        """The kinds of actions, best first."""
        if not self.alternating:
            return self.kinds
        before = next((each.kind for each in reversed(self.orders[rank]) if each.kind != WEIGHT), FORWARD)
        if before == self.backward:
            return (FORWARD, self.backward, *self.kinds[2:])
        return self.kinds

    def _soon(self, rank: int, now: float) -> bool:
        """Whether a forward or a backward that fits in memory could start before a W would end."""
        stages = self.placement[rank]
        for stage in stages:
            end = now + self.prices.weight[stage]
            for kind in (FORWARD, self.backward):
                arrivals, m = self.there[kind, stage], self.ran[kind, stage]
                if m < len(arrivals) and now < arrivals[m] < end:
                    needed = self.memory.one([other for other in stages if other >= stage])
                    if kind != FORWARD or self.memory.holds(rank, self.held[rank] + needed):
                        return True
        return False

    def _take(self, rank: int, kind: str, chunk: int) -> float:
        """Appends an action to a rank's order and returns its seconds."""
        stage = self.placement[rank][chunk]
        self.orders[rank].append(Action(kind, chunk, self.ran[kind, stage]))
        self.ran[kind, stage] += 1
        peak, prices = self.memory.one([stage]), self.prices
        seconds, change = {
            FORWARD: (prices.forward, peak),
            BACKWARD: (prices.backward, self.memory.weight[stage] - peak),
            WEIGHT: (prices.weight, -self.memory.weight[stage]),
            FULL_BACKWARD: (prices.whole, -peak),
        }[kind]
        self.held[rank] += change
        return seconds[stage]

    def _arrivals(self, kind: str, stage: int, end: float) -> Iterator[tuple[int, float]]:
        """Records and yields what the end of an action makes ready: the stage, and when."""
        prices, last = self.prices, len(self.prices.forward) - 1
        follows = []
        if kind == FORWARD:
            send_forward = (
                (FORWARD, stage + 1, end + prices.send_forward[stage]) if stage < last else (self.backward, stage, end)
            )
            follows.append(send_forward)
        elif kind != WEIGHT and stage > 0:
            follows.append((self.backward, stage - 1, end + prices.send_backward[stage - 1]))
        if kind == BACKWARD:
            follows.append((WEIGHT, stage, end))
        for which, where, arrival in follows:
            self.there[which, where].append(arrival)
            yield where, arrival
