"""Predicted times of a program: seconds of each action and transfer by the cost model, their timeline, and the step.

A step is the timeline of its microbatches, then its epilogue: the rest of the gradient reductions, and the update.
Ranks synchronize there, unless updates do not wait for the norm (`validate = after`): then each begins its next step at
once. In a steady state of equal steps, each takes as long as its busiest rank computes: at that pace no rank is late
with anything that others wait for.

Gathers of a step start with it, and the first action of a stage waits for them (`StepEpilogue.ready`); reductions start
within the last action of their stage (`StepEpilogue.reduced`). Where updates use gradients of k steps before,
reductions have k more steps to complete in (`StepEpilogue.summed`). Communication is *exposed* to the extent that the
step would be shorter if communication took no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import inf, nan

from attrs import define, evolve, field, frozen

from partita.compiler.analysis.execution import OURS, Execution, fp8_operands, in_pieces, timed_as
from partita.compiler.analysis.liveness import roots
from partita.compiler.analysis.memory import PHASES, copies
from partita.compiler.analysis.traffic import launch_seconds, outer_nodes, update_nodes
from partita.compiler.codegen.functions import StageFunctions
from partita.compiler.costs.devices import Device
from partita.compiler.costs.links import Link, link_of
from partita.compiler.costs.nodes import launches
from partita.compiler.costs.nodes import seconds as node_seconds
from partita.compiler.graph import Graph, Node, Phase, Value
from partita.compiler.instructions import Instruction
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.communication import Receive, Send, Transfer
from partita.compiler.ops.host import ASYNC_COPIES, ToDevice, ToHost
from partita.compiler.ops.optimizer import target_of
from partita.compiler.passes.cut import StageGraph
from partita.compiler.passes.outer import joined_mesh
from partita.compiler.passes.place import iteration_of
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.program import RankPlan
from partita.compiler.schedules.schedule import Action
from partita.compiler.schedules.simulator import Costs, simulate
from partita.compiler.schedules.timeline import Timeline
from partita.compiler.state import Cut, Scheduled, State
from partita.dsl import spec as language
from partita.dsl.check.divisibility import shared_axes
from partita.dsl.reprs import Shortened
from partita.dsl.types import BYTES

# A link on which messages take no time.
_NOTHING = Link("nothing", float("inf"), 0.0)
# The link to the host and from there, among those of a mesh.
OUT, IN = "~copies out", "~copies in"


@frozen(eq=False, repr=False)
class Prediction(Shortened):
    """The prediction of a step, with times in seconds: of the microbatches (`timeline`), then of the end of the step on
    each rank of the pipeline (`ends`). `flops` are the model's in one step on all ranks, without recomputation; `peak`
    is the peak FLOP/s of all ranks' devices; the timeline was simulated with `costs`. `period` is the time from the
    start of a step to that of the next on each rank, if updates do not wait for the norm. With replica groups, a rank
    does all this for each of its `replicas_per_rank`, and `average` is the share of each step that averaging takes.
    `copying` are the most seconds that a rank copies between the device's memory and the host's (`offload`), and
    `exposed_copies` by how much the step would be shorter if that took no time.
    """

    costs: Costs
    timeline: Timeline
    ends: tuple[float, ...]
    period: float | None
    fixed: float
    exposed: float
    counted: int
    unit: str
    flops: float
    peak: float
    replicas_per_rank: int = 1
    average: float = 0.0
    copying: float = 0.0
    exposed_copies: float = 0.0

    @property
    def step_time(self) -> float:
        """Seconds of a whole step."""
        return self.waiting_time if self.period is None else self.period + self.fixed

    @property
    def waiting_time(self) -> float:
        """Seconds of a step at whose end all ranks meet."""
        return self.replicas_per_rank * (self.timeline.makespan + max(self.ends)) + self.average + self.fixed

    @property
    def rate(self) -> float:
        """Tokens, or else rows of the batch (`unit`), per second, over all ranks."""
        return self.counted / self.step_time

    @property
    def mfu(self) -> float:
        """Model-FLOPs utilization: the model's matrix-product FLOP/s as a share of peak (PaLM, arXiv 2204.02311)."""
        return self.flops / (self.step_time * self.peak)

    @property
    def exposed_communication(self) -> float:
        """Exposed communication as a share of the step."""
        return self.exposed / self.step_time


