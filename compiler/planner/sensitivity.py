"""What would have to be true for the second best plan to be the best: of one record of a link or the device at a time.

Both plans are estimated again, from the programs of their proxies, with the record scaled. An estimate counts in
proportion to what the same plan is predicted to take: step(scaled) = predicted · estimate(scaled) / estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import copysign, exp, log

from attrs import evolve, frozen

from partita.compiler.costs.devices import Device
from partita.compiler.costs.links import LINKS
from partita.compiler.mesh import mesh_of
from partita.compiler.planner.budget import AGAIN, Budget
from partita.compiler.planner.estimate import cut, parts
from partita.compiler.planner.space import Candidate, Space
from partita.compiler.planner.stage_costs import Links, Programs, stages_of
from partita.compiler.schedules.generator import SCHEDULES
from partita.compiler.state import Scheduled
from partita.dsl.config.builtins import DEFAULT_SCHEDULE
from partita.dsl.diagnostic import Refused

# How much slower or faster than recorded something may be; and how exactly the factor is found where plans are alike.
FURTHEST, NEAR = 8.0, 0.01
STEPS = 12


@frozen
class Record:
    """A figure of the cost model: how many of a `unit` in a second something does; None if the record has several."""

    name: str
    figure: float | None
    unit: str
    scaled: Callable[[Scheduled, float], Scheduled]


@frozen
class Wins:
    """The second best plan is the best beyond this `factor` of a record, above it or below."""

    record: Record
    factor: float


@frozen
class RunnerUp:
    """By what share of the best plan's step the second best takes longer, and when it does not."""

    margin: float
    wins: tuple[Wins, ...]


def runner_up(
    space: Space, device: Device, best: tuple[Candidate, float], second: tuple[Candidate, float], budget: Budget
) -> RunnerUp:
    """When the second of two candidates, each with the seconds of its step, would be the best."""
    margin = second[1] / best[1] - 1
    try:
        pair = [_Scaled(space, device, *each, budget) for each in (best, second)]
    except Refused:
        return RunnerUp(margin, ())

    def lead(record: Record, factor: float) -> float:
        """How much faster the second is, as the logarithm of a ratio."""
        first, other = (each.seconds(record, factor) for each in pair)
        return log(first / other)

    now = -log(1 + margin)
    wins = []
    for record in records(space, device, best[0], second[0]):
        for furthest in (1 / FURTHEST, FURTHEST):
            furthest_lead = lead(record, furthest)
            if furthest_lead > 0 >= now:
                wins.append(Wins(record, _crossing(partial(lead, record), now, furthest, furthest_lead)))
    return RunnerUp(margin, tuple(sorted(wins, key=lambda each: abs(log(each.factor)))))


def _crossing(lead: Callable[[float], float], now: float, furthest: float, furthest_lead: float) -> float:
    """The factor between 1 and the furthest at which a lead becomes positive: by regula falsi (Illinois), which comes
    close from one side; where it is within reach of that end, the next step is as far as needs be to be beyond.
    """
    low, high = 0.0, log(furthest)
    below, above = now, furthest_lead
    for _ in range(STEPS):
        middle = (low * above - high * below) / (above - below)
        reach = copysign(0.9 * NEAR, high - low)
        if abs(middle - low) < abs(reach) / 2:
            middle = low + reach
        elif abs(high - middle) < abs(reach) / 2:
            middle = high - reach
        middle_lead = lead(exp(middle))
        if middle_lead > 0:
            high, above, below = middle, middle_lead, below / 2
        else:
            low, below, above = middle, middle_lead, above / 2
        if abs(high - low) < NEAR:
            break
    return exp(high)


def records(space: Space, device: Device, *candidates: Candidate) -> Iterator[Record]:
    """The links of some candidates, and the device."""
    for name, link in {link.name: link for each in candidates for _, link in _links(space, each)}.items():
        figure = LINKS[name].bandwidth if name in LINKS else link.bandwidth
        yield Record(name, figure, "B/s", partial(_other_link, name))
    yield Record(f"arithmetic of {device.name}", None, "", _other_flops)
    yield Record(f"memory of {device.name}", device.bandwidth, "B/s", _other_memory)


def _other_link(name: str, state: Scheduled, factor: float) -> Scheduled:
    links = tuple(
        (
            axis,
            evolve(link, bandwidth=link.bandwidth * factor, collective_bandwidth=link.collective_bandwidth * factor)
            if link.name == name
            else link,
        )
        for axis, link in state.mesh.links
    )
    return evolve(state, mesh=evolve(state.mesh, links=links))


def _other_flops(state: Scheduled, factor: float) -> Scheduled:
    flops = {dtype: each * factor for dtype, each in state.device.flops.items()}
    return evolve(state, device=evolve(state.device, flops=flops))


def _other_memory(state: Scheduled, factor: float) -> Scheduled:
    return evolve(state, device=evolve(state.device, bandwidth=state.device.bandwidth * factor))


def _links(space: Space, candidate: Candidate) -> Links:
    """The links of a candidate's mesh, along axes that have several ranks."""
    mesh = mesh_of(space.mesh_of(candidate), space.pipe)
    return tuple((name, link) for name, link in mesh.links if mesh.sizes[name] > 1)


class _Scaled:
    """Estimates of one candidate with other records. Orders that are searched for count as the default's."""

    def __init__(self, space: Space, device: Device, candidate: Candidate, predicted: float, budget: Budget) -> None:
        known = SCHEDULES[candidate.schedule]
        plain = known.conditional or known.written is not None
        self.candidate = evolve(candidate, schedule=DEFAULT_SCHEDULE, chunks=1) if plain else candidate
        self.space, self.device, self.budget, self.programs = space, device, budget, Programs()
        self.links = mesh_of(space.mesh_of(candidate), space.pipe).links
        self.predicted, self.estimate = predicted, 1.0
        self.estimate = self._estimate(lambda state: state)  # as with every change

    def seconds(self, record: Record, factor: float) -> float:
        """The seconds of a step with a record scaled."""
        return self.predicted * self._estimate(lambda state: record.scaled(state, factor)) / self.estimate

    def _estimate(self, change: Callable[[Scheduled], Scheduled]) -> float:
        space, candidate = self.space, self.candidate
        shape = evolve(
            candidate,
            schedule=DEFAULT_SCHEDULE,
            chunks=1,
            pipe=min(candidate.pipe, 2),
            shared=False,
            slices=1,
            late=False,
        )
        hoist = space.gathers_once(candidate)
        stages = stages_of(space, shape, self.links, hoist, self.budget, self.programs, change)
        nodes = sum(len(stage.nodes) for state in self.programs.values() for stage in state.partitioned.stages)
        self.budget.spend(nodes * AGAIN)
        own = cut(stages, candidate, space.layers)
        replicas_per_rank = space.replicas_per_rank(candidate)
        return parts(stages, own, candidate, space.microbatches(candidate), self.device.step, replicas_per_rank).step
