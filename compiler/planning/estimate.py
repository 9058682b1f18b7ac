"""A candidate's step, composed of the figures of its stages: seconds and bytes, without compiling it.

The timeline is that of the schedule's own order by the quick estimate of searches. Of many microbatches, as many are
looked at as fill the pipeline twice; each further one takes what the busiest rank does for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil

from attrs import frozen

from partita.compiler.lowering.placement import balance
from partita.compiler.planning.miniature import Figures, Stages
from partita.compiler.planning.space import Candidate
from partita.compiler.schedules.conditions import Placement, Prices
from partita.compiler.schedules.estimate import Estimate, codes
from partita.compiler.schedules.interleaved import group_sizes
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Schedule, loop_placement, v_placement

# Schedules that run B and W at once.
WHOLE = ("gpipe", "one_f_one_b", "interleaved_1f1b")


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
    v = candidate.schedule == "zb_v"
    return v_placement(candidate.pipe, 2) if v else loop_placement(candidate.pipe, candidate.chunks)


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
    split = candidate.schedule not in WHOLE

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
    """As many microbatches as fill the pipeline twice, in groups that are as large; all of GPipe's, which it holds."""
    ranks = candidate.pipe
    if candidate.schedule == "gpipe":
        return microbatches
    groups, left = divmod(microbatches, ranks)
    more = ceil(3 * left / groups) if candidate.schedule == "interleaved_1f1b" and groups else 0
    return min(microbatches, 3 * ranks + more)


def _prices(own: Sequence[Figures], placement: Placement) -> Prices:
    home = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
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
    apart = own.forward + own.backward + own.weight
    whole = own.forward + own.whole if candidate.schedule in WHOLE else apart
    # What stands outside of turns can be made up for by a turn less, where a stage has several.
    turn = stages.turn.forward + stages.turn.whole
    extra = stages.last.forward + stages.last.whole - stages.middle.forward - stages.middle.whole
    extra -= turn if turns > candidate.stages else 0.0
    extra = max(0.0, extra, turn * (ceil(turns / candidate.pipe) - turns / candidate.pipe))
    gap = {
        "zb_h1": apart - 2 * own.weight,
        "zb_h2": max(0.0, apart - 3 * own.weight),
        "zb_v": 0.0,
    }.get(candidate.schedule, whole)
    work = (whole * candidate.chunks + extra) * microbatches + (candidate.pipe - 1) * gap
    return max(work, _way(own, candidate, microbatches))


def _way(own: Figures, candidate: Candidate, microbatches: int) -> float:
    """What a pipeline takes that has few microbatches for its length: the first one goes to the last stage, which runs
    all of them, and the last one's gradient comes back.
    """
    split = candidate.schedule not in WHOLE
    forth, back = own.forward, own.backward if split else own.whole
    turns = candidate.chunks - 1 if candidate.schedule == "zb_v" else 0  # where stages share a rank, nothing is sent
    way = (candidate.stages - 1) * (forth + back) + (candidate.stages - 1 - turns) * (own.onward + own.back)
    return way + microbatches * (forth + back) + own.weight * split


def live(candidate: Candidate, microbatches: int) -> int:
    """The most microbatches' activations that a rank holds at once, in stages (see the schedules)."""
    ranks, chunks = candidate.pipe, candidate.chunks
    if candidate.schedule == "gpipe":
        return microbatches
    if candidate.schedule == "interleaved_1f1b":
        first = group_sizes(microbatches, ranks, ranks)[0]
        return min(microbatches * chunks, 2 * (ranks - 1) + (chunks - 1) * first + 1)
    if candidate.schedule == "zb_v":
        return min(2 * ranks, 2 * microbatches)
    return min(microbatches, 2 * ranks - 1 if candidate.schedule == "zb_h2" else ranks)


def delayed(candidate: Candidate, microbatches: int) -> int:
    """The most microbatches, in stages, whose W a rank puts off (see the schedules)."""
    lag = {"zb_h1": candidate.pipe - 1, "zb_h2": 2 * (candidate.pipe - 1), "zb_v": 2 * (candidate.pipe - 1)}
    return min(microbatches, lag.get(candidate.schedule, 0))