def predict(state: Scheduled, execution: Execution = OURS, exposed: bool = True) -> Prediction:
    """Predict a compiled program, executed as said. Without `exposed`, which takes half of the prediction's time,
    exposed communication is NaN.
    """
    costs, timeline, ends, period = _simulated(state, execution)
    shown = nan
    if exposed:
        _, without, silent, silent_period = _simulated(silenced(state), OURS)
        shown = timeline.makespan + max(ends) - without.makespan - max(silent)
        if period is not None and silent_period is not None:
            shown = period - silent_period
        shown = max(0.0, state.replicas_per_rank * shown + _average(state) - _average(silenced(state)))
    peak = state.device.flops[state.train.dtype] * state.mesh.ranks
    copying = max(host_seconds(state, rank) for rank in state.plan.ranks)
    exposed_copies = nan if copying and not exposed else 0.0
    if copying and exposed:
        free = evolve(state, device=evolve(state.device, host_link=inf))
        _, without, silent, silent_period = _simulated(free, execution)
        exposed_copies = state.replicas_per_rank * (timeline.makespan + max(ends) - without.makespan - max(silent))
        exposed_copies += _average(state) - _average(free)
        if period is not None and silent_period is not None:
            exposed_copies = period - silent_period
    return Prediction(
        costs,
        timeline,
        ends,
        period,
        state.device.step,
        shown,
        *state.plan.counted,
        state.flops,
        peak,
        state.replicas_per_rank,
        _average(state),
        copying,
        max(0.0, exposed_copies),
    )


def host_seconds(state: Scheduled, rank: RankPlan) -> float:
    """Seconds for which a rank copies between the device's memory and the host's in a step, for each of its groups, and
    for their average.
    """
    if not state.device.gpu:
        return 0.0
    once = list(update_nodes(state, rank))
    total = casts_on_host(state, rank)
    seconds = copy_seconds(state)
    for index in rank.stages:
        once += dict(state.update.reduce).get(index, ())
        every = [node for node in state.partitioned.stages[index].nodes if node.phase is not Phase.PROLOGUE]
        total += state.plan.microbatches * _copying(state, every)
        total += 2 * state.plan.offloads(index) * seconds.get(index, 0.0)
    average = _copying(state, outer_nodes(state, rank)) / state.every
    return state.replicas_per_rank * (total + _copying(state, once)) + average


def _copying(state: Scheduled, nodes: Sequence[Node]) -> float:
    """The seconds of the nodes that copy from one memory to the other."""
    mixed = [node for node in nodes if len({value.host for value in (*node.inputs, *node.outputs)}) > 1]
    return sum(node_seconds(node, state.device) for node in mixed)


def casts_on_host(state: Scheduled, rank: RankPlan) -> float:
    """Seconds of the copies of masters in the host's memory, once a step, that a rank computes with."""
    if not state.device.gpu:
        return 0.0
    stages, on_host = [state.partitioned.stages[index] for index in rank.stages], state.on_host
    once = {each.name: each for stage in stages for each in stage.parameters if each.name in on_host}
    copied = [each.value.type.bytes for each in once.values() if not each.value.host]
    return sum(copied) / state.device.host_link + len(copied) * state.device.launch


def _average(state: Scheduled) -> float:
    """What the average of replica groups takes of each step, in seconds."""
    longest = 0.0
    for rank in state.plan.ranks:
        walk = StreamSimulation(evolve(state, mesh=joined_mesh(state.mesh)), OURS)
        walk.run(outer_nodes(state, rank))
        longest = max(longest, walk.arrived)
    return longest / state.every


def _simulated(state: Scheduled, execution: Execution) -> tuple[Costs, Timeline, tuple[float, ...], float | None]:
    """The costs, the timeline of the microbatches, what each rank takes after it, and the period."""
    actions: dict[tuple[int, str], float] = {}
    around = {rank.rank: StepEpilogue(state, rank, execution, actions) for rank in state.plan.ranks}
    costs = costs_of(state, execution)
    costs = evolve(costs, ready={stage: arrival for each in around.values() for stage, arrival in each.ready.items()})
    timeline = simulate(_instructions(state), costs)
    lasts = _lasts(around, timeline)
    reduced = [each.reduced(last) for each, last in zip(around.values(), lasts, strict=True)]
    without = [each.summed(last) for each, last in zip(around.values(), lasts, strict=True)]
    summed = max(reduced) - timeline.makespan  # the statistics are summed over all ranks
    if state.plan.delay:
        summed = max(without) - timeline.makespan
        step = max(without) + max(each.after(max(without)) for each in around.values())
        summed += max(0.0, (max(reduced) - max(without)) / state.plan.delay - step)
    ends = tuple(summed + each.after(timeline.makespan + summed) for each in around.values())
    return costs, timeline, ends, _period(state, costs, around) if state.training and state.train.late else None


