"""What a program is predicted to take: seconds of each action and transfer, by the cost model, and their timeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from partita.compiler.costs import link_of, seconds
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.ops.collective import Collective
from partita.compiler.report.traffic import launch_seconds
from partita.compiler.sharding.moves import Moves
from partita.compiler.simulator import Costs, simulate
from partita.compiler.timeline import Timeline

if TYPE_CHECKING:  # the compiler's own pass for schedules asks for costs
    from partita.compiler.pipeline import Compilation

PHASES = {"F": (Phase.FORWARD,), "B": (Phase.BACKWARD,), "W": (Phase.WEIGHT,), "BW": (Phase.BACKWARD, Phase.WEIGHT)}


def stage_seconds(state: Compilation) -> dict[tuple[int, str], float]:
    """Predicted seconds of each kind of action of each stage: {(stage, kind): seconds}."""
    assert state.partitioned is not None
    moves = Moves(state.mesh)
    found: dict[tuple[int, str], float] = {}
    for stage in state.partitioned.stages:
        for kind, phases in PHASES.items():
            nodes = [node for node in stage.nodes if node.phase in phases]
            found[stage.index, kind] = _elapsed(nodes, state, moves)
    return found


def _elapsed(nodes: Iterable[Node], state: Compilation, moves: Moves) -> float:
    """The time of nodes in order. A collective is under way from where it stands to where its result is read first;
    those along one mesh axis follow each other."""
    now = 0.0
    free: dict[str, float] = {}
    arrival: dict[Value, float] = {}
    for node in nodes:
        now = max([now, *(arrival[value] for value in node.inputs if value in arrival)])
        if isinstance(node.op, Collective):
            end = max(now, free.get(node.op.over, 0.0)) + sum(launch_seconds(moves, node))
            free[node.op.over] = end
            arrival.update(dict.fromkeys(node.outputs, end))
        else:
            now += seconds(node, state.device)
    return max([now, *free.values()])


def costs_of(state: Compilation) -> Costs:
    """The costs of a partitioned program."""
    link = link_of(state.spec.mesh, state.pipeline.axis)
    actions = stage_seconds(state)
    return Costs(
        lambda stage, kind: actions[stage, kind],
        lambda message: link.latency + message.bytes / link.bandwidth,
    )


def timeline(state: Compilation) -> Timeline:
    """The simulated timeline of a compiled program."""
    assert state.program is not None
    return simulate(tuple(rank.instructions for rank in state.program.ranks), costs_of(state))
