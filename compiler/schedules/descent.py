"""Local search over warm-ups and lags (`partita.compiler.schedules.lagged`).

A lag of −1 means that a rank runs full backwards, which is tried where they take less time than B and W separately.

The search starts from the warm-ups behind the lower bound and from multiples of the classical ones, with lags
proportional to the distance from the first stage. It descends from the best of these by changing one rank, or all ranks
on one side of a cut. Finally, lags are shortened as far as the cost stays the same, which saves memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from math import ceil

from attrs import define, evolve, field

from partita.compiler.schedules.conditions import Memory
from partita.compiler.schedules.estimate import Codes, Estimate, Value, codes
from partita.compiler.schedules.lagged import Each, lagged
from partita.compiler.schedules.schedule import (
    BACKWARD,
    FORWARD,
    FULL_BACKWARD,
    KINDS,
    WEIGHT,
    Action,
    Schedule,
    peak_live,
)

Numbers = tuple[tuple[int, int], ...]  # warm-up and lag of each rank

# Times within this relative difference are equal.
NEAR = 1e-9
# Lags of starting points, as multiples of the time by which a rank starts later and may end earlier than rank 0.
SHARES = (0.0, 0.5, 1.0, 1.5)
# Warm-ups of starting points, as multiples of those of 1F1B or a similar schedule.
FACTORS = (1.0, 2.0, 1.5, 1.25, 1.75, 2.25, 2.5, 3.0)
# The number of starting points to descend from, the best ones of different warm-ups.
STARTS = 6


def better(one: Value, other: Value) -> bool:
    """Whether an order costs less, or costs the same and finishes sooner."""
    for a, b in zip(one, other, strict=True):
        if a != b and abs(a - b) > NEAR * max(a, b):
            return a < b
    return False


@define(eq=False)
class Descent:
    """Searches orders of the forwards and backwards of the schedule `like`; visits at most about `budget` actions."""

    like: Schedule
    estimate: Estimate
    memory: Memory | None
    budget: int
    parts: list[tuple[Codes, ...]] = field(init=False)  # forwards, B, W and full backwards of each rank
    _orders: dict[tuple[int, int, int], Codes] = field(factory=dict)
    _longest: dict[tuple[int, int], int] = field(factory=dict)
    _values: dict[Numbers, Value] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.budget += self.estimate.steps
        self.parts = [tuple(map(codes, _parts(actions))) for actions in self.like.actions]

    def run(self, warm_ups: Iterable[Sequence[int]], floor: float) -> tuple[Value, Schedule] | None:
        """The best order found from starting points with these warm-ups; None if none fits in memory. The search stops
        at a cost of `floor`, a lower bound.
        """
        limits = [self._most(rank) for rank in range(self.like.ranks)]
        if min(limits) < 1:
            return None
        starts = []
        half = (self.estimate.steps + self.budget) / 2
        for numbers in self._starts(warm_ups, limits):
            starts.append((self.value(numbers), numbers))
            if starts[-1][0][0] <= floor * (1 + NEAR) or self.estimate.steps > half:
                break
        starts.sort()
        chosen: dict[tuple[int, ...], tuple[Value, Numbers]] = {}
        for start in starts:
            chosen.setdefault(_warm_ups(start[1]), start)
        value, numbers = min(self._down(*start, limits, floor) for start in islice(chosen.values(), STARTS))
        return value, self.schedule(self._given_back(value, numbers))

    def value(self, numbers: Numbers) -> Value:
        """The estimated cost of an order."""
        if numbers not in self._values:
            orders = [self._order(rank, *own) for rank, own in enumerate(numbers)]
            self._values[numbers] = self.estimate(orders)
        return self._values[numbers]

    def schedule(self, numbers: Numbers) -> Schedule:
        """The schedule with these warm-ups and lags."""
        lines = []
        for actions, own in zip(self.like.actions, numbers, strict=True):
            lines.append(_in_order(_parts(actions), *own))
        bound = tuple(map(peak_live, lines))
        return evolve(self.like, name="warm-ups and lags", actions=tuple(lines), bound=bound, pairs=())

    # ---------------------------------------------------------------- memory

    def _order(self, rank: int, warm_up: int, lag: int) -> Codes:
        key = rank, warm_up, lag
        if key not in self._orders:
            self._orders[key] = _in_order(self.parts[rank], warm_up, lag)
        return self._orders[key]

    def _fits(self, rank: int, warm_up: int, lag: int) -> bool:
        if self.memory is None:
            return True
        changes: list[float] = []
        for stage in self.like.placement[rank]:
            by_kind = self.memory.changes(stage)
            changes += [by_kind[kind] for kind in KINDS]
        live = accumulate(changes[code] for code in self._order(rank, warm_up, lag))
        return self.memory.holds(rank, max(live))

    def _most(self, rank: int) -> int:
        """The longest warm-up that fits in memory, or 0."""
        return _last(lambda k: self._fits(rank, k, 0), 1, len(self.parts[rank][0]))

    def longest(self, rank: int, warm_up: int) -> int:
        """The longest lag that fits in memory, given a warm-up that does."""
        key = rank, warm_up
        if key not in self._longest:
            self._longest[key] = _last(lambda lag: self._fits(rank, warm_up, lag), 1, len(self.parts[rank][0]))
        return self._longest[key]

    # ---------------------------------------------------------------- steps

    def _starts(self, own: Iterable[Sequence[int]], limits: Sequence[int]) -> Iterator[Numbers]:
        """Starting points: the given warm-ups and multiples of the first of them, including the largest that fits in
        memory on all ranks, at most 1.
        """
        candidates = list(own)
        fitting = min(1.0, *(top / k for k, top in zip(candidates[0], limits, strict=True)))
        for factor in (fitting, *FACTORS):
            candidates += [[ceil(factor * k) - less for k in candidates[0]] for less in (0, 1)]
        clipped = (tuple(max(1, min(k, top)) for k, top in zip(each, limits, strict=True)) for each in candidates)
        for warm_ups in dict.fromkeys(clipped):
            yield from dict.fromkeys(self._with_lags(warm_ups))

    def _with_lags(self, warm_ups: Sequence[int]) -> Iterator[Numbers]:
        """Starting points with these warm-ups: the longest lags, and lags proportional to the distance from stage 0."""
        longest = [self.longest(rank, k) for rank, k in enumerate(warm_ups)]
        yield tuple(zip(warm_ups, longest, strict=True))
        prices = self.estimate.prices
        if prices.joint:
            yield tuple((warm_up, -1) for warm_up in warm_ups)
        from_first, to_first = prices.from_first(), prices.to_first()
        for share in SHARES:
            lags = []
            for stages, limit in zip(self.like.placement, longest, strict=True):
                trip = from_first[min(stages)] + to_first[min(stages)]
                weight = sum(prices.weight[stage] for stage in stages) / len(stages)
                lags.append(min(limit, round(share * trip / weight) if weight else 0))
            yield tuple(zip(warm_ups, lags, strict=True))

    def _down(self, value: Value, numbers: Numbers, limits: Sequence[int], floor: float) -> tuple[Value, Numbers]:
        """Takes every step that improves the value, until none does."""
        improved = True
        while improved:
            improved = False
            for step in self._steps(limits):
                if value[0] <= floor * (1 + NEAR) or self.estimate.steps >= self.budget:
                    return value, numbers
                changed = step(numbers)
                if changed != numbers and better(self.value(changed), value):
                    value, numbers = self.value(changed), changed
                    improved = True
        return value, numbers

    def _steps(self, limits: Sequence[int]) -> Iterator[Callable[[Numbers], Numbers]]:
        ranks = range(self.like.ranks)
        for rank in ranks:
            for warm_up, lag in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, None), (-1, None), (0, 3), (0, -3)):
                yield self._step(range(rank, rank + 1), warm_up, lag, limits)
        for rank in ranks[1:]:
            for change in (1, -1):
                yield self._step(range(rank), change, 0, limits)
                yield self._step(range(rank, len(ranks)), 0, change, limits)

    def _step(self, ranks: range, warm_up: int, lag: int | None, limits: Sequence[int]) -> Callable[[Numbers], Numbers]:
        """A step that changes warm-up and lag of some ranks by these amounts; None sets the longest lag that fits."""

        min_lag = -1 if self.estimate.prices.joint else 0

        def take(numbers: Numbers) -> Numbers:
            changed = list(numbers)
            for rank in ranks:
                k = max(1, min(limits[rank], numbers[rank][0] + warm_up))
                longest = self.longest(rank, k)
                changed[rank] = k, longest if lag is None else max(min_lag, min(longest, numbers[rank][1] + lag))
            return tuple(changed)

        return take

    def _given_back(self, value: Value, numbers: Numbers) -> Numbers:
        """With the shortest lags that keep the value, from the last rank to the first."""
        for rank in reversed(range(self.like.ranks)):
            if self.estimate.steps < self.budget:
                numbers = self._with_shortest(rank, value, numbers)
        return numbers

    def _with_shortest(self, rank: int, value: Value, numbers: Numbers) -> Numbers:
        warm_up, lag = numbers[rank]

        def with_lag(less: int) -> Numbers:
            return (*numbers[:rank], (warm_up, lag - less), *numbers[rank + 1 :])

        return with_lag(_last(lambda less: not better(value, self.value(with_lag(less))), 1, lag))


def _warm_ups(numbers: Numbers) -> tuple[int, ...]:
    return tuple(warm_up for warm_up, _ in numbers)


def _parts(actions: Iterable[Action]) -> tuple[list[Action], ...]:
    """The forwards of an order, and its backwards as B, as W, and as BW."""
    forwards, backwards = [], []
    for action in actions:
        if action.kind == FORWARD:
            forwards.append(action)
        elif action.kind != WEIGHT:
            backwards.append(action)
    kinds = (BACKWARD, WEIGHT, FULL_BACKWARD)
    return forwards, *([Action(kind, each.chunk, each.microbatch) for each in backwards] for kind in kinds)


def _in_order(parts: Sequence[Sequence[Each]], warm_up: int, lag: int) -> tuple[Each, ...]:
    """A rank's parts in the order that a warm-up and a lag give."""
    forwards, backwards, weights, wholes = parts
    return lagged(forwards, backwards, weights, warm_up, lag) if lag >= 0 else lagged(forwards, wholes, (), warm_up, 0)


def _last(holds: Callable[[int], bool], first: int, last: int) -> int:
    """The last number that satisfies a predicate that holds up to some point (bisection), or `first - 1`."""
    low, high = first - 1, last
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