def _lasts(around: Mapping[int, StepEpilogue], timeline: Timeline) -> list[dict[int, float]]:
    """When each rank has done the last action of each of its stages."""
    ends = []
    for each, line in zip(around.values(), timeline.actions, strict=True):
        chunks = {interval.work.chunk: interval.end for interval in line if isinstance(interval.work, Action)}
        ends.append({each.rank.stages[chunk]: end for chunk, end in chunks.items()})
    return ends


def _period(state: Scheduled, costs: Costs, around: Mapping[int, StepEpilogue]) -> float:
    """The longest time for which any rank is busy with a step, if they do not meet between steps. Those that exchange
    totals wait for each other.

    A rank gathers as it has made its update, and waits then for what its first action needs of that. What else it
    waits for there, since others begin before it, is no time of its own.
    """
    lines = _instructions(state)
    waits, ready = dict.fromkeys(around, 0.0), dict[int, float]()
    for (number, own), line in zip(around.items(), simulate(lines, evolve(costs, ready={})).actions, strict=True):
        first = line[0]
        assert isinstance(first.work, Action), first
        stage = own.rank.stages[first.work.chunk]
        waits[number] = max(0.0, own.ready.get(stage, 0.0) - first.duration)
        ready.update((stage, first.start - waits[number] + arrival) for stage, arrival in own.ready.items())
    timeline = simulate(lines, evolve(costs, ready=ready))
    wire = _wire(state)
    finished = [each.reduced(last) for each, last in zip(around.values(), _lasts(around, timeline), strict=True)]
    reduced = tuple(finished)
    for rank in state.plan.ranks:
        for each in rank.sends:
            ends = each.transfer.channel.source, each.transfer.channel.destination
            arrival = max(reduced[end] for end in ends) + wire.latency + each.type.bytes / wire.bandwidth
            for end in ends:
                finished[end] = max(finished[end], arrival)
    return max(
        waits[rank] + occupied(timeline, rank, finished[rank]) + each.after(finished[rank]) + each.copying
        for rank, each in around.items()
    )


def occupied(timeline: Timeline, rank: int, finished: float = 0.0) -> float:
    """How long a rank is occupied with the microbatches of a step: from when the next one may begin to send what it
    first receives, until it has sent all, and is `finished`.
    """
    line = timeline.actions[rank]
    first, last = line[0].start, max(finished, line[-1].end)
    arriving = 0.0
    for channel, transfers in timeline.transfers.items():
        if channel.source == rank:
            last = max(last, transfers[-1].end)
        if channel.destination == rank and transfers[0].end <= first:
            arriving = max(arriving, transfers[0].duration)
    return last - first + arriving


def stage_seconds(state: Cut, execution: Execution = OURS) -> dict[tuple[int, str], float]:
    """Predicted seconds of each kind of action of each stage: {(stage, kind): seconds}. The host runs ahead, but not of
    itself: an action takes at least as long as to launch its kernels.
    """
    times: dict[tuple[int, str], float] = {}
    known: dict[tuple[int, str], float] = {}  # by form of the stage and kind
    for stage, form in zip(state.partitioned.stages, state.partitioned.forms, strict=True):
        for kind, phases in PHASES.items():
            if (form, kind) not in known:
                nodes = [node for node in stage.nodes if node.phase in phases]
                keep = {value for node in stage.nodes if node.phase not in phases for value in node.inputs}
                walk = StreamSimulation(state, execution)
                walk.run(nodes, keep)
                launching = 0.0 if state.train.graphs else walk.launches * state.device.launching
                known[form, kind] = state.device.action + max(walk.arrived, launching)
            times[stage.index, kind] = known[form, kind]
        if execution.whole:  # what that makes again goes by names, which stages of one form do not share
            rest = StreamSimulation(state, evolve(execution, waits=frozenset(Phase)))
            rest.run(partial_remat_products(state, stage))
            for kind, phases in PHASES.items():
                times[stage.index, kind] += rest.arrived if Phase.BACKWARD in phases else 0.0
    return times


