"""Building blocks: when each stage would run a microbatch, relative to the first, repeated at a fixed interval.

What a rank holds is then the sum of the lifespans of its stages' activations, divided by the interval: short lifespans,
little memory (Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362 §3). In a V, where rank r has
stages r and 2P−1−r, lifespans of the two add up to the same on all ranks if the steps from rank to rank do. A block is
the plan of a schedule; `partita.compiler.schedules.execution` makes an order of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, product

from attrs import frozen

from partita.compiler.schedules.estimate import Codes, code
from partita.compiler.schedules.schedule import BACKWARD, FORWARD, v_placement

# One action a slot: F, B and W of two chunks.
INTERVAL = 6


@frozen
class Block:
    """The start of each stage's F and B on the first microbatch, and the interval between microbatches."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    interval: float

    def plan(self, placement: Sequence[Sequence[int]], microbatches: int) -> list[Codes]:
        """Each rank's F and B in the order of the repeated block."""
        plan = []
        for stages in placement:
            starts = [
                (start[stage] + m * self.interval, code(kind, chunk))
                for chunk, stage in enumerate(stages)
                for kind, start in ((FORWARD, self.forward), (BACKWARD, self.backward))
                for m in range(microbatches)
            ]
            plan.append(tuple(each for _, each in sorted(starts)))
        return plan

    def apart(self, placement: Sequence[Sequence[int]]) -> bool:
        """Whether no two F and B of a rank need the same slot, if all start in whole slots."""
        for stages in placement:
            slots = {round(start[stage]) % self.interval for stage in stages for start in (self.forward, self.backward)}
            if len(slots) < 2 * len(stages):
                return False
        return True


def in_steps(forward: Sequence[float], turn: float, backward: Sequence[float], interval: float) -> Block:
    """The block in which each stage's F starts `forward[i]` after the F of the stage before, the last stage's B `turn`
    after its F, and each stage's B `backward[i]` after the B of the stage behind it, last stages first.
    """
    starts = tuple(accumulate(forward, initial=0.0))
    ends = tuple(accumulate(backward, initial=starts[-1] + turn))
    return Block(starts, ends[::-1], interval)


def in_a_v(ranks: int, steps: Sequence[float], turns: Sequence[float], interval: float = INTERVAL) -> Block:
    """The block of a V with steps from rank to rank of F down and up, B down and up, and with the steps at its three
    turns: from F to F on the last rank, F to B on the first, B to B on the last.
    """
    down, up, back, home = ([step] * (ranks - 1) for step in steps)
    return in_steps([*down, turns[0], *up], turns[1], [*back, turns[2], *home], interval)


@cache
def turns_for(ranks: int, steps: tuple[float, ...]) -> tuple[int, int, int] | None:
    """The shortest steps at the three turns of a V with which no two actions of a rank need the same slot."""
    placement = v_placement(ranks)
    slots = range(1, INTERVAL + 1)
    every = ((first, second, third) for first, second, third in product(slots, repeat=3))
    fitting = (each for each in every if in_a_v(ranks, steps, each).apart(placement))
    return min(fitting, key=lambda each: (sum(each), max(each), each), default=None)
