"""Predicted times of a program: seconds of each action and transfer by the cost model, their timeline, and the step.

A step is the timeline of its microbatches, then its end: what is left of the reductions of gradients, and the update.
Ranks meet there, unless updates do not wait for the norm (`validate = after`): then each begins its next step at once.
If all steps are alike, and follow each other at the longest time for which any rank is busy with one, no rank is late
for what others wait for: that is the time of a step.
What is gathered for a step starts with it, and the first action of a stage waits for it (`Ends.ready`); reductions
start within the last action of their stage (`Ends.reduced`). Communication is *exposed* to the extent that the step
would be shorter if communication took no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf, nan

from attrs import define, evolve, field, frozen

from partita.compiler.analysis.memory import copies
from partita.compiler.analysis.traffic import launch_seconds, update_nodes
from partita.compiler.codegen.functions import StageFunctions
from partita.compiler.costs.links import Link, link_of
from partita.compiler.costs.nodes import timed
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.instructions import Instruction
from partita.compiler.ops.collective import Collective
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.program import RankPlan
from partita.compiler.schedules.schedule import Action
from partita.compiler.schedules.simulator import Costs, simulate
from partita.compiler.schedules.timeline import Timeline
from partita.compiler.state import Cut, Scheduled, State
from partita.dsl.reprs import shortened

PHASES = {"F": (Phase.FORWARD,), "B": (Phase.BACKWARD,), "W": (Phase.WEIGHT,), "BW": (Phase.BACKWARD, Phase.WEIGHT)}
# A link on which messages take no time.
_NOTHING = Link("nothing", float("inf"), 0.0)


@frozen(eq=False)
class Prediction:
    """The prediction of a step, with times in seconds: of the microbatches (`timeline`), then of the end of the step on
    each rank of the pipeline (`ends`). `flops` are the model's in one step on all ranks, without recomputation; `peak`
    is the peak FLOP/s of all ranks' devices; the timeline was simulated with `costs`. `period` is the time from the
    start of a step to that of the next on each rank, if updates do not wait for the norm.
    """

    costs: Costs
    timeline: Timeline
    ends: tuple[float, ...]
    period: float | None
    fixed: float
    exposed: float
    tokens: int
    flops: float
    peak: float

    __repr__ = shortened

    @property
    def step_time(self) -> float:
        """Seconds of a whole step."""
        return self.waiting_time if self.period is None else self.period + self.fixed

    @property
    def waiting_time(self) -> float:
        """Seconds of a step at whose end all ranks meet."""
        return self.timeline.makespan + max(self.ends) + self.fixed

    @property
    def tokens_per_second(self) -> float:
        """Tokens (elements of the model's input) per second, over all ranks."""
        return self.tokens / self.step_time

    @property
    def mfu(self) -> float:
        """Model-FLOPs utilization: the model's matrix-product FLOP/s as a share of peak (PaLM, arXiv 2204.02311)."""
        return self.flops / (self.step_time * self.peak)

    @property
    def exposed_communication(self) -> float:
        """Exposed communication as a share of the step."""
        return self.exposed / self.step_time


def predict(state: Scheduled, overlap: bool = True, exposed: bool = True) -> Prediction:
    """Predict a compiled program; without `overlap`, one that waits for all that it sends. Without `exposed`, which
    takes half of the prediction's time, exposed communication is NaN.
    """
    costs, found, ends, period = _simulated(state, overlap)
    shown = nan
    if exposed:
        _, without, silent, least = _simulated(silenced(state), overlap=True)
        shown = found.makespan + max(ends) - without.makespan - max(silent)
        if period is not None and least is not None:
            shown = period - least
        shown = max(0.0, shown)
    peak = state.device.flops[state.train.precision] * state.mesh.ranks
    return Prediction(
        costs,
        found,
        ends,
        period,
        state.device.step,
        shown,
        state.plan.tokens,
        state.flops,
        peak,
    )


def _simulated(state: Scheduled, overlap: bool) -> tuple[Costs, Timeline, tuple[float, ...], float | None]:
    """The costs, the timeline of the microbatches, what each rank takes after it, and the period."""
    around = {rank.rank: Ends(state, rank, overlap) for rank in state.plan.ranks}
    late = state.training and state.train.late
    costs, found = _timed(state, costs_of(state, overlap), around, late)
    reduced = []
    for each, line in zip(around.values(), found.actions, strict=True):
        chunks = {interval.work.chunk: interval.end for interval in line if isinstance(interval.work, Action)}
        reduced.append(each.reduced({each.rank.stages[chunk]: end for chunk, end in chunks.items()}))
    summed = max(reduced) - found.makespan  # the statistics are summed over all ranks
    ends = tuple(summed + each.alone for each in around.values())
    return costs, found, ends, _period(state, around, found, reduced) if late else None


def _timed(state: Scheduled, costs: Costs, around: Mapping[int, Ends], late: bool) -> tuple[Costs, Timeline]:
    """The costs with what is waited for at the start of a step, and the timeline. What is gathered starts as the ranks
    meet or, if they do not, as each begins.
    """
    begun = dict.fromkeys(around, 0.0)
    for _ in around:
        ready = {stage: begun[rank] + after for rank, each in around.items() for stage, after in each.ready.items()}
        costs = evolve(costs, ready=ready)
        found = simulate(_instructions(state), costs)
        starts = {rank: line[0].start for rank, line in enumerate(found.actions) if line}
        if not late or not ready or starts == begun:
            break
        begun = starts
    return costs, found


def _period(state: Scheduled, around: Mapping[int, Ends], found: Timeline, reduced: Sequence[float]) -> float:
    """The longest time for which any rank is busy with a step. Those that exchange totals wait for each other."""
    wire = _wire(state)
    done = list(reduced)
    for rank in state.plan.ranks:
        for each in rank.sends:
            ends = each.transfer.channel.source, each.transfer.channel.destination
            there = max(reduced[end] for end in ends) + wire.latency + each.type.bytes / wire.bandwidth
            for end in ends:
                done[end] = max(done[end], there)
    return max(occupied(found, rank, done[rank]) + each.alone + each.copying for rank, each in around.items())


def occupied(timeline: Timeline, rank: int, done: float = 0.0) -> float:
    """How long a rank is occupied with the microbatches of a step: from when the next one may begin to send what it
    first receives, until it has sent all, and is `done`.
    """
    line = timeline.actions[rank]
    first, last = line[0].start, max(done, line[-1].end)
    arriving = 0.0
    for channel, transfers in timeline.transfers.items():
        if channel.source == rank:
            last = max(last, transfers[-1].end)
        if channel.destination == rank and transfers[0].end <= first:
            arriving = max(arriving, transfers[0].duration)
    return last - first + arriving


def compiles(state: Cut) -> bool:
    """Whether torch compiles the program when it runs."""
    preferred = state.train.compile
    return state.compiled or (state.device.gpu if preferred is None else preferred)


def stage_seconds(state: Cut, overlap: bool = True) -> dict[tuple[int, str], float]:
    """Predicted seconds of each kind of action of each stage: {(stage, kind): seconds}."""
    found: dict[tuple[int, str], float] = {}
    for stage in state.partitioned.stages:
        for kind, phases in PHASES.items():
            nodes = [node for node in stage.nodes if node.phase in phases]
            keep = {value for node in stage.nodes if node.phase not in phases for value in node.inputs}
            walk = _Walk(state, overlap)
            walk.run(nodes, keep)
            found[stage.index, kind] = state.device.action + walk.arrived
    return found


def end_seconds(state: Scheduled, rank: RankPlan) -> float:
    """Seconds that a rank takes once a step, in addition to its microbatches, if its stages do not wait for others."""
    ends = Ends(state, rank)
    first = rank.stages[0]
    waits = max(0.0, ends.ready.get(first, 0.0) - stage_seconds(state)[first, "F"])
    return waits + ends.reduced(dict.fromkeys(rank.stages, 0.0)) + ends.alone


@define(eq=False)
class Ends:
    """What a rank does once a step, besides its microbatches; without `overlap`, waiting for all that it starts.

    `ready` says when the first action of a stage can end at the earliest, in seconds from the start of the
    microbatches, because of what is gathered for it. `alone` are the seconds of what runs neither beside the
    microbatches nor before the statistics: prologues, zeroing of accumulators, and the update. `copying` are those of
    the copies that are made before an update that does not wait.
    """

    state: Scheduled
    rank: RankPlan
    overlap: bool = True
    ready: dict[int, float] = field(init=False)
    alone: float = field(init=False)
    copying: float = field(init=False)
    _functions: dict[int, StageFunctions] = field(init=False)

    def __attrs_post_init__(self) -> None:
        state, schedule = self.state, self.state.schedule
        kinds = {action.kind for action in schedule.actions[self.rank.rank]}
        stages = [state.partitioned.stages[index] for index in self.rank.stages]
        found = [StageFunctions(state.partitioned, stage, kinds, compiles(state)) for stage in stages]
        self._functions = dict(zip(self.rank.stages, found, strict=True))
        self.ready, prologue = self._gathered()
        update = _Walk(state, self.overlap)
        update.run([*state.update.clip, *update_nodes(state, self.rank)])
        cleared = sum(each.value.type.bytes for stage in stages for each in stage.accumulators)
        self.alone = prologue + update.arrived + cleared / (state.device.bandwidth * state.device.streaming)
        if state.device.gpu:
            parameters = {each.name: each for stage in stages for each in stage.parameters}
            copied = sum(each.value.type.bytes for name, each in parameters.items() if name in state.on_host)
            self.alone += copied / state.device.host_link
        there, host = (2 * sum(copies(state, self.rank, host)) for host in (False, True))
        self.copying = there / (state.device.bandwidth * state.device.streaming) + host / state.device.host_bandwidth

    def _gathered(self) -> tuple[dict[int, float], float]:
        """`ready`, and the seconds of the prologues."""
        walk = _Walk(self.state, self.overlap)
        for of in self._functions.values():
            walk.run(of.gathered.start)
        for of in self._functions.values():
            walk.run(of.prologue)
        found = {}
        for index, of in self._functions.items():
            if of.gathered.collectives:
                # As if the action had begun long ago, and waited for nothing else.
                arrival = {value: end - walk.now for value, end in walk.arrival.items()}
                opening = _Walk(self.state, self.overlap, -inf, arrival)
                opening.run(of.opening)
                last = (arrival[value] for node in of.gathered.collectives for value in node.outputs)
                found[index] = max(opening.arrived, *last)
        return found, walk.now

    def reduced(self, ends: Mapping[int, float]) -> float:
        """When the rank has its statistics, if the last actions of its stages end at these times."""
        state = self.state
        left = _Walk(state, self.overlap, max(ends.values()))
        for index in sorted(ends, key=lambda stage: (ends[stage], stage)):
            nodes = dict(state.update.reduce).get(index)
            if nodes is not None:
                of, kind = self._functions[index], state.schedule.last_kind(index)
                reduced = of.reduced(nodes, state.update.totals[index])
                action = _Walk(state, self.overlap)
                action.run(of.groups[kind])
                closing = _Walk(state, self.overlap, ends[index] - action.arrived, {}, left.free)
                closing.run(of.closing(kind, reduced))
                left.now = max(left.now, closing.now)
                left.arrival.update(closing.arrival)
                left.run([*reduced.others, *reduced.follow])
        left.now = left.arrived
        left.run(state.update.statistic_nodes(self.rank.stages))
        return left.arrived


@define(eq=False)
class _Walk:
    """Runs nodes in order, `now` on. A collective runs from its node to the first reader of its result (without
    `overlap`, nothing else runs meanwhile); collectives that share a link are serialized: it is `free` afterwards.
    """

    state: Cut
    overlap: bool
    now: float = 0.0
    arrival: dict[Value, float] = field(factory=dict)
    free: dict[str, float] = field(factory=dict)

    @property
    def arrived(self) -> float:
        """When all has run, and all collectives are complete."""
        return max([self.now, *self.free.values()])

    def run(self, nodes: Iterable[Node], keep: Collection[Value] = ()) -> None:
        """Run nodes; `keep` outlives them."""
        state, wire, resharding = self.state, _wire(self.state), Resharding(self.state.mesh)
        for node, own in timed(tuple(nodes), state.device, compiles(state), keep):
            self.now = max([self.now, *(self.arrival[value] for value in node.inputs if value in self.arrival)])
            if isinstance(node.op, Collective):
                link = resharding.mesh.link(node.op.over)
                self.now += 2 * link.post
                end = max(self.now, self.free.get(link.name, -inf)) + sum(launch_seconds(resharding, node, node.op))
                self.free[link.name] = end
                self.arrival.update(dict.fromkeys(node.outputs, end))
                self.now = self.now if self.overlap else end
            elif node.op.sends and not self.overlap:
                self.now += wire.latency + sum(value.type.bytes for value in node.inputs) / wire.bandwidth
            else:
                self.now += own


def costs_of(state: Cut, overlap: bool = True) -> Costs:
    """The costs of a partitioned program; without `overlap`, actions last until what they send has arrived."""
    link = _wire(state)
    actions = stage_seconds(state, overlap)
    return Costs(
        lambda stage, kind: actions[stage, kind],
        lambda message: link.latency + message.bytes / link.bandwidth if overlap else 0.0,
        post=link.post,
    )


def _wire(state: Cut) -> Link:
    """The link from one rank of the pipeline to another."""
    pipe = state.pipeline.axis
    return dict(state.mesh.links).get(pipe or "", link_of(state.spec.mesh, pipe))


def _instructions(state: Scheduled) -> tuple[tuple[Instruction, ...], ...]:
    return tuple(rank.instructions for rank in state.plan.ranks)


def silenced(state: State) -> State:
    """A state whose communication takes no time."""
    return evolve(state, mesh=state.mesh.joined_by(_NOTHING))
