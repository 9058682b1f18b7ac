"""A candidate's step, composed of the figures of its stages: seconds and bytes, without compiling it.

The timeline is that of the schedule's own order by the quick estimate of searches. Of many microbatches, as many are
looked at as fill the pipeline twice; each further one takes what the busiest rank does for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil

from attrs import frozen

from partita.compiler.lowering.placement import balance
from partita.compiler.planning.miniature import Figures, Stages
from partita.compiler.planning.space import Candidate
from partita.compiler.schedules.conditions import Placement, Prices
from partita.compiler.schedules.estimate import Estimate, codes
from partita.compiler.schedules.generator import SCHEDULES
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Schedule


@frozen
class Parts:
    """Where the seconds of a step go: arithmetic and memory traffic of the busiest rank, collectives that it waits for,
    waiting of the pipeline, and the step's end.
    """

    compute: float
    collectives: float
    bubble: float
    end: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.collectives + self.bubble + self.end


@frozen
class Outlook:
    """What a candidate would take: seconds of a step by parts, bytes of each rank of the pipeline."""

    parts: Parts
    memory: tuple[float, ...]

    @property
    def peak(self) -> float:
        """The most that a rank needs."""
        return max(self.memory)


def placement_of(candidate: Candidate) -> Placement:
    """Where a candidate's stages stand."""
    return SCHEDULES[candidate.schedule].placement(candidate.pipe, candidate.chunks)


def cut(stages: Stages, candidate: Candidate, turns: int) -> tuple[Figures, ...]:
    """The figures of a candidate's stages, cut as the compiler cuts: balanced by forwards."""
    count = candidate.stages
    if count == 1:
        return (stages.stage(0, 1, max(1, turns)),)
    one = stages.turn.forward
    ends = (round(each.forward - stages.middle.forward, 12) for each in (stages.first, stages.last))
    counts = _cut(turns, count, one, *ends)
    return tuple(stages.stage(i, count, each) for i, each in enumerate(counts))


@lru_cache(maxsize=4096)
def _cut(turns: int, stages: int, one: float, first: float, last: float) -> tuple[int, ...]:
    costs = [one] * turns
    costs[0] += max(0.0, first)
    costs[-1] += max(0.0, last)
    return balance(costs, stages)


@lru_cache(maxsize=256)
def _order(name: str, ranks: int, chunks: int, microbatches: int) -> tuple[Schedule, tuple[tuple[int, ...], ...]]:
    schedule = make(name, ranks, chunks, microbatches)
    return schedule, tuple(codes(actions) for actions in schedule.actions)


def memory(
    stages: Stages, own: Sequence[Figures], candidate: Candidate, microbatches: int, more: float
) -> tuple[float, ...]:
    """Bytes of each rank of the pipeline; `more` are those of inputs that the miniature did not have, on ranks that
    read them.

    What does not grow with turns (the working set of a function, buffers) counts once for each rank, however many
    stages it has.
    """
    placement = placement_of(candidate)
    if candidate.stages == 1:
        (one,) = own
        return (one.beside + max(one.saved + max(one.in_forward, one.in_whole), one.reduced) + more,)
    schedule, _ = _order(candidate.schedule, candidate.pipe, candidate.chunks, _shortened(candidate, microbatches))
    changes = [
        {
            "F": (each.saved, each.in_forward),
            "B": (each.kept - each.saved, each.in_backward),
            "W": (-each.kept, each.in_weight),
            "BW": (-each.saved, each.in_whole),
        }
        for each in own
    ]
    constant = stages.middle.beside - stages.turn.beside
    found = []
    for actions, home in zip(schedule.actions, placement, strict=True):
        beside = constant + sum(own[stage].beside - constant for stage in home)
        at_ends = any(stage in (0, candidate.stages - 1) for stage in home)
        reduced = sum(own[stage].reduced for stage in home)
        held = peak = 0.0
        for action in actions:
            change, works = changes[home[action.chunk]][action.kind]
            peak = max(peak, held + max(0.0, change) + works)
            held += change
        found.append(beside + max(peak, reduced) + more * at_ends)
    return tuple(found)


