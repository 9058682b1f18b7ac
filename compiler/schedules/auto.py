"""`auto`: searches for the order of least cost under a memory limit, with the costs of the program.

Orders of several kinds are constructed, as far as they fit in memory:

- the classical schedules;
- static orders with two integers per rank, a warm-up of forwards and a lag of W behind B
  (`partita.compiler.schedules.descent`), over the forwards and backwards of 1F1B, interleaved 1F1B and ZB-V. With one
  chunk they reach the published optima, which list scheduling does not;
- in a V, repeated building blocks (`partita.compiler.schedules.patterns`), the best ones where memory is short;
- list scheduling and greedy construction (`partita.compiler.schedules.listing`) within several memory bounds. With
  several chunks or little memory they are often better; their warm-ups also serve as starting points of static orders.

The best of different kinds, over all placements of stages, are then improved by local search
(`partita.compiler.schedules.improvement`). Orders are compared by estimate, and the best ones by simulation, all by
what the call minimizes: the longest time that any rank is occupied (`bubble`), or the end of the last action
(`step_time`). The search ends when an order meets the lower bound (`partita.compiler.schedules.lower_bound`), or after
a budget of visited actions, larger for longer orders up to some seconds. The budget is not a time, so the result is
deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, product
from math import inf

from attrs import evolve, field, frozen

from partita.compiler.schedules.communication import communicate
from partita.compiler.schedules.conditions import Conditions, Memory, Placement, prices
from partita.compiler.schedules.descent import NEAR, Descent
from partita.compiler.schedules.estimate import Codes, Estimate, Value, codes, decoded
from partita.compiler.schedules.generator import SCHEDULES, Generator, Sizes, register
from partita.compiler.schedules.improvement import Candidate, Improvement, plain
from partita.compiler.schedules.listing import ALTERNATING, list_orders
from partita.compiler.schedules.lower_bound import fillings, lower_bound
from partita.compiler.schedules.patterns import Patterns
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import (
    BACKWARD,
    FORWARD,
    FULL_BACKWARD,
    WEIGHT,
    Action,
    Schedule,
    Search,
    peak_live,
    v_placement,
)
from partita.compiler.schedules.simulator import simulate
from partita.dsl.config.builtins import BOUND, CHUNKS, MICROBATCHES, OVER, Keyword, Setting
from partita.dsl.spec import Call

# What is minimized by default.
BUBBLE = "bubble"
# The budget: visited actions for each action of an order, and at most so many (some seconds), less what the first order
# of each kind takes. It is divided between list scheduling, building blocks, static orders, filled gaps, changes of
# plans, and changes of orders.
VISITS, STEPS, FIRST = 8_000, 20_000_000, 200
LISTED, PATTERNED, STATIC, FILLED, PLANNED, REFINED = 0.15, 0.2, 0.1, 0.1, 0.25, 0.2
# Listing an action takes as long as this many visits of the estimate.
LISTING = 30
# Memory bounds for list scheduling, as (a, b): a·P − b·r microbatches on rank r. Later ranks wait less.
SHARES = ((1.0, 0.0), (1.5, 0.0), (2.0, 0.0), (2.0, 0.5), (2.0, 1.0))
# The number of other orders whose warm-ups are starting points.
OTHERS = 6
# How many orders of different kinds have their plans changed, and how many of these their orders.
STARTS, FINALISTS = 3, 2
# After so many that simulation finds dearer than estimated, only those that users can name are simulated.
SIMULATED = 8
# The memory limit of a proxy's schedule.
_PLENTY = float(1 << 60)


def auto(ranks: int, chunks: int, microbatches: int, conditions: Conditions, minimize: str = BUBBLE) -> Schedule:
    """The cheapest schedule found over all placements (loop, V), with a report of the search (`Schedule.search`).
    `minimize` is what is compared: `bubble`, or `step_time`.

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
    length = sum(map(len, families[0].actions))
    budget = max(0, min(STEPS - FIRST * length, VISITS * length))
    searches = []
    for family in families:
        placement = family.placement
        memory = conditions.memory(placement) if conditions.memory is not None else None
        estimate = Estimate(placement, prices(conditions, placement), minimize != BUBBLE)
        searches.append(_Search(family, conditions, memory, estimate))
    candidates: list[_Found] = []
    for search in searches:
        alike = [each for each in others if each.placement == search.family.placement]
        candidates += search.constructed(budget // len(searches), [search.family, *alike])
    if not candidates:
        raise ValueError(_too_little(searches[-1].family.placement, searches[-1].within()))
    candidates.sort(key=lambda each: each.value)
    floor = min(search.least for search in searches)
    shared = max(search.shared for search in searches)
    if candidates[0].value[0] > floor * (1 + NEAR):
        candidates = sorted([*candidates, *_improved(candidates, budget, floor)], key=lambda each: each.value)
    return _simulated(candidates, max(floor, shared), minimize)


def _improved(candidates: Iterable[_Found], budget: int, floor: float) -> Iterator[_Found]:
    """The best of different kinds, improved."""
    kinds: dict[tuple[Placement, str], _Found] = {}
    for each in candidates:
        if plain(each.candidate.orders):
            kinds.setdefault((each.search.family.placement, each.schedule.name), each)
    now: list[_Found] = []
    steps = 0
    for each in kinds.values():
        if steps < FILLED * budget:
            before = each.search.estimate.steps
            now.append(each.filled(floor))
            steps += each.search.estimate.steps - before
    for share, count, change in ((PLANNED, STARTS, _Found.planned), (REFINED, FINALISTS, _Found.refined)):
        now.sort(key=lambda each: each.value)
        yield from now
        if not now or now[0].value[0] <= floor * (1 + NEAR):
            return
        now = [change(each, int(share * budget / count), floor) for each in now[:count]]
    yield from now


def _simulated(candidates: Iterable[_Found], floor: float, minimize: str) -> Schedule:
    """The best by simulation, of those found in ascending order of their estimates."""
    judged: list[tuple[tuple[float, float], Schedule]] = []
    for each in candidates:
        # An estimate never exceeds the simulated cost.
        if judged and each.value[0] * (1 + NEAR) >= min(value for (value, _), _ in judged):
            break
        if len(judged) >= SIMULATED and each.schedule.name not in SCHEDULES:
            continue
        conditions = each.search.conditions
        whole = AUTO.shared(each.schedule, conditions.spread, conditions.costs.action)
        timeline = simulate(communicate(whole, conditions.messages), conditions.costs)
        times = timeline.cost, timeline.makespan
        judged.append((times if minimize == BUBBLE else times[::-1], each.schedule))
    (value, _), best = min(judged, key=lambda each: each[0])
    return evolve(best, name="auto", search=Search(best.name, value, floor, minimize))


def _too_little(placement: Placement, memory: Memory) -> str:
    """Explains why no order fits in memory."""
    rank = max(range(len(placement)), key=lambda each: memory.one(placement[each]) - memory.limit[each])
    limit, one = memory.text(max(0.0, memory.limit[rank])), memory.text(memory.one(placement[rank]))
    return f"rank {rank} has room for {limit} of activations, but one microbatch needs {one}"


@frozen(eq=False)
class _Found:
    """A schedule of a search, and its codes."""

    search: _Search
    schedule: Schedule
    candidate: Candidate

    @property
    def value(self) -> Value:
        """Its estimated value."""
        return self.candidate.value

    def filled(self, floor: float) -> _Found:
        """With its gaps filled."""
        return self._with(self.search.improvement(floor).filled(self.candidate))

    def planned(self, steps: int, floor: float) -> _Found:
        """With a better plan."""
        return self._with(self.search.improvement(floor).planned(self.candidate, steps))

    def refined(self, steps: int, floor: float) -> _Found:
        """With a better order."""
        return self._with(self.search.improvement(floor).refined(self.candidate, steps))

    def _with(self, candidate: Candidate) -> _Found:
        if candidate.orders is self.candidate.orders:
            return evolve(self, candidate=candidate)
        name = self.schedule.name
        name = name if name.endswith(", improved") else f"{name}, improved"
        actions = tuple(map(_in_turn, self.schedule.actions, candidate.orders))
        bound = tuple(map(peak_live, actions))
        schedule = evolve(self.schedule, name=name, actions=actions, bound=bound, pairs=())
        return evolve(self, candidate=candidate, schedule=schedule)


def _in_turn(actions: Iterable[Action], order: Codes) -> tuple[Action, ...]:
    """A rank's actions in the order of their codes; those of a code keep theirs."""
    by_code: dict[int, list[Action]] = {}
    for action in actions:
        by_code.setdefault(codes([action])[0], []).append(action)
    following = {code: iter(alike) for code, alike in by_code.items()}
    return tuple(next(following[each]) for each in order)


@frozen(eq=False)
class _Search:
    """The search over one placement of stages, that of `family`."""

    family: Schedule
    conditions: Conditions
    memory: Memory | None
    estimate: Estimate
    least: float = field(init=False)

    @least.default
    def _least(self) -> float:
        family, estimate = self.family, self.estimate
        return lower_bound(family.placement, family.microbatches, estimate.prices, self.memory, estimate.whole)

    @property
    def shared(self) -> float:
        """The work of the busiest rank, with what all ranks share; 0 if that is nothing."""
        spread, seconds = self.conditions.spread, self.conditions.costs.action
        if spread is None:
            return 0.0

        def one(stage: int) -> float:
            apart = seconds(stage, BACKWARD) + seconds(stage, WEIGHT)
            return seconds(stage, FORWARD) + min(apart, seconds(stage, FULL_BACKWARD))

        work = max(sum(map(one, line)) for line in spread.placement(self.family.placement))
        return work * self.family.microbatches

    def improvement(self, floor: float) -> Improvement:
        """A local search down to a bound."""
        return Improvement(self.estimate, self.within(), floor * (1 + NEAR))

    def constructed(self, budget: int, classical: Iterable[Schedule]) -> list[_Found]:
        """Orders of all kinds that fit in memory."""
        estimated: list[tuple[Value, Schedule]] = []
        for each in chain(self._estimated(classical), self._estimated(self._listed(LISTED * budget))):
            estimated.append(each)
            if each[0][0] <= self.least * (1 + NEAR):
                break  # none can cost less
        else:
            best = [schedule for _, schedule in sorted(estimated, key=lambda pair: pair[0])]
            estimated += self._patterned(int(PATTERNED * budget))
            estimated += self._static(int(STATIC * budget), best)
        return [
            _Found(self, schedule, Candidate(value, [codes(line) for line in schedule.actions]))
            for value, schedule in estimated
        ]

    def _estimated(self, schedules: Iterable[Schedule]) -> Iterator[tuple[Value, Schedule]]:
        for schedule in schedules:
            if self.memory is None or self.memory.fits(schedule):
                yield self.estimate([codes(line) for line in schedule.actions]), schedule

    def _static(self, budget: int, others: Iterable[Schedule]) -> Iterator[tuple[Value, Schedule]]:
        """The best order with two integers per rank, if any fits in memory; the warm-ups of the first of `others` are
        starting points too.
        """
        family, prices = self.family, self.estimate.prices
        warm_ups = [_warm_ups(each) for each in (family, *islice(others, OTHERS))]
        if family.chunks == 1:
            for _, counts in fillings(family.placement, family.microbatches, prices, self.memory, self.estimate.whole)[
                :4
            ]:
                warm_ups.append([counts[stage] for (stage,) in family.placement])
        best = Descent(family, self.estimate, self.memory, budget).run(warm_ups, self.least)
        if best is not None and best[0][0] < inf:
            yield best

    def _patterned(self, budget: int) -> Iterator[tuple[Value, Schedule]]:
        """The best orders from repeated building blocks, in a V."""
        placement, microbatches = self.family.placement, self.family.microbatches
        if self.family.chunks == 2 and placement == v_placement(len(placement)):
            for value, orders in Patterns(
                placement, microbatches, self.estimate.prices, self.within(), self.estimate, budget
            ).best():
                actions = tuple(map(decoded, orders))
                bound = tuple(map(peak_live, actions))
                yield value, Schedule("building blocks", microbatches, placement, actions, bound)

    def within(self) -> Memory:
        """The memory; what holds all microbatches if it is not limited."""
        each = (1.0,) * len(self.estimate.prices.forward)
        unlimited = float(self.family.microbatches * len(each))
        return self.memory or Memory((unlimited,) * len(self.family.placement), each, each)

    def _listed(self, budget: float) -> Iterator[Schedule]:
        """The results of list scheduling, within all of the memory and parts of it; one at least."""
        steps, each_takes = 0, LISTING * sum(map(len, self.family.actions))
        placement, microbatches, prices = self.family.placement, self.family.microbatches, self.estimate.prices
        memory, ranks = self.within(), len(placement)
        fewer = [
            [(share * ranks - taper * rank) * memory.one(stages) for rank, stages in enumerate(placement)]
            for share, taper in SHARES
        ]
        limits = dict.fromkeys((memory.limit, *(tuple(map(min, memory.limit, limit)) for limit in fewer)))
        for limit in limits:
            within = evolve(memory, limit=limit)
            if all(within.holds(rank, within.one(stages)) for rank, stages in enumerate(placement)):
                for split, prefer in product(
                    (True, False) if prices.joint else (True,), (BACKWARD, FORWARD, ALTERNATING)
                ):
                    for patient in (False, True) if split else (False,):
                        if steps and steps + each_takes > budget:
                            return
                        steps += each_takes
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
AUTO = register(
    Generator(
        "auto",
        (
            MICROBATCHES,
            evolve(CHUNKS, default=1),
            BOUND,
            Setting("minimize", Keyword((BUBBLE, "step_time")), BUBBLE),
            OVER,
        ),
        order=auto,
        chunks=None,
        bounded=True,
        searched=True,
        proxy=_proxy,
    )
)
