"""Squeezing: the warm-up and the cool-down of a repeated building block, made as short as its memory allows.

While the pipeline fills and drains, the block leaves slots empty. There each action moves to the earliest empty slot
after what it needs, unless its rank would then hold more than the block does in its steady state (Qi et al.,
arXiv 2405.15362 §4).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from attrs import define, field

from partita.compiler.schedules.building_block import Block
from partita.compiler.schedules.estimate import Codes, code
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, WEIGHT

# Kind, stage and microbatch of an action; W are numbered through on a rank, by its first stage.
_Slot = tuple[str, int, int]


def squeezed(block: Block, placement: Sequence[Sequence[int]], microbatches: int) -> list[Codes]:
    """The orders of a block with whole starts, at most one F or B a slot and rank, squeezed."""
    return _Slots(block, placement, microbatches).squeezed()


@define(eq=False)
class _Slots:
    """What runs in the slots of all ranks."""

    block: Block
    placement: Sequence[Sequence[int]]
    microbatches: int
    rank_of: dict[int, int] = field(init=False)
    at: list[dict[int, _Slot]] = field(init=False)
    slot: dict[_Slot, int] = field(init=False)
    level: list[list[int]] = field(init=False)  # what a rank holds after each slot
    backwards: list[list[int]] = field(init=False)  # the slots of a rank's B, ascending

    def __attrs_post_init__(self) -> None:
        self.rank_of = {stage: rank for rank, stages in enumerate(self.placement) for stage in stages}
        self.at = [self._filled(stages) for stages in self.placement]
        self.slot = {what: where for used in self.at for where, what in used.items()}
        self.backwards = [sorted(where for where, what in used.items() if what[0] == BACKWARD) for used in self.at]
        self.level = []
        for used in self.at:
            levels, level = [], 0
            for where in range(max(used) + 1):
                level += _change(used.get(where))
                levels.append(level)
            self.level.append(levels)

    def _filled(self, stages: Sequence[int]) -> dict[int, _Slot]:
        """The slots of a rank: F and B as in the block, and each W in the first empty slot after its B."""
        used: dict[int, _Slot] = {}
        for kind, starts in ((FORWARD, self.block.forward), (BACKWARD, self.block.backward)):
            for stage in stages:
                for m in range(self.microbatches):
                    used[round(starts[stage] + m * self.block.interval)] = kind, stage, m
        pending, number, where = 0, 0, 0
        while number < self.microbatches * len(stages):
            if where in used:
                pending += used[where][0] == BACKWARD
            elif pending:
                used[where] = WEIGHT, stages[0], number
                pending, number = pending - 1, number + 1
            where += 1
        return used

    def squeezed(self) -> list[Codes]:
        """The orders, once everything in the warm-up and the cool-down has moved."""
        peak = max(map(max, self.level))
        steady = range(self.slot[BACKWARD, 0, 0], self.slot[FORWARD, 0, self.microbatches - 1])
        for what, where in sorted(self.slot.items(), key=lambda item: (item[1], self.rank_of[item[0][1]])):
            if where not in steady:
                self._move(what, where, peak)
        return [
            self._order([used[where] for where in sorted(used)], stages)
            for used, stages in zip(self.at, self.placement, strict=True)
        ]

    def _order(self, slots: Iterable[_Slot], stages: Sequence[int]) -> Codes:
        """A rank's codes; the W are those of its B, one after the other."""
        chunk = {stage: number for number, stage in enumerate(stages)}
        ready: deque[int] = deque()
        order = []
        for kind, stage, _ in slots:
            if kind == BACKWARD:
                ready.append(chunk[stage])
            order.append(code(kind, ready.popleft() if kind == WEIGHT else chunk[stage]))
        return tuple(order)

    def _move(self, what: _Slot, where: int, peak: int) -> None:
        """Moves an action to the earliest slot that it can have."""
        rank = self.rank_of[what[1]]
        used, level = self.at[rank], self.level[rank]
        for earlier in range(1 + max(self._needed(what), default=-1), where):
            if earlier not in used and (what[0] != FORWARD or max(level[earlier:where]) < peak):
                del used[where]
                used[earlier], self.slot[what] = what, earlier
                if what[0] == BACKWARD:
                    ends = self.backwards[rank]
                    del ends[bisect_left(ends, where)]
                    insort(ends, earlier)
                for each in range(earlier, where):
                    level[each] += _change(what)
                return

    def _needed(self, what: _Slot) -> Iterator[int]:
        """The slots of what an action waits for."""
        kind, stage, m = what
        if m:
            yield self.slot[kind, stage, m - 1]
        if kind == FORWARD and stage:
            yield self.slot[FORWARD, stage - 1, m]
        elif kind == BACKWARD:
            later = (BACKWARD, stage + 1, m)
            yield self.slot[later if later in self.slot else (FORWARD, stage, m)]
        elif kind == WEIGHT:
            yield self.backwards[self.rank_of[stage]][m]


def _change(what: _Slot | None) -> int:
    """The change of what a rank holds."""
    return 0 if what is None else {FORWARD: 1, BACKWARD: 0, WEIGHT: -1}[what[0]]
