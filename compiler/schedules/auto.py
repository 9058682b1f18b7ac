"""`auto`: the order that costs least, by search under a memory limit with the costs of the program.

What is searched are static orders of two integers a rank, a warm-up of forwards and a lag of W behind B
(`partita.compiler.schedules.lagged`), over the forwards and backwards of the classical schedules: with one chunk those
of 1F1B, with several of interleaved 1F1B, with two also of ZB-V; and with several those of one microbatch after the
other, where memory is scarce. (List scheduling that never lets a rank idle does not reach the published optima; these
orders do.) The classical schedules themselves take part as far as memory holds them.

Starting points are the warm-ups that the lower bound is made of (`partita.compiler.schedules.least`), and straight lines
over the ranks; from the best of them the search goes down in steps of one rank, or of all ranks to one side. Orders are
compared by an estimate, and the best of each family by the simulator. What does not cost time is given back: lags are
as short as they can be. All of this is deterministic: a search ends after so many looks at actions, not after a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from attrs import evolve

from partita.compiler.communication import communicate
from partita.compiler.schedules.conditions import Conditions, Memory, Placement, Prices, prices
from partita.compiler.schedules.descent import NEAR, Descent
from partita.compiler.schedules.dualpipe_v import dualpipe_v
from partita.compiler.schedules.estimate import Estimate, codes
from partita.compiler.schedules.interleaved import interleaved_1f1b
from partita.compiler.schedules.least import fillings, least_cost
from partita.compiler.schedules.one_f_one_b import one_f_one_b
from partita.compiler.schedules.schedule import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Action,
    Schedule,
    Search,
    loop_placement,
    v_placement,
)
from partita.compiler.schedules.zb_h1 import zb_h1
from partita.compiler.schedules.zb_h2 import zb_h2
from partita.compiler.schedules.zb_v import zb_v
from partita.compiler.simulator import simulate

# Actions that a search looks at in all: some seconds.
STEPS = 6_000_000


def auto(ranks: int, chunks: int, microbatches: int, conditions: Conditions) -> Schedule:
    """The schedule that costs least of those searched, with what the search found out about it (`Schedule.search`).

    Raises ValueError where no order keeps within the memory.
    """
    families = _families(ranks, chunks, microbatches)
    memories: dict[Placement, Memory | None] = {}
    estimates: dict[Placement, Estimate] = {}
    for placement in dict.fromkeys(family.placement for family in families):
        memories[placement] = conditions.memory(placement) if conditions.memory is not None else None
        estimates[placement] = Estimate(placement, prices(conditions, placement))
    least = min(least_cost(each, microbatches, estimates[each].prices, memories[each]) for each in estimates)
    found = []
    for schedule in _classical(ranks, chunks, microbatches):
        if _fits(schedule, memories[schedule.placement]):
            found.append((estimates[schedule.placement]([codes(line) for line in schedule.actions]), schedule))
    for family in families:
        estimate, memory = estimates[family.placement], memories[family.placement]
        descent = Descent(family, estimate, memory, STEPS // len(families))
        best = descent.run(_warm_ups(family, estimate.prices, memory), least)
        found += [best] if best is not None and best[0][0] < inf else []
    if not found:
        raise ValueError(_too_little(families[-1].placement, memories[families[-1].placement]))
    judged: list[tuple[tuple[float, float], Schedule]] = []
    for (estimated, *_), schedule in sorted(found, key=lambda pair: pair[0]):
        # An estimate is never more than what the simulator says.
        if not judged or estimated * (1 + NEAR) < min(cost for (cost, _), _ in judged):
            judged.append((_cost(schedule, conditions), schedule))
    (cost, _), chosen = min(judged, key=lambda pair: pair[0])
    return evolve(chosen, name="auto", search=Search(chosen.name, cost, least))


def _classical(ranks: int, chunks: int, microbatches: int) -> Iterator[Schedule]:
    """The classical schedules of so many chunks."""
    if chunks == 1:
        yield one_f_one_b(ranks, microbatches)
        yield zb_h1(ranks, microbatches)
        yield zb_h2(ranks, microbatches)
    else:
        yield interleaved_1f1b(ranks, chunks, microbatches)
    if chunks == 2:
        yield zb_v(ranks, microbatches)
        yield dualpipe_v(ranks, microbatches)


def _families(ranks: int, chunks: int, microbatches: int) -> list[Schedule]:
    """Schedules over whose forwards and backwards is searched; the last needs as little memory as there can be."""
    if chunks == 1:
        return [zb_h1(ranks, microbatches)]
    found = [interleaved_1f1b(ranks, chunks, microbatches)]
    if chunks == 2:
        found += [zb_v(ranks, microbatches), one_by_one(v_placement(ranks), microbatches)]
    return [*found, one_by_one(loop_placement(ranks, chunks), microbatches)]


def one_by_one(placement: Placement, microbatches: int) -> Schedule:
    """Each microbatch through all chunks and back before the next one."""
    chunks = range(len(placement[0]))
    order = []
    for m in range(microbatches):
        order += [Action(FORWARD, chunk, m) for chunk in chunks]
        for chunk in reversed(chunks):
            order += [Action(BACKWARD, chunk, m), Action(WEIGHT, chunk, m)]
    count = len(placement)
    return Schedule("one by one", microbatches, placement, (tuple(order),) * count, (len(chunks),) * count)


def _warm_ups(family: Schedule, prices: Prices, memory: Memory | None) -> Iterator[Sequence[int]]:
    """Where a search begins: the family's own warm-ups, and those that the bound is made of."""
    yield [next(i for i, action in enumerate(line) if action.kind != FORWARD) for line in family.actions]
    if family.chunks == 1:
        for _, counts in fillings(family.placement, family.microbatches, prices, memory)[:4]:
            yield [counts[stages[0]] for stages in family.placement]


def _fits(schedule: Schedule, memory: Memory | None) -> bool:
    return memory is None or all(
        memory.holds(rank, memory.peak(actions, stages))
        for rank, (actions, stages) in enumerate(zip(schedule.actions, schedule.placement, strict=True))
    )


def _too_little(placement: Placement, memory: Memory | None) -> str:
    """Why no order keeps within the memory, in words."""
    assert memory is not None
    lacks = []
    for rank, (order, stages) in enumerate(zip(one_by_one(placement, 1).actions, placement, strict=True)):
        peak = memory.peak(order, stages)
        lacks.append((peak - memory.limit[rank], rank, peak))
    _, rank, peak = max(lacks)
    limit = max(0.0, memory.limit[rank])
    return f"rank {rank} has room for {limit:,g} of activations, and a microbatch keeps {peak:,g}"


def _cost(schedule: Schedule, conditions: Conditions) -> tuple[float, float]:
    """Cost and makespan by the simulator."""
    timeline = simulate(communicate(schedule, conditions.messages), conditions.costs)
    return timeline.cost, timeline.makespan