def unsplit_seconds(graph: Graph, spec: language.Spec, device: Device) -> dict[int, float]:
    """The seconds that a full batch spends on each stage of a placed graph before anything is split over the mesh,
    without what all ranks of the pipeline share: by these, stages are cut.
    """
    shared = shared_axes(spec)
    times: dict[int, float] = {}
    for node in graph.nodes:
        of_all = any(value.type.has(axis) for value in (*node.inputs, *node.outputs) for axis in shared)
        op = node.op.without_dropout() if isinstance(node.op, Attention) else node.op
        if not op.random and not of_all:
            own = node_seconds(node.changed(op=op), device)
            times[node.placed_on] = times.get(node.placed_on, 0.0) + own
    return times


def partial_remat_products(state: Cut, stage: StageGraph) -> list[Node]:
    """Products and sums of a stage that are not recomputed, in iterations of which other nodes are."""
    repeats = state.partitioned.graph.repeats
    names = {value.name for node in stage.nodes for value in node.outputs}
    forward = [node for node in stage.nodes if node.phase is Phase.FORWARD and not isinstance(node.op, Transfer)]
    again = {node for node in forward if any(f"{value.name}.again" in names for value in node.outputs)}
    iterations = {iteration_of(node.scope, repeats) for node in again} - {None}
    return [
        node
        for node in forward
        if node not in again
        and iteration_of(node.scope, repeats) in iterations
        and (is_product(node) or (isinstance(node.op, Collective) and node.op.combines))
    ]


def is_product(node: Node) -> bool:
    """Whether a node is a matrix product, or attention in one kernel."""
    operands, results = [value.type for value in node.inputs], [value.type for value in node.outputs]
    return node.op.matrices(operands, results) is not None


def end_seconds(state: Scheduled, rank: RankPlan, forward: float) -> float:
    """Seconds that a rank takes once a step, in addition to its microbatches, if its stages do not wait for others, and
    `forward` are those of F of the first.
    """
    ends = StepEpilogue(state, rank)
    waits = max(0.0, ends.ready.get(rank.stages[0], 0.0) - forward)
    reduced = ends.reduced(dict.fromkeys(rank.stages, 0.0))
    return waits + reduced + ends.after(reduced)


