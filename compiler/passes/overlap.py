"""Orders a stage's nodes so that collectives overlap computation.

A collective starts at its node and is waited for where its result is first read. In the backward pass, gradients of
parameters (W) can be computed at any time: they are delayed until the next collective of the same iteration has
started, which they then hide, as in Megatron-LM's column-parallel layers. Small collectives of an iteration are
bucketed, and so are the gathers of the prologue, in the order in which their results are read; for this, small
reductions move directly behind the node that makes their operand. Nodes stay within their iteration, and equal
iterations stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from attrs import evolve

from partita.compiler.graph import Node, Phase, Value, producers_of
from partita.compiler.ops.collective import AllReduce, Collective, ReduceScatter
from partita.compiler.passes.buckets import BUCKET_BYTES, SMALL_BYTES, bucketed, by_depth, transferred_bytes
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.passes.place import iteration_of


def overlapped(
    partitioned: PartitionedGraph, full: Callable[[str], float] = lambda axis: BUCKET_BYTES
) -> PartitionedGraph:
    """The same stages, with their nodes ordered for overlap; `full` is the size of a bucket of the prologue."""
    repeats = partitioned.graph.repeats
    stages = []
    for stage in partitioned.stages:
        prologue = [node for node in stage.nodes if node.phase is Phase.PROLOGUE]
        rest = [node for node in stage.nodes if node.phase is not Phase.PROLOGUE]
        nodes = bucketed(by_depth(_as_read(prologue, rest)), BUCKET_BYTES, full)

        def part(node: Node) -> tuple[str | None, bool]:
            return iteration_of(node.scope, repeats), node.phase is Phase.FORWARD

        for (_, forward), run in groupby(rest, part):
            iteration = list(run)
            nodes += bucketed(_small_sums_first(iteration if forward else _delayed(iteration)), SMALL_BYTES)
        stages.append(evolve(stage, nodes=tuple(nodes)))
    return evolve(partitioned, stages=tuple(stages))


def _as_read(prologue: Sequence[Node], rest: Sequence[Node]) -> list[Node]:
    """The nodes of a prologue in the order in which the rest of the stage first reads what they make."""
    first: dict[Value, int] = {}
    for i, node in enumerate(rest):
        for value in node.inputs:
            first.setdefault(value, i)
    never = len(rest)
    for node in reversed(prologue):
        place = min((first.get(value, never) for value in node.outputs), default=never)
        first.update({value: min(place, first.get(value, never)) for value in node.inputs})
    return sorted(prologue, key=lambda node: min((first.get(value, never) for value in node.outputs), default=never))


def _small_sums_first(nodes: Sequence[Node]) -> list[Node]:
    """Move small all-reduces and reduce-scatters behind the node that makes their operand, if it is in `nodes`."""
    makers = producers_of(nodes)
    behind: dict[Node, list[Node]] = {}
    for node in nodes:
        maker = makers.get(node.inputs[0]) if isinstance(node.op, (AllReduce, ReduceScatter)) else None
        if maker is not None and transferred_bytes(node) <= SMALL_BYTES:
            behind.setdefault(maker, []).append(node)
    moved = {node for reductions in behind.values() for node in reductions}
    ordered: list[Node] = []

    def stand(node: Node) -> None:
        ordered.append(node)
        for reduction in behind.get(node, ()):
            stand(reduction)

    for node in nodes:
        if node not in moved:
            stand(node)
    return ordered


def _delayed(nodes: Sequence[Node]) -> list[Node]:
    """Move W nodes behind the next collective that starts."""
    ordered: list[Node] = []
    delayed: list[Node] = []
    for node in nodes:
        if isinstance(node.op, Collective):
            if any(value in other.outputs for other in delayed for value in node.inputs):
                ordered += delayed
                delayed = []
            ordered.append(node)
            if node.phase is not Phase.WEIGHT:
                ordered += delayed
                delayed = []
        elif node.phase is Phase.WEIGHT:
            delayed.append(node)
        else:
            ordered.append(node)
    return ordered + delayed
