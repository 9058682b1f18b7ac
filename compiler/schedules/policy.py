"""`policy`: list scheduling. At each moment a rank that is free runs the ready action with the best priority.

It never idles while it has something to run and is allowed to. So it is easy to say and rarely the best: it may run an
action now that delays another one which arrives a moment later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from attrs import define, field

from partita.compiler.schedules.conditions import Conditions, Prices, prices
from partita.compiler.schedules.schedule import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    WHOLE_BACKWARD,
    Action,
    Schedule,
    loop_placement,
    peak_live,
    v_placement,
)


def policy(
    ranks: int,
    chunks: int,
    microbatches: int,
    conditions: Conditions,
    prefer: str = "backward",
    in_flight: int | None = None,
    split_backward: bool = False,
    placement: str = "loop",
) -> Schedule:
    """Backwards before forwards, or (`prefer`) forwards before backwards, and W where neither can run. Of forwards the
    latest stage goes first, of backwards the earliest: whichever is nearest to its end.

    `in_flight` bounds the live activations of a rank (M·V unless given). A forward runs only where room is left for the
    same microbatch's later stages on that rank, so that the oldest microbatch can always go on: no bound makes ranks
    wait for each other. `placement`: `loop` or `v`, chunk by chunk down the ranks and up again.

    Raises ValueError for a bound that does not hold one microbatch.
    """
    if in_flight is not None and in_flight < chunks:
        raise ValueError(f"in_flight = {in_flight} does not hold one microbatch on {chunks} chunks")
    table = loop_placement(ranks, chunks) if placement == "loop" else v_placement(ranks, chunks)
    room = in_flight if in_flight is not None else microbatches * chunks
    whole = not split_backward
    order = FORWARD, (WHOLE_BACKWARD if whole else BACKWARD)
    kinds = (*(order if prefer == "forward" else order[::-1]), *(() if whole else (WEIGHT,)))
    orders = _List(table, microbatches, prices(conditions, table), kinds, room).run()
    return Schedule("policy", microbatches, table, orders, tuple(map(peak_live, orders)))


@define(eq=False)
class _List:
    """The pipeline while it is scheduled: for each stage and kind, how many microbatches have run, and when the inputs
    of each are there.
    """

    placement: Sequence[Sequence[int]]
    microbatches: int
    prices: Prices
    kinds: Sequence[str]
    room: int
    orders: list[list[Action]] = field(init=False)
    live: list[int] = field(init=False)
    ran: dict[tuple[str, int], int] = field(init=False)
    there: dict[tuple[str, int], list[float]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        count = sum(map(len, self.placement))
        self.orders = [[] for _ in self.placement]
        self.live = [0] * len(self.placement)
        self.ran = {(kind, stage): 0 for kind in self.kinds for stage in range(count)}
        self.there = {key: [] for key in self.ran}
        self.there[FORWARD, 0] = [0.0] * self.microbatches

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """The orders of all ranks."""
        free = [0.0] * len(self.placement)
        # Moments at which a rank may find something to run: when it is free, and when an input arrives.
        moments = [(0.0, rank) for rank in range(len(self.placement))]
        home = {stage: rank for rank, stages in enumerate(self.placement) for stage in stages}
        while moments:
            now, rank = heappop(moments)
            if now < free[rank]:
                continue  # it will look again when it is free
            chosen = next(self._ready(rank, now), None)
            if chosen is None:
                continue
            kind, chunk = chosen
            end = now + self._take(rank, kind, chunk)
            free[rank] = end
            heappush(moments, (end, rank))
            for stage, arrival in self._arrivals(kind, self.placement[rank][chunk], end):
                heappush(moments, (arrival, home[stage]))
        return tuple(map(tuple, self.orders))

    def _ready(self, rank: int, now: float) -> Iterator[tuple[str, int]]:
        """What a rank can run now, best first: kind and chunk."""
        stages = self.placement[rank]
        for kind in self.kinds:
            last = kind == FORWARD
            for chunk in sorted(range(len(stages)), key=stages.__getitem__, reverse=last):
                stage = stages[chunk]
                m = self.ran[kind, stage]
                there = self.there[kind, stage]
                later = sum(other > stage for other in stages)
                if m < len(there) and there[m] <= now and (not last or self.live[rank] + later < self.room):
                    yield kind, chunk

    def _take(self, rank: int, kind: str, chunk: int) -> float:
        """Put an action at the end of a rank's order. Its seconds."""
        stage = self.placement[rank][chunk]
        self.orders[rank].append(Action(kind, chunk, self.ran[kind, stage]))
        self.ran[kind, stage] += 1
        self.live[rank] += (kind == FORWARD) - (kind in (WEIGHT, WHOLE_BACKWARD))
        prices = self.prices
        seconds = {FORWARD: prices.forward, BACKWARD: prices.backward, WEIGHT: prices.weight}
        return seconds.get(kind, prices.whole)[stage]

    def _arrivals(self, kind: str, stage: int, end: float) -> Iterator[tuple[int, float]]:
        """What an action that ends lets run, noted down: the stage, and from when on."""
        prices, last = self.prices, len(self.prices.forward) - 1
        backward = BACKWARD if BACKWARD in self.kinds else WHOLE_BACKWARD
        if kind == FORWARD and stage < last:
            follows = (FORWARD, stage + 1, end + prices.onward[stage])
        elif kind == FORWARD:
            follows = (backward, stage, end)
        elif kind != WEIGHT and stage > 0:
            follows = (backward, stage - 1, end + prices.back[stage - 1])
        else:
            follows = None
        if follows is not None:
            self.there[follows[0], follows[1]].append(follows[2])
            yield follows[1], follows[2]
        if kind == BACKWARD:
            self.there[WEIGHT, stage].append(end)