def parts(stages: Stages, own: Sequence[Figures], candidate: Candidate, microbatches: int, fixed: float) -> Parts:
    """The seconds of a step; `fixed` is what a device takes beside them."""
    placement = placement_of(candidate)
    split = SCHEDULES[candidate.schedule].split

    def busy(figures: Figures) -> float:
        return figures.forward + (figures.backward + figures.weight if split else figures.whole)

    ranks = [(sum(busy(own[stage]) for stage in home), sum(own[stage].quiet for stage in home)) for home in placement]
    most, quiet = max(ranks)
    constant = stages.middle.end - stages.turn.end if candidate.stages > 1 else 0.0
    ends = [constant + sum(own[stage].end - constant for stage in home) for home in placement]
    if candidate.stages == 1:
        makespan = most * microbatches
    else:
        looked = _shortened(candidate, microbatches)
        _, orders = _order(candidate.schedule, candidate.pipe, candidate.chunks, looked)
        _, end, _ = Estimate(placement, _prices(own, placement))(orders)
        makespan = end + (microbatches - looked) * most
    quiet = min(most, quiet)
    return Parts(
        quiet * microbatches,
        (most - quiet) * microbatches,
        max(0.0, makespan - most * microbatches),
        max(ends) + fixed,
    )


def _shortened(candidate: Candidate, microbatches: int) -> int:
    """As many microbatches as tell the timeline of all."""
    return SCHEDULES[candidate.schedule].representative(candidate.pipe, microbatches)


def _homes(placement: Placement) -> list[int]:
    """The rank of each stage."""
    return [rank for _, rank in sorted((stage, rank) for rank, stages in enumerate(placement) for stage in stages)]


def _prices(own: Sequence[Figures], placement: Placement) -> Prices:
    home = _homes(placement)
    pairs = [(own[i], own[i + 1], home[i] != home[i + 1]) for i in range(len(own) - 1)]
    return Prices(
        tuple(each.forward for each in own),
        tuple(each.backward for each in own),
        tuple(each.weight for each in own),
        tuple(each.whole for each in own),
        tuple(here.onward * apart for here, _, apart in pairs),
        tuple(there.back * apart for _, there, apart in pairs),
    )


def even(stages: Stages, candidate: Candidate, turns: int) -> Figures:
    """A stage in the middle, of a pipeline whose stages have equally many turns; without a pipeline, all of it."""
    if candidate.stages > 1:
        return stages.middle + stages.turn * (turns / candidate.stages - 1)
    if stages.first == stages.last:
        return stages.first + stages.turn * max(0, turns - 1)
    return stages.first + stages.last - stages.middle + stages.turn * (turns - 1)


def least(stages: Stages, own: Figures, candidate: Candidate, microbatches: int, turns: int) -> float:
    """About the least that the microbatches take, with `own` on each stage, where all have equally many of the turns:
    the busiest rank's work, and the bubble of the schedule at equal costs (the papers' closed forms; see the
    schedules). Turns are whole: where ranks cannot have equally many, the busiest has one more.
    """
    if candidate.stages == 1:
        return own.quiet * microbatches
    generator = SCHEDULES[candidate.schedule]
    each = own.forward + (own.backward + own.weight if generator.split else own.whole)
    # What stands outside of turns can be made up for by a turn less, where a stage has several.
    turn = stages.turn.forward + stages.turn.whole
    extra = stages.last.forward + stages.last.whole - stages.middle.forward - stages.middle.whole
    extra -= turn if turns > candidate.stages else 0.0
    extra = max(0.0, extra, turn * (ceil(turns / candidate.pipe) - turns / candidate.pipe))
    gap = generator.bubble(own) if generator.bubble is not None else 0.0
    work = (each * candidate.chunks + extra) * microbatches + (candidate.pipe - 1) * gap
    return max(work, _way(own, candidate, microbatches))


def _way(own: Figures, candidate: Candidate, microbatches: int) -> float:
    """What a pipeline takes that has few microbatches for its length: the first one goes to the last stage, which runs
    all of them, and the last one's gradient comes back.
    """
    split = SCHEDULES[candidate.schedule].split
    forth, back = own.forward, own.backward if split else own.whole
    sent = sum(one != other for one, other in pairwise(_homes(placement_of(candidate))))
    way = (candidate.stages - 1) * (forth + back) + sent * (own.onward + own.back)
    return way + microbatches * (forth + back) + own.weight * split


def live(candidate: Candidate, microbatches: int) -> int:
    """The most microbatches' activations that a rank holds at once, in stages; one, where the schedule does not say."""
    generator = SCHEDULES[candidate.schedule]
    return max(generator.live(candidate.pipe, candidate.chunks, microbatches)) if generator.live is not None else 1


def delayed(candidate: Candidate, microbatches: int) -> int:
    """The most microbatches, in stages, whose W a rank puts off."""
    return min(microbatches, SCHEDULES[candidate.schedule].lag(candidate.pipe))
