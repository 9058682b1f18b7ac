"""Estimates a candidate's step time and memory from the costs of its stages, without compiling it.

The timeline is `schedules.estimate` of the schedule's order. If there are many microbatches, only a representative
number of them is simulated; each further one adds the time that the busiest rank needs for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil

from attrs import frozen

from partita.compiler.passes.place import balance
from partita.compiler.planner.space import Candidate
from partita.compiler.planner.stage_costs import StageCosts, Stages
from partita.compiler.schedules.conditions import Placement, StageTimes
from partita.compiler.schedules.estimate import Estimate, codes
from partita.compiler.schedules.generator import SCHEDULES
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Schedule, ranks_of


@frozen
class Parts:
    """Where the seconds of a step go: arithmetic and memory traffic of the busiest rank, collectives it waits for, the
    pipeline bubble, and the end of the step.
    """

    compute: float
    collectives: float
    bubble: float
    end: float

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.compute + self.collectives + self.bubble + self.end


@frozen
class CandidateEstimate:
    """An estimate of a candidate: the seconds of a step in parts, and the bytes of each pipeline rank."""

    parts: Parts
    memory: tuple[float, ...]

    @property
    def peak(self) -> float:
        """The largest memory of a rank."""
        return max(self.memory)


def placement_of(candidate: Candidate) -> Placement:
    """The ranks of a candidate's stages."""
    return SCHEDULES[candidate.schedule].placement(candidate.pipe, candidate.chunks)


def cut(stages: Stages, candidate: Candidate, layers: int) -> tuple[StageCosts, ...]:
    """The costs of a candidate's stages, with the layers of ranks balanced by what they compute, as in the compiler."""
    count = candidate.stages
    if count == 1:
        return (stages.stage(0, 1, max(1, layers)),)
    one = stages.layer.unsplit
    ends = (round(each.unsplit - stages.middle.unsplit, 12) for each in (stages.first, stages.last))
    stage_ranks = ranks_of(placement_of(candidate))
    counts = _cut(layers, tuple(stage_ranks[stage] for stage in range(count)), one, *ends)
    return tuple(stages.stage(i, count, each) for i, each in enumerate(counts))


@lru_cache(maxsize=4096)
def _cut(layers: int, stage_ranks: tuple[int, ...], one: float, first: float, last: float) -> tuple[int, ...]:
    costs = [one] * layers
    costs[0] += max(0.0, first)
    costs[-1] += max(0.0, last)
    return balance(costs, stage_ranks)


@lru_cache(maxsize=256)
def _order(name: str, ranks: int, chunks: int, microbatches: int) -> tuple[Schedule, tuple[tuple[int, ...], ...]]:
    schedule = make(name, ranks, chunks, microbatches)
    return schedule, tuple(codes(actions) for actions in schedule.actions)


def memory(
    stages: Stages, own: Sequence[StageCosts], candidate: Candidate, microbatches: int, more: float
) -> tuple[float, ...]:
    """Bytes of each pipeline rank. `more` are those of inputs that the proxy did not have, on ranks that read them.

    Memory that does not grow with layers (the working set of a function, buffers) counts once per rank, not per stage.
    """
    placement = placement_of(candidate)
    if candidate.stages == 1:
        (one,) = own
        return (one.resident_bytes + max(one.saved + max(one.in_forward, one.in_whole), one.reduced) + more,)
    schedule, _ = _order(candidate.schedule, candidate.pipe, candidate.chunks, _shortened(candidate, microbatches))
    changes = [
        {
            "F": (each.saved, each.in_forward),
            "B": (each.kept - each.saved, each.in_whole),
            "W": (-each.kept, 0.0),
            "BW": (-each.saved, each.in_whole),
        }
        for each in own
    ]
    constant = stages.middle.resident_bytes - stages.layer.resident_bytes
    totals = []
    for actions, stages_held in zip(schedule.actions, placement, strict=True):
        beside = constant + sum(own[stage].resident_bytes - constant for stage in stages_held)
        at_ends = any(stage in (0, candidate.stages - 1) for stage in stages_held)
        reduced = sum(own[stage].reduced for stage in stages_held)
        live_bytes = peak = 0.0
        for action in actions:
            change, works = changes[stages_held[action.chunk]][action.kind]
            peak = max(peak, live_bytes + max(0.0, change) + works)
            live_bytes += change
        totals.append(beside + max(peak, reduced) + more * at_ends)
    return tuple(totals)


