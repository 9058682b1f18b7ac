"""Orders a stage's nodes so that collectives overlap computation.

A collective starts at its node and is waited for where its result is first read. In the backward pass, gradients of
parameters (W) can be computed at any time: they are delayed until the next collective of the same iteration has
started, which they then hide, as in Megatron-LM's column-parallel layers. Small collectives of an iteration are
bucketed, and so are the gathers of the prologue; for this, small reductions move directly behind the node that makes
their operand. Nodes stay within their iteration, and equal iterations stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from attrs import evolve

from partita.compiler.graph import Node, Phase
from partita.compiler.ops.collective import AllReduce, ReduceScatter
from partita.compiler.passes.buckets import BUCKET_BYTES, SMALL_BYTES, bucketed, by_depth, carried
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.passes.place import iteration_of


def overlapped(partitioned: PartitionedGraph) -> PartitionedGraph:
    """The same stages, with their nodes ordered for overlap."""
    repeats = {scope.path: scope.name for scope in partitioned.graph.scopes if scope.repeat}
    stages = []
    for stage in partitioned.stages:
        prologue = [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
        nodes = bucketed(by_depth(prologue), BUCKET_BYTES)
        rest = [node for node in stage.nodes if node.phase is not Phase.PROLOGUE]

        def part(node: Node) -> tuple[str | None, bool]:
            return iteration_of(node.scope, repeats), node.phase is Phase.FORWARD

        for (_, forward), run in groupby(rest, part):
            iteration = list(run)
            nodes += bucketed(_small_sums_first(iteration if forward else _delayed(iteration)), SMALL_BYTES)
        stages.append(evolve(stage, nodes=tuple(nodes)))
    return evolve(partitioned, stages=tuple(stages))


def _small_sums_first(nodes: Sequence[Node]) -> list[Node]:
    """Move small all-reduces and reduce-scatters behind the node that makes their operand, if it is in `nodes`."""
    makers = {value: node for node in nodes for value in node.outputs}
    behind: dict[Node, list[Node]] = {}
    for node in nodes:
        maker = makers.get(node.inputs[0]) if isinstance(node.op, (AllReduce, ReduceScatter)) else None
        if maker is not None and carried(node) <= SMALL_BYTES:
            behind.setdefault(maker, []).append(node)
    moved = {node for reductions in behind.values() for node in reductions}
    found: list[Node] = []

    def stand(node: Node) -> None:
        found.append(node)
        for reduction in behind.get(node, ()):
            stand(reduction)

    for node in nodes:
        if node not in moved:
            stand(node)
    return found


def _delayed(nodes: Sequence[Node]) -> list[Node]:
    """Move W nodes behind the next collective that starts."""
    found: list[Node] = []
    held: list[Node] = []
    for node in nodes:
        if node.op.communicates:
            if any(value in other.outputs for other in held for value in node.inputs):
                found += held
                held = []
            found.append(node)
            if node.phase is not Phase.WEIGHT:
                found += held
                held = []
        elif node.phase is Phase.WEIGHT:
            held.append(node)
        else:
            found.append(node)
    return found + held
