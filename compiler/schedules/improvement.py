"""Local search over orders of any kind: over plans of F and B, of which gap filling makes orders, and then over orders.

A plan changes by moving an F or B of one rank, or of all ranks on one side of a cut. Microbatches ascend in any case,
so one that moves past others of its kind moves all of them: an F from the end of a plan to its start makes a longer
warm-up. The allowances of ranks change, too. An order changes by moving an action within a block of the critical path
(`partita.compiler.schedules.critical_path`). A change is kept if its cost is at most what it was some changes ago (late
acceptance: Burke and Bykov, The Late Acceptance Hill-Climbing Heuristic, EJOR 258(1), 2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random

from attrs import define, evolve, field, frozen

from partita.compiler.schedules.conditions import Memory
from partita.compiler.schedules.critical_path import Block, critical_blocks
from partita.compiler.schedules.estimate import Codes, Estimate, Value
from partita.compiler.schedules.gap_filling import Allowance, GapFilling
from partita.compiler.schedules.schedule import BACKWARD, FULL_BACKWARD, KINDS, WEIGHT

_B, _W, _BW = (KINDS.index(kind) for kind in (BACKWARD, WEIGHT, FULL_BACKWARD))

NONE = Allowance((), 0.0)
# The value of ranks that wait for each other.
NEVER = (inf, inf, inf)
# Allowances to begin with, as parts of the idle time of the best order; and parts of W's time that a wait must have.
SHARES, PARTS = (0.0, 0.3, 0.5, 0.8, 0.9, 0.95, 1.0), (0.0, 0.5)
# How many changes ago a cost was that is still good enough.
LATE = 20
# So many changes in a row of an order that were tried before: there are hardly any others.
EXHAUSTED = 200


@frozen
class Candidate:
    """Orders, their value, and the plan and allowance that they were made of."""

    value: Value
    orders: Sequence[Codes]
    plan: Sequence[Codes] = ()
    allowance: Allowance = NONE


def plain(orders: Sequence[Codes]) -> bool:
    """Whether each rank's backwards of a chunk are all split or all full: others keep their order."""
    return not any(each & 3 == _BW and each - _BW + _B in set(line) for line in orders for each in set(line))


@define(eq=False)
class _Acceptance:
    """Late acceptance: the best candidate of a walk, and the one from which it goes on."""

    now: Candidate
    best: Candidate
    late: list[float] = field(init=False)
    turn: int = 0

    def __attrs_post_init__(self) -> None:
        self.late = [self.now.value[0]] * LATE

    def took(self, candidate: Candidate) -> bool:
        """Whether the walk goes on from a candidate."""
        place = self.turn % LATE
        self.turn += 1
        accepted = candidate.value[0] <= self.late[place] or candidate.value < self.now.value
        if accepted:
            self.now = candidate
            self.best = min(self.best, candidate, key=lambda each: each.value)
        self.late[place] = self.now.value[0]
        return accepted