@define(eq=False)
class StepEpilogue:
    """What a rank does once a step, besides its microbatches.

    `ready` says when the first action of a stage can end at the earliest, in seconds from the start of the
    microbatches, because of what is gathered for it. `alone` are the seconds of what runs neither beside the
    microbatches nor before the statistics, but for the update: prologues, zeroing of accumulators. `copying` are those
    of the copies that are made before an update that does not wait.
    """

    state: Scheduled
    rank: RankPlan
    execution: Execution = OURS
    _last: dict[tuple[int, str], float] = field(factory=dict)  # seconds of last actions, by form of the stage and kind
    ready: dict[int, float] = field(init=False)
    alone: float = field(init=False)
    copying: float = field(init=False)
    _coming: dict[Value, float] = field(factory=dict, init=False)  # when gradients are in the host's memory
    _functions: dict[int, StageFunctions] = field(init=False)

    def __attrs_post_init__(self) -> None:
        state, schedule = self.state, self.state.schedule
        kinds = {action.kind for action in schedule.actions[self.rank.rank]}
        stages = [state.partitioned.stages[index] for index in self.rank.stages]
        functions = [StageFunctions(state.partitioned, stage, kinds, state.compiles) for stage in stages]
        self._functions = dict(zip(self.rank.stages, functions, strict=True))
        self.ready, prologue = self._gathered()
        cleared = sum(each.value.type.bytes for stage in stages for each in stage.accumulators)
        self.alone = prologue + cleared / (state.device.bandwidth * state.device.streaming)
        self.alone += casts_on_host(state, self.rank)
        on_device, host = (2 * sum(copies(state, self.rank, host)) for host in (False, True))
        self.copying = (
            on_device / (state.device.bandwidth * state.device.streaming) + host / state.device.host_bandwidth
        )

    def _gathered(self) -> tuple[dict[int, float], float]:
        """`ready`, and the seconds of the prologues."""
        walk = StreamSimulation(self.state, self.execution)
        for of in self._functions.values():
            walk.run(of.gathered.start)
        for of in self._functions.values():
            walk.run(of.prologue)
        ready = {}
        for index, of in self._functions.items():
            if of.gathered.collectives:
                # As if the action had begun long ago, and waited for nothing else.
                arrival = {value: end - walk.now for value, end in walk.arrival.items()}
                opening = StreamSimulation(self.state, self.execution, -inf, arrival)
                opening.run(of.opening)
                last = (arrival[value] for node in of.gathered.collectives for value in node.outputs)
                ready[index] = max(opening.arrived, *last)
        return ready, walk.now

    def summed(self, ends: Mapping[int, float]) -> float:
        """When the rank has its statistics, if it waits for no reduction of gradients."""
        walk = StreamSimulation(self.state, self.execution, max(ends.values()))
        walk.run(self.state.update.statistic_nodes(self.rank.stages))
        return walk.arrived

    def after(self, summed: float) -> float:
        """Seconds of what runs neither beside the microbatches nor before the statistics, which are `summed` then. The
        update waits for what is still coming to the host, each parameter's for its own.
        """
        walk = StreamSimulation(
            self.state, self.execution, summed, dict(self._coming), {OUT: max(self._coming.values(), default=-inf)}
        )
        walk.there = summed
        walk.run([*self.state.update.clip, *update_nodes(self.state, self.rank)])
        return self.alone + walk.arrived - summed

    def reduced(self, ends: Mapping[int, float]) -> float:
        """When the rank has its statistics, if the last actions of its stages end at these times."""
        state = self.state
        left = StreamSimulation(state, self.execution, max(ends.values()))
        for index in sorted(ends, key=lambda stage: (ends[stage], stage)):
            nodes = dict(state.update.reduce).get(index)
            if nodes is not None:
                of, kind = self._functions[index], state.schedule.last_kind(index)
                reduced = of.reduced(kind, nodes, state.update.totals[index])
                like = state.partitioned.forms[index], kind
                if like not in self._last:
                    action = StreamSimulation(state, self.execution)
                    action.run(of.groups[kind])
                    self._last[like] = action.arrived
                closing = StreamSimulation(
                    state, self.execution, ends[index] - self._last[like], {}, left.free, left.links
                )
                closing.run(of.closing(kind, reduced))
                left.now = max(left.now, closing.now)
                left.arrival.update(closing.arrival)
                left.run([*reduced.others, *reduced.follow])
        left.now = left.arrived
        self._coming = {v: left.arrival[v] for _, v in state.update.in_flight(self.rank.stages) if v in left.arrival}
        left.run(state.update.statistic_nodes(self.rank.stages))
        return left.arrived


