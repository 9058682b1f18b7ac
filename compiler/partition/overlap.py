"""The order of a stage's nodes, so that collectives travel while something is computed.

A collective is started where it stands and waited for where its result is first read. In the backward pass the
gradients of parameters (W) can be computed at any time: they are put off until the next collective of the same turn
has started, which they then hide. (Megatron-LM does so for its column-parallel products.) Small collectives of a turn
travel in buckets, for which small sums stand right behind what makes their parts, and so do the gathers of the
prologue. Turns keep their nodes, and what is alike stays alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from attrs import evolve

from partita.compiler.graph import Node, Phase
from partita.compiler.lowering.placement import turn_of
from partita.compiler.ops.collective import AllReduce, ReduceScatter
from partita.compiler.partition.buckets import BUCKET_BYTES, SMALL_BYTES, bucketed, by_depth, carried
from partita.compiler.partition.cut import PartitionedGraph


def overlapped(partitioned: PartitionedGraph) -> PartitionedGraph:
    """The same stages with their nodes in an order that overlaps."""
    repeats = {scope.path: scope.name for scope in partitioned.graph.scopes if scope.repeat}
    stages = []
    for stage in partitioned.stages:
        prologue = [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
        nodes = bucketed(by_depth(prologue), BUCKET_BYTES)
        rest = [node for node in stage.nodes if node.phase is not Phase.PROLOGUE]

        def part(node: Node) -> tuple[str | None, bool]:
            return turn_of(node.scope, repeats), node.phase is Phase.FORWARD

        for (_, forward), run in groupby(rest, part):
            turn = list(run)
            nodes += bucketed(_small_sums_first(turn if forward else _delayed(turn)), SMALL_BYTES)
        stages.append(evolve(stage, nodes=tuple(nodes)))
    return evolve(partitioned, stages=tuple(stages))


def _small_sums_first(nodes: Sequence[Node]) -> list[Node]:
    """Small all-reduces and reduce-scatters stand behind the node that makes their operand, if it is among these."""
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
    """Nodes of W stand behind the next collective that starts."""
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
