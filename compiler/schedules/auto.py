"""`auto`: the order that costs least, by search under a memory limit with the costs of the program.

Three kinds of orders take part, as far as memory holds them. The classical schedules. Static orders of two integers a
rank, a warm-up of forwards and a lag of W behind B (`partita.compiler.schedules.descent`), over the forwards and
backwards of 1F1B, interleaved 1F1B and ZB-V: with one chunk they reach the published optima, which list scheduling does
not. And those of list scheduling and of greedy construction (`partita.compiler.schedules.listing`) within several
bounds of memory: with several chunks, or with little memory, they are often better, and static orders are also looked
for from where they begin. Orders are compared by an estimate, and the best by the simulator; where one meets the lower
bound (`partita.compiler.schedules.least`), the search ends.

All of this is deterministic: otherwise the search ends after so many looks at actions, not after a time; more where
orders are longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, product
from math import inf

from attrs import evolve, frozen

from partita.compiler.communication import communicate
from partita.compiler.schedules.conditions import Conditions, Memory, Placement, prices
from partita.compiler.schedules.descent import NEAR, Descent
from partita.compiler.schedules.estimate import Estimate, Value, codes
from partita.compiler.schedules.generator import SCHEDULES, Generator, Sizes, register
from partita.compiler.schedules.least import fillings, least_cost
from partita.compiler.schedules.listing import TURNS, list_orders
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, Schedule, Search, peak_live
from partita.compiler.simulator import simulate
from partita.dsl.builtins import BOUND, CHUNKS, MICROBATCHES, OVER
from partita.dsl.spec import Call

# Actions that a search of static orders looks at in all, some seconds; of long orders, so many orders.
STEPS, ORDERS = 6_000_000, 600
# The memory that list scheduling is given: multiples of P microbatches, and how many fewer each rank has than the one
# before. Later ranks have less to wait for.
SHARES = ((1.0, 0.0), (1.5, 0.0), (2.0, 0.0), (2.0, 0.5), (2.0, 1.0))
# Of how many other orders the warm-ups are starting points.
OTHERS = 6
# The memory that the small copy's schedule is searched within.
_PLENTY = float(1 << 60)


def auto(ranks: int, chunks: int, microbatches: int, conditions: Conditions) -> Schedule:
    """The schedule that costs least of those searched, with what the search found out about it (`Schedule.search`).
    Where stages can be placed in a loop or in a V, that whose cheapest schedule is done first.

    Raises ValueError where no order keeps within the memory.
    """
    families, others = (
        [
            make(each, ranks, chunks, microbatches)
            for each in SCHEDULES.values()
            # With one chunk, what can have any number is the same as what has one.
            if each.role == role and chunks == (each.chunks or max(2, chunks))
        ]
        for role in ("varied", "compared")
    )
    found: list[tuple[tuple[float, float], Schedule]] = []
    bounded: list[tuple[Placement, Memory]] = []
    for family in families:
        placement = family.placement
        memory = conditions.memory(placement) if conditions.memory is not None else None
        bounded += [] if memory is None else [(placement, memory)]
        search = _Search(family, conditions, memory, Estimate(placement, prices(conditions, placement)))
        alike = [each for each in others if each.placement == placement]
        budget = max(STEPS, ORDERS * sum(map(len, family.actions))) // len(families)
        found += search.best(budget, [family, *alike])
    if not found:
        raise ValueError(_too_little(*bounded[-1]))
    _, best = min(found, key=lambda pair: pair[0])
    return best


def _too_little(placement: Placement, memory: Memory) -> str:
    """Why no order keeps within the memory, in words."""
    rank = max(range(len(placement)), key=lambda each: memory.one(placement[each]) - memory.limit[each])
    limit, one = memory.text(max(0.0, memory.limit[rank])), memory.text(memory.one(placement[rank]))
    return f"rank {rank} has room for {limit} of activations, but one microbatch needs {one}"


@frozen(eq=False)
class _Search:
    """The search with stages placed in one way, that of `family`."""

    family: Schedule
    conditions: Conditions
    memory: Memory | None
    estimate: Estimate

    def best(self, budget: int, classical: Iterable[Schedule]) -> Iterator[tuple[tuple[float, float], Schedule]]:
        """The cheapest schedule by the simulator, with its makespan and cost, if memory holds any."""
        placement, microbatches = self.family.placement, self.family.microbatches
        least = least_cost(placement, microbatches, self.estimate.prices, self.memory)
        found: list[tuple[Value, Schedule]] = []
        listed: list[tuple[Value, Schedule]] = []
        for each in chain(self._estimated(classical), self._estimated(self._listed())):
            listed.append(each)
            if each[0][0] <= least * (1 + NEAR):
                break  # none can cost less
        else:
            found += self._static(budget, least, [schedule for _, schedule in sorted(listed, key=lambda pair: pair[0])])
        found += listed
        judged: list[tuple[float, float, Schedule]] = []
        for (estimated, *_), schedule in sorted(found, key=lambda pair: pair[0]):
            # An estimate is never more than what the simulator says.
            if not judged or estimated * (1 + NEAR) < min(cost for cost, _, _ in judged):
                timeline = simulate(communicate(schedule, self.conditions.messages), self.conditions.costs)
                judged.append((timeline.cost, timeline.makespan, schedule))
        if judged:
            cost, makespan, chosen = min(judged, key=lambda each: each[:2])
            yield (makespan, cost), evolve(chosen, name="auto", search=Search(chosen.name, cost, least))

    def _estimated(self, schedules: Iterable[Schedule]) -> Iterator[tuple[Value, Schedule]]:
        for schedule in schedules:
            if self.memory is None or self.memory.fits(schedule):
                yield self.estimate([codes(line) for line in schedule.actions]), schedule

    def _static(self, budget: int, least: float, others: Iterable[Schedule]) -> Iterator[tuple[Value, Schedule]]:
        """The best order of two integers a rank, if memory holds any. It is also looked for from where the best of some
        `others` begin.
        """
        family, prices = self.family, self.estimate.prices
        warm_ups = [_warm_ups(each) for each in (family, *islice(others, OTHERS))]
        if family.chunks == 1:
            for _, counts in fillings(family.placement, family.microbatches, prices, self.memory)[:4]:
                warm_ups.append([counts[stage] for (stage,) in family.placement])
        found = Descent(family, self.estimate, self.memory, budget).run(warm_ups, least)
        if found is not None and found[0][0] < inf:
            yield found

    def _listed(self) -> Iterator[Schedule]:
        """What list scheduling makes of a part of the memory, and of all."""
        placement, microbatches, prices = self.family.placement, self.family.microbatches, self.estimate.prices
        each = (1.0,) * len(prices.forward)
        memory = self.memory or Memory((float(microbatches * len(each)),) * len(placement), each, each)
        ranks = len(placement)
        fewer = [
            [(share * ranks - taper * rank) * memory.one(stages) for rank, stages in enumerate(placement)]
            for share, taper in SHARES
        ]
        limits = dict.fromkeys((*(tuple(map(min, memory.limit, limit)) for limit in fewer), memory.limit))
        for limit in limits:
            within = evolve(memory, limit=limit)
            if all(within.holds(rank, within.one(stages)) for rank, stages in enumerate(placement)):
                for split, prefer in product((True, False) if prices.joint else (True,), (BACKWARD, FORWARD, TURNS)):
                    for patient in (False, True) if split else (False,):
                        orders = list_orders(placement, microbatches, prices, within, prefer, split, patient)
                        name = "greedy construction" if patient or prefer == TURNS else "list scheduling"
                        yield Schedule(name, microbatches, placement, orders, tuple(map(peak_live, orders)))


def _warm_ups(schedule: Schedule) -> list[int]:
    """How many forwards each rank begins with."""
    return [next(i for i, action in enumerate(line) if action.kind != FORWARD) for line in schedule.actions]


def _proxy(call: Call, sizes: Sizes) -> Call:
    """Within any memory: that of the small copy's device says other things."""
    return evolve(call, arguments={**call.arguments, "memory": _PLENTY})


# `plan` leaves it out: it searches for too long to be one of many.
register(
    Generator(
        "auto",
        (MICROBATCHES, evolve(CHUNKS, default=1), BOUND, OVER),
        order=auto,
        chunks=None,
        bounded=True,
        proxy=_proxy,
    )
)