@define(eq=False)
class Improvement:
    """Improves orders for the placement of an estimate, within memory, down to a cost of `least`."""

    estimate: Estimate
    memory: Memory
    least: float
    filling: GapFilling = field(init=False)
    random: Random = field(factory=lambda: Random(0))

    def __attrs_post_init__(self) -> None:
        self.filling = GapFilling(self.estimate, self.memory)

    def filled(self, start: Candidate) -> Candidate:
        """The best of a start and of the orders of its plan under uniform allowances; it has a plan in any case."""
        plan = [tuple(each for each in line if each & 3 != _W) for line in start.orders]
        best, best_filled, work = start, Candidate(NEVER, (), plan), self._work(start)
        for part in PARTS:
            for share in SHARES:
                candidate = self._made(plan, Allowance((share * (best.value[0] - work),) * len(plan), part))
                best_filled = min(candidate, best_filled, key=lambda each: each.value)
                best = min(best, candidate, key=lambda each: each.value)
        return evolve(best, plan=plan, allowance=best_filled.allowance)

    def planned(self, start: Candidate, steps: int) -> Candidate:
        """The best order of changed plans and allowances, from a start with a plan, visiting about so many actions."""
        work = self._work(start)
        walk, until = _Acceptance(self._made(start.plan, start.allowance), start), self.estimate.steps + steps
        while self.estimate.steps < until and walk.best.value[0] > self.least:
            plan, allowance = walk.now.plan, walk.now.allowance
            if self.random.random() < 0.3:
                allowance = self._allowed(allowance, walk.best.value[0] - work)
            else:
                plan = self._moved(plan)
            walk.took(self._made(plan, allowance))
        return walk.best

    def refined(self, start: Candidate, steps: int) -> Candidate:
        """The best order with actions moved on the critical path, visiting about so many actions."""
        walk, until, again = _Acceptance(start, start), self.estimate.steps + steps, 0
        blocks, tried = critical_blocks(start.orders, self.estimate), set[tuple[int, Codes]]()
        while self.estimate.steps < until and walk.best.value[0] > self.least and again < EXHAUSTED:
            self.estimate.steps += 1
            orders = walk.now.orders
            rank, line = self._changed(orders, self.random.choice(blocks))
            again += 1
            if line is None or (rank, line) in tried:
                continue
            again = 0
            tried.add((rank, line))
            self.estimate.steps += len(line)
            if not self.filling.within(rank, line):
                continue
            orders = [*orders[:rank], line, *orders[rank + 1 :]]
            if walk.took(Candidate(self.estimate(orders), orders)):
                blocks, tried = critical_blocks(orders, self.estimate), set()
        return walk.best

    def _made(self, plan: Sequence[Codes], allowance: Allowance) -> Candidate:
        orders = self.filling.orders(plan, allowance)
        value = NEVER if orders is None else self.estimate(orders)
        return Candidate(value, orders or (), plan, allowance)

    def _work(self, start: Candidate) -> float:
        """The seconds of the busiest rank: what it takes longer, it idles."""
        return max(
            sum(table[0][each] for each in line) for table, line in zip(self.estimate.tables, start.orders, strict=True)
        )

    def _some(self, count: int) -> range:
        """One rank, or all ranks on one side of a cut."""
        rank, how = self.random.randrange(count), self.random.random()
        return range(rank, rank + 1) if how < 0.6 else range(rank + 1) if how < 0.8 else range(rank, count)

    def _allowed(self, allowance: Allowance, lost: float) -> Allowance:
        idle, seconds = list(allowance.idle), self.random.random() * lost
        for rank in self._some(len(idle)):
            idle[rank] = seconds
        part = self.random.choice((0.0, 0.25, 0.5, 0.75)) if self.random.random() < 0.2 else allowance.part
        return Allowance(tuple(idle), part)

    def _moved(self, plan: Sequence[Codes]) -> list[Codes]:
        """A plan with an action moved: near its place, or to that of another of its code."""
        random, changed = self.random, list(plan)
        ranks = self._some(len(plan))
        code = random.choice(sorted(set(plan[ranks[0]])))
        source = target = random.random()
        if random.random() < 0.5:
            target = random.choice((1.0, random.random()))
            if random.random() < 0.5:
                source, target = target, source
        shift = random.choice((1, 1, 2, 3)) * random.choice((-1, 1))
        for rank in ranks:
            line = list(plan[rank])
            places = [i for i, each in enumerate(line) if each == code]
            if places:
                first, second = (places[min(len(places) - 1, int(each * len(places)))] for each in (source, target))
                line.insert(max(0, second + shift), line.pop(first))
                changed[rank] = tuple(line)
        return changed

    def _changed(self, orders: Sequence[Codes], block: Block) -> tuple[int, Codes | None]:
        """A rank and its order with an action moved on the critical path; None if that changes nothing."""
        random, line = self.random, orders[block.rank]
        first, last = block.first, block.last
        if first == last:
            return block.rank, None
        how = random.random()
        if how < 0.45:
            source, target = last, last - 1 if random.random() < 0.6 else random.randint(first, last - 1)
        elif how < 0.75:
            source, target = first, first + 1 if random.random() < 0.6 else random.randint(first + 1, last)
        else:
            source = random.randint(first, last)
            target = min(len(line) - 1, max(0, source + random.choice((-2, -1, 1, 2))))
        passed = line[target:source] if target < source else line[source + 1 : target + 1]
        if line[source] in passed or not passed:
            return block.rank, None
        rest = (*line[:source], *line[source + 1 :])
        return block.rank, (*rest[:target], line[source], *rest[target:])
