"""Orders of a V from building blocks: which block, run under which assumed costs, is cheapest under the real ones.

A block with short steps from rank to rank needs little memory, one with long steps has little bubble (V-Min, V-Half and
ZB-V of Qi et al., arXiv 2405.15362, are three points of this family). Which steps are best depends on costs and memory,
so they are searched for: first those of a list, as far as they fit in memory, then random changes of the best ones.

A block in whole slots, squeezed, is independent of costs; a block in real time begins each step as the costs allow.
Either is then executed under assumed costs, which need not be the real ones: an order that takes actions for equally
long keeps them in the rhythm of the block, while the real costs let each rank fill its own gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from attrs import define, evolve, field, frozen

from partita.compiler.schedules.building_block import INTERVAL, Block, in_a_v, in_steps, turns_for
from partita.compiler.schedules.conditions import Memory, Placement, StageTimes
from partita.compiler.schedules.estimate import VISIT, Codes, Estimate, Value, decoded
from partita.compiler.schedules.execution import WaitPolicy, executed, fits, most_held
from partita.compiler.schedules.schedule import KINDS, WEIGHT, Schedule, peak_live, v_placement
from partita.compiler.schedules.squeezing import squeezed

# Steps of F down and up the V, and of B, in slots: those of V-Min and V-Half, and others of as much memory or more.
STEPS = (
    (1, 1, 1, 1),
    (2, 1, 2, 1),
    (1, 2, 1, 2),
    (1, 2, 2, 1),
    (2, 1, 1, 2),
    (2, 2, 2, 2),
    (3, 1, 3, 1),
    (3, 2, 2, 3),
    (3, 2, 3, 2),
    (4, 2, 4, 2),
    (2, 4, 2, 4),
    (3, 3, 3, 3),
    (4, 3, 3, 4),
    (5, 2, 5, 2),
)
# Assumed times of F, B and W; without them, the real ones.
ASSUMED = ((4.0, 4.0, 3.0), (1.0, 1.0, 1.0), None)
WAIT_POLICIES = tuple(WaitPolicy(*each) for each in product((0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.2, 0.5, 0.8, 1.0)))
FIRST = tuple(WaitPolicy(*each) for each in ((0.0, 0.5), (0.0, 0.8), (0.5, 0.5), (0.5, 0.2), (1.0, 1.0)))
# Executing or squeezing an action takes as long as so many visits of the estimate.
EXECUTION, SQUEEZING = 8, 30
# How many patterns are changed, and how many of them are tried on all microbatches.
POOL, FINALISTS = 8, 4
# How many of the listed steps are tried.
NEAREST = 4
# By how much the steps of a block that does not fit become shorter, and how often.
SHORTER, TIMES = 0.85, 12


@frozen
class Pattern:
    """A block, in whole slots or real time, and how it is executed."""

    steps: tuple[float, ...]
    turns: tuple[float, ...]
    whole: bool
    assumed: int
    wait_policy: WaitPolicy


@define(eq=False)
class Patterns:
    """The search for orders of a V, visiting about `budget` actions."""

    placement: Placement
    microbatches: int
    prices: StageTimes
    memory: Memory
    estimate: Estimate
    budget: int
    random: Random = field(factory=lambda: Random(0))
    _steps: int = 0
    _plans: dict[object, list[Codes]] = field(factory=dict)
    _values: dict[Pattern, tuple[Value, list[Codes]] | None] = field(factory=dict)

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.placement)

    def best(self) -> Iterator[tuple[Value, list[Codes]]]:
        """The values and orders of the best patterns."""
        # The steady state repeats itself: more microbatches than this change no comparison.
        few = min(self.microbatches, 2 * self.ranks + 4)
        pool: list[tuple[Value, Pattern]] = []
        for pattern in self._first():
            self._try(pattern, few, pool)
            if self._steps > self.budget / 2:
                break
        while pool and self._steps < self.budget:
            place = min(int(self.random.expovariate(0.7)), len(pool) - 1)
            self._try(self._changed(pool[place][1]), few, pool)
        for _, pattern in pool[:FINALISTS]:
            result = self.value(pattern, self.microbatches)
            if result is not None:
                yield result
            if self._steps > 2 * self.budget:
                return  # long orders

    def value(self, pattern: Pattern, microbatches: int) -> tuple[Value, list[Codes]] | None:
        """The estimated value of a pattern's orders; None if it does not fit."""
        plan = self._plan(pattern, microbatches)
        if plan is None:
            return None
        self._steps += EXECUTION * sum(map(len, plan))
        prices = self._assumed(pattern.assumed)
        orders = executed(plan, self.placement, microbatches, prices, self.memory, pattern.wait_policy)
        return self.estimate(orders), orders

    def _try(self, pattern: Pattern, microbatches: int, pool: list[tuple[Value, Pattern]]) -> None:
        """Puts a pattern in the pool, with shorter steps if it needs them to fit, unless it is no better."""
        for _ in range(TIMES):
            self._steps += VISIT
            if pattern in self._values:
                return
            result = self._values[pattern] = self.value(pattern, microbatches)
            if result is not None:
                pool.append((result[0], pattern))
                pool.sort(key=lambda each: each[0])
                del pool[POOL:]
                return
            if pattern.whole:
                return
            pattern = evolve(pattern, steps=tuple(SHORTER * step for step in pattern.steps))

    def _first(self) -> Iterator[Pattern]:
        """Patterns of steps that need about the memory that there is, nearest first."""
        stage_memory = max(map(self.memory.one, self.placement)) / 2
        steps_of_limit = INTERVAL * min(self.memory.limit) / stage_memory / self.ranks
        for steps in sorted(STEPS, key=lambda each: abs(sum(each) - steps_of_limit))[:NEAREST]:
            turns = turns_for(self.ranks, steps)
            for assumed, wait_policy in product(range(len(ASSUMED)), FIRST):
                if turns is not None:
                    yield Pattern(steps, turns, True, assumed, wait_policy)
                yield Pattern(steps, (1.0, 1.0, 1.0), False, assumed, wait_policy)

    def _changed(self, pattern: Pattern) -> Pattern:
        """A random neighbour."""
        random, how = self.random, self.random.random()
        if how < 0.3:
            return evolve(pattern, wait_policy=random.choice(WAIT_POLICIES), assumed=random.randrange(len(ASSUMED)))
        numbers = [*pattern.steps, *pattern.turns]
        for i in random.sample(range(len(numbers)), random.choice((1, 1, 2, 3))):
            change = random.choice((-1, 1)) if pattern.whole else random.gauss(0, 0.4)
            numbers[i] = max(1 if pattern.whole else 0.1, numbers[i] + change)
        return evolve(pattern, steps=tuple(numbers[:4]), turns=tuple(numbers[4:]))

    def _plan(self, pattern: Pattern, microbatches: int) -> list[Codes] | None:
        key = pattern.steps, pattern.turns, pattern.whole, microbatches
        if key not in self._plans:
            self._plans[key] = []
            block = self._block(pattern)
            if block is not None:
                plan = block.plan(self.placement, microbatches)
                self._steps += sum(map(len, plan))
                if fits(plan, self.placement, self.memory):
                    if pattern.whole:
                        better = without_weights(squeezed(block, self.placement, microbatches))
                        self._steps += SQUEEZING * sum(map(len, plan))
                        plan = better if fits(better, self.placement, self.memory) else plan
                    self._plans[key] = plan
        return self._plans[key] or None

    def _block(self, pattern: Pattern) -> Block | None:
        """The block of a pattern; None if actions would collide."""
        if pattern.whole:
            block = in_a_v(self.ranks, pattern.steps, pattern.turns)
            return block if block.apart(self.placement) else None
        prices, last = self.prices, self.ranks - 1
        work = [prices.forward[s] + prices.backward[s] + prices.weight[s] for s in range(2 * self.ranks)]
        slot = sum(work) / len(work) / 3
        down, up, back, home = (slot * step for step in pattern.steps)
        over, turn, under = (slot * step for step in pattern.turns)
        forward = [
            max(prices.forward[s] + prices.send_forward[s], over if s == last else down if s < last else up)
            for s in range(2 * self.ranks - 1)
        ]
        backward = [
            max(prices.backward[s + 1] + prices.send_backward[s], under if s == last else back if s > last else home)
            for s in reversed(range(2 * self.ranks - 1))
        ]
        interval = max(sum(work[stage] for stage in stages) for stages in self.placement)
        return in_steps(forward, max(prices.forward[-1], turn), backward, interval)

    def _assumed(self, number: int) -> StageTimes:
        times = ASSUMED[number]
        return self.prices if times is None else equal_times(2 * self.ranks, *times)


