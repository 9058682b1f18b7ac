"""`auto`: searches for the order of least cost under a memory limit, with the costs of the program.

Four kinds of orders compete, as far as they fit in memory:

- the classical schedules;
- static orders with two integers per rank, a warm-up of forwards and a lag of W behind B
  (`partita.compiler.schedules.descent`), over the forwards and backwards of 1F1B, interleaved 1F1B and ZB-V. With one
  chunk they reach the published optima, which list scheduling does not;
- in a V, repeated building blocks (`partita.compiler.schedules.patterns`), the best ones where memory is short;
- list scheduling and greedy construction (`partita.compiler.schedules.listing`) within several memory bounds. With
  several chunks or little memory they are often better; their warm-ups also serve as starting points of static orders.

Orders are compared by estimate, and the best ones by simulation. The search ends when one meets the lower bound
(`partita.compiler.schedules.lower_bound`), or after a budget of visited actions, larger for longer orders. The budget
is not a time, so the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, product
from math import inf

from attrs import evolve, frozen

from partita.compiler.schedules.communication import communicate
from partita.compiler.schedules.conditions import Conditions, Memory, Placement, prices
from partita.compiler.schedules.descent import NEAR, Descent
from partita.compiler.schedules.estimate import Estimate, Value, codes, decoded
from partita.compiler.schedules.generator import SCHEDULES, Generator, Sizes, register
from partita.compiler.schedules.listing import ALTERNATING, list_orders
from partita.compiler.schedules.lower_bound import fillings, lower_bound
from partita.compiler.schedules.patterns import Patterns
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, Schedule, Search, peak_live, v_placement
from partita.compiler.schedules.simulator import simulate
from partita.dsl.builtins import BOUND, CHUNKS, MICROBATCHES, OVER
from partita.dsl.spec import Call

# The budget for static orders: a number of visited actions (some seconds), or of orders if these are long.
STEPS, ORDERS = 6_000_000, 600
# Memory bounds for list scheduling, as (a, b): a·P − b·r microbatches on rank r. Later ranks wait less.
SHARES = ((1.0, 0.0), (1.5, 0.0), (2.0, 0.0), (2.0, 0.5), (2.0, 1.0))
# The number of other orders whose warm-ups are starting points.
OTHERS = 6
# The memory limit of a proxy's schedule.
_PLENTY = float(1 << 60)


def auto(ranks: int, chunks: int, microbatches: int, conditions: Conditions) -> Schedule:
    """The cheapest schedule found, with a report of the search (`Schedule.search`). If several placements are possible
    (loop, V), the one whose cheapest schedule has the smallest makespan.

    Raises ValueError if no order fits in memory.
    """
    families, others = (
        [
            make(each, ranks, chunks, microbatches)
            for each in SCHEDULES.values()
            # With one chunk, schedules for any number of chunks duplicate those for one.
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
    """Explains why no order fits in memory."""
    rank = max(range(len(placement)), key=lambda each: memory.one(placement[each]) - memory.limit[each])
    limit, one = memory.text(max(0.0, memory.limit[rank])), memory.text(memory.one(placement[rank]))
    return f"rank {rank} has room for {limit} of activations, but one microbatch needs {one}"


@frozen(eq=False)
class _Search:
    """The search over one placement of stages, that of `family`."""

    family: Schedule
    conditions: Conditions
    memory: Memory | None
    estimate: Estimate

    def best(self, budget: int, classical: Iterable[Schedule]) -> Iterator[tuple[tuple[float, float], Schedule]]:
        """The cheapest schedule by simulation, with its makespan and cost; nothing if none fits in memory."""
        placement, microbatches = self.family.placement, self.family.microbatches
        least = lower_bound(placement, microbatches, self.estimate.prices, self.memory)
        found: list[tuple[Value, Schedule]] = []
        listed: list[tuple[Value, Schedule]] = []
        for each in chain(self._estimated(classical), self._estimated(self._listed())):
            listed.append(each)
            if each[0][0] <= least * (1 + NEAR):
                break  # none can cost less
        else:
            found += self._patterned(budget // 2)
            found += self._static(budget, least, [schedule for _, schedule in sorted(listed, key=lambda pair: pair[0])])
        found += listed
        judged: list[tuple[float, float, Schedule]] = []
        for (estimated, *_), schedule in sorted(found, key=lambda pair: pair[0]):
            # An estimate never exceeds the simulated cost.
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
        """The best order with two integers per rank, if any fits in memory; the warm-ups of the first of `others` are
        starting points too.
        """
        family, prices = self.family, self.estimate.prices
        warm_ups = [_warm_ups(each) for each in (family, *islice(others, OTHERS))]
        if family.chunks == 1:
            for _, counts in fillings(family.placement, family.microbatches, prices, self.memory)[:4]:
                warm_ups.append([counts[stage] for (stage,) in family.placement])
        found = Descent(family, self.estimate, self.memory, budget).run(warm_ups, least)
        if found is not None and found[0][0] < inf:
            yield found

    def _patterned(self, budget: int) -> Iterator[tuple[Value, Schedule]]:
        """The best orders from repeated building blocks, in a V."""
        placement, microbatches = self.family.placement, self.family.microbatches
        if self.family.chunks == 2 and placement == v_placement(len(placement)):
            for value, orders in Patterns(
                placement, microbatches, self.estimate.prices, self._within(), self.estimate, budget
            ).best():
                actions = tuple(map(decoded, orders))
                bound = tuple(map(peak_live, actions))
                yield value, Schedule("building blocks", microbatches, placement, actions, bound)

    def _within(self) -> Memory:
        """The memory; what holds all microbatches if it is not limited."""
        each = (1.0,) * len(self.estimate.prices.forward)
        most = float(self.family.microbatches * len(each))
        return self.memory or Memory((most,) * len(self.family.placement), each, each)

    def _listed(self) -> Iterator[Schedule]:
        """The results of list scheduling, within parts of the memory and all of it."""
        placement, microbatches, prices = self.family.placement, self.family.microbatches, self.estimate.prices
        memory, ranks = self._within(), len(placement)
        fewer = [
            [(share * ranks - taper * rank) * memory.one(stages) for rank, stages in enumerate(placement)]
            for share, taper in SHARES
        ]
        limits = dict.fromkeys((*(tuple(map(min, memory.limit, limit)) for limit in fewer), memory.limit))
        for limit in limits:
            within = evolve(memory, limit=limit)
            if all(within.holds(rank, within.one(stages)) for rank, stages in enumerate(placement)):
                for split, prefer in product(
                    (True, False) if prices.joint else (True,), (BACKWARD, FORWARD, ALTERNATING)
                ):
                    for patient in (False, True) if split else (False,):
                        orders = list_orders(placement, microbatches, prices, within, prefer, split, patient)
                        name = "greedy construction" if patient or prefer == ALTERNATING else "list scheduling"
                        yield Schedule(name, microbatches, placement, orders, tuple(map(peak_live, orders)))


def _warm_ups(schedule: Schedule) -> list[int]:
    """The number of forwards before each rank's first backward."""
    return [next(i for i, action in enumerate(line) if action.kind != FORWARD) for line in schedule.actions]


def _proxy(call: Call, sizes: Sizes) -> Call:
    """Without a memory limit: that of the proxy's device is unrelated."""
    return evolve(call, arguments={**call.arguments, "memory": _PLENTY})


# `plan` omits it: the search takes too long to be run for every candidate.
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
