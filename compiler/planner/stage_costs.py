"""Costs of a candidate's stages, from a proxy: a copy of the file at full size, but with few layers.

All stages but the first and the last are alike, and each layer adds the same to a stage. A pipeline of four stages with
1, 1, 2 and 1 layers therefore determines one of any length; without a pipeline, the model with 1 layer and with 2
does. Both compile in a tenth of a second, however large the model is.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, fields, frozen

from partita.compiler.analysis.memory import at_end, resident_bytes
from partita.compiler.analysis.time import costs_of, end_seconds, silenced, stage_seconds, unsplit_seconds
from partita.compiler.costs.links import Link
from partita.compiler.pipeline import schedule_spec
from partita.compiler.planner.budget import Budget, seconds_of
from partita.compiler.planner.space import Candidate, Space
from partita.compiler.state import Scheduled

# Microbatches of a proxy, at most.
MICROBATCHES = 4
COUNTS = (1, 1, 2, 1)


@frozen
class StageCosts:
    """The costs of a stage. In seconds: its actions (`whole` is BW); F and BW without communication along the mesh
    (`quiet`), and before anything is split (`unsplit`); the end of a step; its messages to the next and to the previous
    stage. In bytes: what a microbatch keeps after F (`saved`) and after B (`kept`), all other memory among the
    microbatches (`resident_bytes`), reduced gradients, and the working set of F and of BW, which is that of B as well.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    whole: float = 0.0
    quiet: float = 0.0
    unsplit: float = 0.0
    end: float = 0.0
    send_forward: float = 0.0
    send_backward: float = 0.0
    saved: float = 0.0
    kept: float = 0.0
    resident_bytes: float = 0.0
    reduced: float = 0.0
    in_forward: float = 0.0
    in_whole: float = 0.0

    def __add__(self, other: StageCosts) -> StageCosts:
        return StageCosts(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def __sub__(self, other: StageCosts) -> StageCosts:
        return self + other * -1

    def __mul__(self, times: float) -> StageCosts:
        return StageCosts(*(getattr(self, name) * times for name in _NAMES))


_NAMES = tuple(each.name for each in fields(StageCosts))


@frozen
class Stages:
    """Stages of one layer: the `first`, one in the `middle` and the `last`; and what each further `layer` adds. Without
    a pipeline all three are the same stage.
    """

    first: StageCosts
    middle: StageCosts
    last: StageCosts
    layer: StageCosts

    def stage(self, index: int, stages: int, layers: int) -> StageCosts:
        """A stage with `layers` layers."""
        base = self.first if index == 0 else self.last if index == stages - 1 else self.middle
        return base + self.layer * (layers - 1)

    def __add__(self, other: Stages) -> Stages:
        return Stages(
            self.first + other.first, self.middle + other.middle, self.last + other.last, self.layer + other.layer
        )

    def __sub__(self, other: Stages) -> Stages:
        return self + other * -1

    def __mul__(self, times: float) -> Stages:
        return Stages(self.first * times, self.middle * times, self.last * times, self.layer * times)


Links = tuple[tuple[str, Link], ...]
# The programs of proxies, by candidate and layers of each stage.
Programs = dict[tuple[Candidate, int, tuple[int, ...]], Scheduled]


def stages_of(
    space: Space,
    candidate: Candidate,
    links: Links = (),
    hoist: bool = True,
    budget: Budget | None = None,
    programs: Programs | None = None,
    change: Callable[[Scheduled], Scheduled] | None = None,
) -> Stages:
    """The costs of a candidate's stages. They do not depend on its schedule, nor, given the `links` of its mesh and
    whether parameters in parts are gathered once a step (`hoist`), which few layers cannot tell, on the length of its
    pipeline. What it takes is spent from a budget. Programs among `programs` are not compiled again; with a `change` of
    them, such as another device, costs have no bytes, nor what is `quiet`; stages stay as cut.

    Raises Refused if the candidate does not compile.
    """
    microbatches = 1 if space.whole else min(MICROBATCHES, space.microbatches(candidate))
    known = programs if programs is not None else {}

    def measured(candidate: Candidate, layers: int, counts: tuple[int, ...] = ()) -> list[StageCosts]:
        key = candidate, layers, counts
        if key not in known:
            known[key] = schedule_spec(space.resized(candidate, microbatches, layers, counts), hoist)
            if budget is not None:
                budget.spend(seconds_of(known[key]))
        return _measured(known[key], links, change)

    if candidate.pipe == 1:
        (one,) = measured(candidate, 1)
        if space.layers < 2:
            return Stages(one, one, one, StageCosts())
        (two,) = measured(candidate, 2)
        layer = (two - one) * (1 / space.runs)
        one -= layer * (space.runs - 1)
        return Stages(one, one, one, layer)
    if space.runs == 1:
        small = evolve(candidate, pipe=len(COUNTS))
        first, middle, two, last = measured(small, sum(COUNTS), COUNTS)
        return Stages(first, middle, last, two - middle)
    # Several repeats, or one that runs several times: a layer is their average, and everything outside of them counts
    # toward the last stage.
    alone = stages_of(space, evolve(candidate, pipe=1), links, hoist, budget, known, change)
    return Stages(alone.layer, alone.layer, alone.last, alone.layer)


def _measured(state: Scheduled, links: Links, change: Callable[[Scheduled], Scheduled] | None) -> list[StageCosts]:
    """The costs of each stage of a program."""
    # The bandwidth of a link whose ports the devices of a machine share depends on the full mesh.
    known = dict(links)
    mesh_links = tuple((name, known.get(name, link)) for name, link in state.mesh.links)
    state = evolve(state, mesh=evolve(state.mesh, links=mesh_links))
    unsplit = unsplit_seconds(state.undivided or state.joint, state.spec, state.device)
    if change is not None:
        state = change(state)
    costs = costs_of(state)
    quiet = stage_seconds(silenced(state)) if change is None else {}
    stage_costs = []
    for rank, stage in zip(state.plan.ranks, state.plan.stages, strict=True):
        i = stage.index
        sent = {"forward": 0.0, "backward": 0.0}
        posts = {"forward": 0, "backward": 0}
        for message in state.partitioned.messages:
            if message.source == i and message.direction in sent:
                sent[message.direction] += costs.transfer(message)
            if i in (message.source, message.destination) and message.direction in posts:
                posts[message.direction] += 1
        send_forward, send_backward = (posts[each] * costs.post for each in ("forward", "backward"))
        seconds = StageCosts(
            forward=costs.action(i, "F") + send_forward,
            backward=costs.action(i, "B") + send_backward,
            weight=costs.action(i, "W"),
            whole=costs.action(i, "BW") + send_backward,
            unsplit=unsplit.get(i, 0.0),
            end=end_seconds(state, rank, costs.action(i, "F")),
            send_forward=sent["forward"],
            send_backward=sent["backward"],
        )
        if change is None:
            seconds = evolve(
                seconds,
                quiet=quiet[i, "F"] + quiet[i, "BW"] + send_forward + send_backward,
                saved=stage.saved,
                kept=stage.kept,
                resident_bytes=resident_bytes(state, rank),
                reduced=at_end(state, rank),
                in_forward=stage.peaks.get("F", 0),
                in_whole=stage.peaks.get("BW", 0),
            )
        stage_costs.append(seconds)
    return stage_costs