def parts(
    stages: Stages,
    own: Sequence[StageCosts],
    candidate: Candidate,
    microbatches: int,
    fixed: float,
    replicas_per_rank: int = 1,
) -> Parts:
    """The seconds of a step; `fixed` is the device's constant overhead. A rank trains `replicas_per_rank` groups, one
    after the other; the time of averaging them is not estimated.
    """
    placement = placement_of(candidate)
    split = SCHEDULES[candidate.schedule].split

    def busy(figures: StageCosts) -> float:
        return figures.forward + (figures.backward + figures.weight if split else figures.whole)

    ranks = [
        (sum(busy(own[stage]) for stage in stages_held), sum(own[stage].quiet for stage in stages_held))
        for stages_held in placement
    ]
    busiest, quiet = max(ranks)
    constant = stages.middle.end - stages.layer.end if candidate.stages > 1 else 0.0
    ends = [constant + sum(own[stage].end - constant for stage in stages_held) for stages_held in placement]
    if candidate.stages == 1:
        makespan = busiest * microbatches
    else:
        looked = _shortened(candidate, microbatches)
        _, orders = _order(candidate.schedule, candidate.pipe, candidate.chunks, looked)
        _, end, _ = Estimate(placement, _prices(own, placement))(orders)
        makespan = end + (microbatches - looked) * busiest
    quiet = min(busiest, quiet)
    return Parts(
        quiet * microbatches * replicas_per_rank,
        (busiest - quiet) * microbatches * replicas_per_rank,
        max(0.0, makespan - busiest * microbatches) * replicas_per_rank,
        max(ends) * replicas_per_rank + fixed,
    )


def _shortened(candidate: Candidate, microbatches: int) -> int:
    """The number of microbatches whose timeline represents that of all."""
    return SCHEDULES[candidate.schedule].representative(candidate.pipe, microbatches)


def _prices(own: Sequence[StageCosts], placement: Placement) -> StageTimes:
    rank_of = ranks_of(placement)
    pairs = [(own[i], own[i + 1], rank_of[i] != rank_of[i + 1]) for i in range(len(own) - 1)]
    return StageTimes(
        tuple(each.forward for each in own),
        tuple(each.backward for each in own),
        tuple(each.weight for each in own),
        tuple(each.whole for each in own),
        tuple(here.send_forward * apart for here, _, apart in pairs),
        tuple(following.send_backward * apart for _, following, apart in pairs),
    )


def even(stages: Stages, candidate: Candidate, layers: int) -> StageCosts:
    """A middle stage if all stages had equally many layers; without a pipeline, the only stage."""
    if candidate.stages > 1:
        return stages.middle + stages.layer * (layers / candidate.stages - 1)
    if stages.first == stages.last:
        return stages.first + stages.layer * max(0, layers - 1)
    return stages.first + stages.last - stages.middle + stages.layer * (layers - 1)


def step_time_lower_bound(
    stages: Stages, own: StageCosts, candidate: Candidate, microbatches: int, layers: int
) -> float:
    """An approximate lower bound of the microbatches' time, with costs `own` on each stage and evenly spread layers:
    the busiest rank's work plus the schedule's bubble at equal costs (the papers' closed forms; see the schedules). If
    layers do not divide evenly over ranks, the busiest rank has one more.
    """
    if candidate.stages == 1:
        return own.quiet * microbatches
    generator = SCHEDULES[candidate.schedule]
    each = own.forward + (own.backward + own.weight if generator.split else own.whole)
    # A stage with several layers can offset work outside of layers by having one layer less.
    layer = stages.layer.forward + stages.layer.whole
    extra = stages.last.forward + stages.last.whole - stages.middle.forward - stages.middle.whole
    extra -= layer if layers > candidate.stages else 0.0
    extra = max(0.0, extra, layer * (ceil(layers / candidate.pipe) - layers / candidate.pipe))
    gap = generator.bubble(own) if generator.bubble is not None else 0.0
    work = (each * candidate.chunks + extra) * microbatches + (candidate.pipe - 1) * gap
    return max(work, _fill_drain_bound(own, candidate, microbatches))


def _fill_drain_bound(own: StageCosts, candidate: Candidate, microbatches: int) -> float:
    """A bound for a pipeline with few microbatches: the first one passes through to the last stage, which then runs all
    of them, and the last one's gradient passes back.
    """
    split = SCHEDULES[candidate.schedule].split
    forward, backward = own.forward, own.backward if split else own.whole
    rank_of = ranks_of(placement_of(candidate))
    sent = sum(rank_of[stage] != rank_of[stage + 1] for stage in range(candidate.stages - 1))
    through = (candidate.stages - 1) * (forward + backward) + sent * (own.send_forward + own.send_backward)
    return through + microbatches * (forward + backward) + own.weight * split


def live(candidate: Candidate, microbatches: int) -> int:
    """The most microbatches, in stages, live on a rank at once; one if the schedule does not say."""
    generator = SCHEDULES[candidate.schedule]
    return max(generator.live(candidate.pipe, candidate.chunks, microbatches)) if generator.live is not None else 1


def delayed(candidate: Candidate, microbatches: int) -> int:
    """The most microbatches, in stages, whose W a rank defers."""
    return min(microbatches, SCHEDULES[candidate.schedule].lag(candidate.pipe))
