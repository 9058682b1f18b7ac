"""What a program is predicted to take: seconds of each action and transfer by the cost model, their timeline, and what
follows for the whole step.

A step is the timeline of its microbatches, then what ends it: reductions of gradients, and the update. Communication
is *exposed* as far as the step would be shorter if it took no time.
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
from partita.compiler.program import RankPlan
from partita.compiler.sharding.moves import Moves
from partita.compiler.simulator import Costs, simulate
from partita.compiler.state import Cut, Partitioned, Scheduled, State
from partita.compiler.timeline import Timeline
from partita.dsl.brief import shortened

PHASES = {"F": (Phase.FORWARD,), "B": (Phase.BACKWARD,), "W": (Phase.WEIGHT,), "BW": (Phase.BACKWARD, Phase.WEIGHT)}
# A message that takes no time.
_NOTHING = Link("nothing", float("inf"), 0.0)


@frozen(eq=False)
class Prediction:
    """A step as it is predicted. Times are in seconds: of the microbatches (`timeline`), then what each rank of the
    pipeline needs to end the step. `flops` is the arithmetic of the model, of one step on all ranks, recomputation not
    counted; `peak` what all ranks' devices could do in a second; `costs` what the timeline is made of.
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
        """Elements of the model's inputs along batch and sequence, in a second, of all ranks."""
        return self.tokens / self.step_time

    @property
    def mfu(self) -> float:
        """Model-FLOP utilisation: the share of peak that the model's own products are (PaLM, arXiv 2204.02311)."""
        return self.flops / (self.step_time * self.peak)

    @property
    def exposed_communication(self) -> float:
        """The share of the step that is communication which nothing hides."""
        return self.exposed / self.step_time


def predict(state: Scheduled, overlap: bool = True, exposed: bool = True) -> Prediction:
    """The prediction of a compiled program; without `overlap`, of one that waits for whatever it sends. Without
    `exposed`, which takes half of the time, that is not a number.
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
    """Whether torch compiles the program where it runs."""
    wished = state.train.compile
    return state.compiled or (state.device.gpu if wished is None else wished)


def stage_seconds(state: Cut, overlap: bool = True) -> dict[tuple[int, str], float]:
    """Predicted seconds of each kind of action of each stage: {(stage, kind): seconds}."""
    moves = Moves(state.mesh)
    found: dict[tuple[int, str], float] = {}
    for stage in state.partitioned.stages:
        for kind, phases in PHASES.items():
            nodes = [node for node in stage.nodes if node.phase in phases]
            keep = {value for node in stage.nodes if node.phase not in phases for value in node.inputs}
            found[stage.index, kind] = state.device.action + _elapsed(nodes, state, moves, overlap, keep)
    return found


def end_seconds(state: Partitioned, rank: RankPlan, overlap: bool = True) -> float:
    """What a rank does once a step beside its microbatches: its stages' constants, accumulators that begin at zero, its
    sums, statistics and update.
    """
    moves = Moves(state.mesh)
    reduce = dict(state.update.reduce)
    total = _elapsed([*state.update.clip, *update_nodes(state, rank)], state, moves, overlap)
    total += _elapsed(state.update.statistic_nodes(rank.stages), state, moves, overlap)
    for index in rank.stages:
        cleared = sum(each.value.type.bytes for each in state.partitioned.stages[index].accumulators)
        total += cleared / (state.device.bandwidth * state.device.streaming)
        prologue = [node for node in state.partitioned.stages[index].nodes if node.phase is Phase.PROLOGUE]
        total += _elapsed(prologue, state, moves, overlap)
        total += _elapsed(reduce.get(index, ()), state, moves, overlap)
    return total


def _elapsed(nodes: Iterable[Node], state: Cut, moves: Moves, overlap: bool, keep: Collection[Value] = ()) -> float:
    """The time of nodes in order; `keep` outlives them. A collective is under way from where it stands to where its
    result is read first (without `overlap`, nothing else is done meanwhile); those that share a link follow each
    other."""
    wire = _wire(state)
    now = 0.0
    free: dict[str, float] = {}
    arrival: dict[Value, float] = {}
    for node, own in timed(tuple(nodes), state.device, compiles(state), keep):
        now = max([now, *(arrival[value] for value in node.inputs if value in arrival)])
        if isinstance(node.op, Collective):
            link = moves.mesh.link(node.op.over)
            now += 2 * link.post
            end = max(now, free.get(link.name, 0.0)) + sum(launch_seconds(moves, node, node.op))
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
