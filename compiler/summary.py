"""What a compiled program is, in numbers: for `partita compile`, in the terminal and as JSON."""

from __future__ import annotations

from typing import Any

from collections.abc import Iterable

from attrs import frozen

from partita.compiler.costs import Link, link_of, seconds
from partita.compiler.footprint import peak_memory
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.instructions import BACK, ONWARD
from partita.compiler.moves import Moves
from partita.compiler.ops.collective import Collective
from partita.compiler.pipeline import Compilation
from partita.compiler.simulator import Costs, simulate
from partita.compiler.timeline import Timeline
from partita.compiler.traffic import Traffic, grouped, launch_seconds, total, traffic

PHASES = {"F": (Phase.FORWARD,), "B": (Phase.BACKWARD,), "W": (Phase.WEIGHT,)}


@frozen(eq=False)
class StageSummary:
    """One stage: where it runs, the turns it holds, its parameters, and predicted seconds of F, B and W."""

    index: int
    rank: int
    chunk: int
    turns: tuple[str, ...]
    parameters: int
    tied: tuple[str, ...]
    seconds: dict[str, float]
    saved: int


@frozen(eq=False)
class Summary:
    """The whole program. `peak_memory` is what the program's tensors need, in bytes, one per rank of the pipeline;
    `pipe_ranks` says for each rank of the mesh which of these it is."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    pipe_ranks: tuple[int, ...]
    stages: tuple[StageSummary, ...]
    parameters: int
    peak_memory: tuple[int, ...]
    collectives: tuple[Traffic, ...]
    transfers: tuple[dict[str, Any], ...]
    timeline: Timeline
    times: tuple[tuple[str, float], ...]

    def as_json(self) -> dict[str, Any]:
        """The stable object of `compile --json`."""
        return {
            "name": self.name,
            "ranks": self.ranks,
            "stages": [
                {
                    "stage": s.index,
                    "rank": s.rank,
                    "chunk": s.chunk,
                    "turns": list(s.turns),
                    "parameters": s.parameters,
                    "tied": list(s.tied),
                    "seconds": s.seconds,
                    "saved": s.saved,
                }
                for s in self.stages
            ],
            "parameters": self.parameters,
            "peak_memory": list(self.peak_memory),
            "collectives": [],
            "transfers": list(self.transfers),
            "bubble": self.timeline.bubble,
            "makespan": self.timeline.makespan,
            "seconds": dict(self.times),
        }


def stage_seconds(state: Compilation) -> dict[tuple[int, str], float]:
    """Predicted seconds of each kind of action of each stage: {(stage, kind): seconds}."""
    assert state.partitioned is not None
    found: dict[tuple[int, str], float] = {}
    for stage in state.partitioned.stages:
        for kind, phases in PHASES.items():
            nodes = [node for node in stage.nodes if node.phase in phases]
            found[stage.index, kind] = sum(seconds(node, state.device) for node in nodes)
        found[stage.index, "BW"] = found[stage.index, "B"] + found[stage.index, "W"]
    return found


def timeline(state: Compilation) -> Timeline:
    """The simulated timeline of a compiled program with the cost model's seconds."""
    assert state.program is not None
    link: Link = link_of(state.spec.mesh, state.pipeline.axis)
    costs = stage_seconds(state)

    return simulate(
        tuple(rank.instructions for rank in state.program.ranks),
        Costs(
            lambda stage, kind: costs[stage, kind],
            lambda message: link.latency + message.bytes / link.bandwidth,
        ),
    )


def summarize(state: Compilation) -> Summary:
    """The summary of a compilation that has passed all passes."""
    assert state.program is not None
    assert state.partitioned is not None
    program = state.program
    costs = stage_seconds(state)
    sizes = {p.name: p.type.elements for p in program.parameters}
    stages = []
    for stage in program.stages:
        nodes = state.partitioned.stages[stage.index].nodes
        tied = tuple(n for n in stage.parameters if len(program.parameter(n).stages) > 1)
        stages.append(
            StageSummary(
                stage.index,
                stage.rank,
                stage.chunk,
                _turns([node.scope for node in nodes if node.phase is Phase.FORWARD]),
                sum(sizes[name] for name in stage.parameters),
                tied,
                {kind: costs[stage.index, kind] for kind in PHASES},
                stage.saved,
            )
        )
    transfers = [
        {
            "value": message.value,
            "from": message.source,
            "to": message.destination,
            "direction": message.direction,
            "bytes": message.bytes,
            "count": program.microbatches,
        }
        for message in state.partitioned.messages
        if message.direction in (ONWARD, BACK)
        and program.stages[message.source].rank != program.stages[message.destination].rank
    ]
    return Summary(
        program.name,
        len(program.ranks),
        tuple(stages),
        sum(sizes.values()),
        tuple(peak_memory(state, rank) for rank in program.ranks),
        tuple(transfers),
        timeline(state),
        state.times,
    )


def _turns(scopes: list[str]) -> tuple[str, ...]:
    """Outermost turns that a stage holds: `layer.3`."""
    found: dict[str, None] = {}
    for scope in scopes:
        parts = scope.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                found[".".join(parts[1 : i + 1])] = None
                break
    return tuple(found)