@define(eq=False)
class StreamSimulation:
    """Runs nodes in order, from the time `now` on. A collective runs from its node to the first reader of its result,
    unless the `execution` waits for it; collectives that share a link are serialized: `free` says when each link is
    free again. While one of these `links` is busy, compute is slower. Asynchronous copies between the device and the
    host run likewise, on the link between these two, and slow nothing down.

    `there` is when the host completes what it computes itself; it does so in parallel with the device, which starts
    later nodes only after that. `launches` counts the kernels that the host launches.
    """

    state: Cut
    execution: Execution
    now: float = 0.0
    arrival: dict[Value, float] = field(factory=dict)
    free: dict[str, float] = field(factory=dict)
    links: dict[str, Link] = field(factory=dict)
    there: float = -inf
    launches: int = 0

    @property
    def arrived(self) -> float:
        """When all has run, and all collectives are complete; of copies to the host, those that something waits for."""
        return max([self.now, self.there, *(end for link, end in self.free.items() if link != OUT)])

    def run(self, nodes: Iterable[Node], keep: Collection[Value] = ()) -> None:
        """Run nodes; `keep` outlives them."""
        wire, resharding = _wire(self.state), Resharding(self.state.mesh)
        nodes = tuple(nodes)
        narrow = fp8_operands(self.state, nodes) if self.execution.narrow else set()
        for node, own in timed_as(self.execution, self.state, nodes, keep):
            ready = max((self.arrival[value] for value in node.inputs if value in self.arrival), default=-inf)
            if self._on_host(node):
                self.there = max(self.there, ready) + own
                continue
            self.now = max(self.now, self.there, ready)
            if isinstance(node.op, Collective):
                if self.execution.apart and node.phase in chain(*PHASES.values()):
                    continue
                self.launches += 1
                link = resharding.mesh.link(node.op.over)
                self.now += 2 * link.post
                latency, moving = launch_seconds(resharding, node, node.op)
                moving *= self.execution.reductions if sums_gradients(node) else 1.0
                if not node.op.combines and not narrow.isdisjoint(node.outputs):
                    moving /= BYTES[node.outputs[0].type.dtype]
                end = max(self.now, self.free.get(link.name, -inf)) + latency + moving
                self.free[link.name] = end
                if not (self.execution.userbuffers and in_pieces(node)):
                    self.links[link.name] = link
                self.arrival.update(dict.fromkeys(node.outputs, end))
                self.now = end if node.phase in self.execution.waits else self.now
            elif isinstance(node.op, ASYNC_COPIES):
                way = OUT if isinstance(node.op, ToHost) else IN
                end = max(self.now, self.free.get(way, -inf)) + own
                self.free[way] = end
                self.arrival.update(dict.fromkeys(node.outputs, end))
            elif isinstance(node.op, Transfer):
                if self.execution.exchanges > isinstance(node.op, Receive):
                    message = node.inputs if isinstance(node.op, Send) else node.outputs
                    self.now += wire.latency + sum(value.type.bytes for value in message) / wire.bandwidth
            else:
                self.launches += launches(node.op) if own else 0
                self.now = self.after(self._summing(node, own))
                if isinstance(node.op, ToHost):  # the host waits for what it reads
                    self.there = self.now

    def _on_host(self, node: Node) -> bool:
        """Whether the host computes a node, or waits for it, and not the device."""
        values = node.outputs or node.inputs
        return (
            self.state.device.gpu
            and not isinstance(node.op, (ToHost, ToDevice))
            and bool(values)
            and all(value.host for value in values)
        )

    def _summing(self, node: Node, seconds: float) -> float:
        """The seconds of a node, or if it adds to a sum, of adding as the execution says: also where it takes no time
        in our program, since the product that makes the gradient adds it.
        """
        if target_of(node.op) is None or self.execution.sum_bytes is None:
            return seconds
        device, moved = self.state.device, self.execution.sum_bytes * node.inputs[-1].type.elements
        return device.launch * bool(moved) + moved / (device.bandwidth * device.streaming)

    def after(self, seconds: float) -> float:
        """When what takes so many seconds alone has run, beside the collectives that are under way."""
        now = self.now
        for end in sorted(end for name, end in self.free.items() if end > now and name in self.links):
            under_way = [self.links[name] for name, last in self.free.items() if last >= end and name in self.links]
            speed = self.state.device.beside(sum(each.blocks for each in under_way))
            speed *= min(each.beside for each in under_way)
            if seconds <= (end - now) * speed:
                return now + seconds / speed
            seconds -= (end - now) * speed
            now = end
        return now + seconds


def sums_gradients(node: Node) -> bool:
    """Whether a collective reduces gradients of parameters."""
    return node.phase in (Phase.WEIGHT, Phase.REDUCE) and isinstance(node.op, Collective) and node.op.combines


def costs_of(state: Cut, execution: Execution = OURS) -> Costs:
    """The costs of a partitioned program, executed as said."""
    link, copies = _wire(state), copy_seconds(state)
    actions = stage_seconds(state, execution)
    return Costs(
        lambda stage, kind: actions[stage, kind],
        lambda message: link.latency + message.bytes / link.bandwidth if not execution.exchanges else 0.0,
        post=link.post,
        copy=lambda stage: copies.get(stage, 0.0),
    )


def copy_seconds(state: Cut) -> dict[int, float]:
    """Seconds of a copy of what a stage keeps of a microbatch in the host's memory, to there or back, for stages that
    keep something there. Where the device is a CPU, nothing is copied.
    """
    times = {}
    for stage in state.partitioned.stages:
        if stage.offloaded:
            behind = roots(stage.nodes)
            tensors = {behind.get(value, value) for value in stage.offloaded}
            size = sum(value.type.bytes for value in tensors)
            takes = size / state.device.host_link + len(tensors) * state.device.launch
            times[stage.index] = takes if state.device.gpu else 0.0
    return times


def _wire(state: Cut) -> Link:
    """The link from one rank of the pipeline to another."""
    pipe = state.pipeline.axis
    return dict(state.mesh.links).get(pipe or "", link_of(state.spec.mesh, pipe))


def _instructions(state: Scheduled) -> tuple[tuple[Instruction, ...], ...]:
    return tuple(rank.instructions for rank in state.plan.ranks)


def silenced(state: State) -> State:
    """A state whose communication takes no time."""
    return evolve(state, mesh=state.mesh.joined_by(_NOTHING))
