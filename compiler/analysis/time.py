"""Predicted times of a program: seconds of each action and transfer by the cost model, their timeline, and the step.

A step is the timeline of its microbatches, then its end: reductions of gradients, and the update. Communication is
*exposed* to the extent that the step would be shorter if communication took no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import nan

from attrs import evolve, frozen

from partita.compiler.analysis.traffic import launch_seconds, update_nodes
from partita.compiler.costs.links import Link, link_of
from partita.compiler.costs.nodes import timed
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.instructions import Instruction
from partita.compiler.ops.collective import Collective
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.program import RankPlan
from partita.compiler.schedules.simulator import Costs, simulate
from partita.compiler.schedules.timeline import Timeline
from partita.compiler.state import Cut, Partitioned, Scheduled, State
from partita.dsl.reprs import shortened

PHASES = {"F": (Phase.FORWARD,), "B": (Phase.BACKWARD,), "W": (Phase.WEIGHT,), "BW": (Phase.BACKWARD, Phase.WEIGHT)}
# A link on which messages take no time.
_NOTHING = Link("nothing", float("inf"), 0.0)


@frozen(eq=False)
class Prediction:
    """The prediction of a step, with times in seconds: of the microbatches (`timeline`), then of the end of the step on
    each rank of the pipeline (`ends`). `flops` are the model's in one step on all ranks, without recomputation; `peak`
    is the peak FLOP/s of all ranks' devices; the timeline was simulated with `costs`.
    """

    costs: Costs
    timeline: Timeline
    ends: tuple[float, ...]
    fixed: float
    exposed: float
    tokens: int
    flops: float
    peak: float

    __repr__ = shortened

    @property
    def step_time(self) -> float:
        """Seconds of a whole step."""
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
    costs = costs_of(state, overlap)
    found = simulate(_instructions(state), costs)
    ends = tuple(end_seconds(state, rank, overlap) for rank in state.plan.ranks)
    shown = nan
    if exposed:
        silent = silenced(state)
        without = simulate(_instructions(state), costs_of(silent)).makespan
        without += max(end_seconds(silent, rank) for rank in state.plan.ranks)
        shown = max(0.0, found.makespan + max(ends) - without)
    peak = state.device.flops[state.train.precision] * state.mesh.ranks
    return Prediction(
        costs,
        found,
        ends,
        state.device.step,
        shown,
        state.plan.tokens,
        state.flops,
        peak,
    )


def compiles(state: Cut) -> bool:
    """Whether torch compiles the program when it runs."""
    preferred = state.train.compile
    return state.compiled or (state.device.gpu if preferred is None else preferred)


def stage_seconds(state: Cut, overlap: bool = True) -> dict[tuple[int, str], float]:
    """Predicted seconds of each kind of action of each stage: {(stage, kind): seconds}."""
    resharding = Resharding(state.mesh)
    found: dict[tuple[int, str], float] = {}
    for stage in state.partitioned.stages:
        for kind, phases in PHASES.items():
            nodes = [node for node in stage.nodes if node.phase in phases]
            keep = {value for node in stage.nodes if node.phase not in phases for value in node.inputs}
            found[stage.index, kind] = state.device.action + _elapsed(nodes, state, resharding, overlap, keep)
    return found


def end_seconds(state: Partitioned, rank: RankPlan, overlap: bool = True) -> float:
    """Seconds that a rank takes once a step, in addition to its microbatches: prologues of its stages, zeroing of
    accumulators, reductions, statistics and update.
    """
    resharding = Resharding(state.mesh)
    reduce = dict(state.update.reduce)
    total = _elapsed([*state.update.clip, *update_nodes(state, rank)], state, resharding, overlap)
    total += _elapsed(state.update.statistic_nodes(rank.stages), state, resharding, overlap)
    for index in rank.stages:
        cleared = sum(each.value.type.bytes for each in state.partitioned.stages[index].accumulators)
        total += cleared / (state.device.bandwidth * state.device.streaming)
        prologue = [node for node in state.partitioned.stages[index].nodes if node.phase is Phase.PROLOGUE]
        total += _elapsed(prologue, state, resharding, overlap)
        if state.device.gpu:
            parameters = state.partitioned.stages[index].parameters
            copied = sum(each.value.type.bytes for each in parameters if each.name in state.on_host)
            total += copied / state.device.host_link
        total += _elapsed(reduce.get(index, ()), state, resharding, overlap)
    return total


def _elapsed(
    nodes: Iterable[Node], state: Cut, resharding: Resharding, overlap: bool, keep: Collection[Value] = ()
) -> float:
    """The time of nodes in order; `keep` outlives them. A collective runs from its node to the first reader of its
    result (without `overlap`, nothing else runs meanwhile); collectives that share a link are serialized.
    """
    wire = _wire(state)
    now = 0.0
    free: dict[str, float] = {}
    arrival: dict[Value, float] = {}
    for node, own in timed(tuple(nodes), state.device, compiles(state), keep):
        now = max([now, *(arrival[value] for value in node.inputs if value in arrival)])
        if isinstance(node.op, Collective):
            link = resharding.mesh.link(node.op.over)
            now += 2 * link.post
            end = max(now, free.get(link.name, 0.0)) + sum(launch_seconds(resharding, node, node.op))
            free[link.name] = end
            arrival.update(dict.fromkeys(node.outputs, end))
            now = now if overlap else end
        elif node.op.sends and not overlap:
            now += wire.latency + sum(value.type.bytes for value in node.inputs) / wire.bandwidth
        else:
            now += own
    return max([now, *free.values()])


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