def equal_times(stages: int, forward: float, backward: float, weight: float) -> StageTimes:
    """Times that are the same on all stages, with free transfers."""
    none = (0.0,) * (stages - 1)
    return StageTimes(
        (forward,) * stages, (backward,) * stages, (weight,) * stages, (backward + weight,) * stages, none, none
    )


def without_weights(orders: Sequence[Codes]) -> list[Codes]:
    """The plan of orders: their F and B."""
    return [tuple(each for each in codes if KINDS[each % len(KINDS)] != WEIGHT) for codes in orders]


def repeated(name: str, ranks: int, microbatches: int, steps: tuple[int, int, int, int]) -> Schedule:
    """The schedule of a V whose actions are all assumed to take equally long, from the block with these steps."""
    placement, turns = v_placement(ranks), turns_for(ranks, steps)
    assert turns is not None, f"every number of ranks has turns for {steps}"
    orders = squeezed(in_a_v(ranks, steps, turns), placement, microbatches)
    plan, each = without_weights(orders), (1.0,) * (2 * ranks)
    memory = Memory((float(max(map(most_held, plan))),) * ranks, each, each)
    prices = equal_times(2 * ranks, 1.0, 1.0, 1.0)
    best = min(
        orders, executed(plan, placement, microbatches, prices, memory, FIRST[0]), key=Estimate(placement, prices)
    )
    actions = tuple(map(decoded, best))
    return Schedule(name, microbatches, placement, actions, tuple(map(peak_live, actions)))
