"""Validates what the slices of a sequence share: who holds it, and into how many slices operations cut.

Between the slices of a microbatch there are no messages, but tensors that stay on a stage. Each must belong to one
operation alone, in the phase that takes slices in its order: what is gathered is left by earlier slices, in F, and what
is scattered by later ones, in B or W. The orders themselves are invariants of the schedule.
"""

from __future__ import annotations

from attrs import define

from partita.compiler.graph import Node, Phase
from partita.compiler.ops.position import Positioned
from partita.compiler.ops.slices import GatherSlices, OfSlices, ScatterSlices
from partita.compiler.passes.cut import PartitionedGraph
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.verify.checker import Checker
from partita.compiler.verify.rules import require

# They go through the slices of a microbatch, forward and backward; the tensor that these share is their first operand.
THROUGH_SLICES = (GatherSlices, ScatterSlices)


@define(eq=False)
class Slices:
    """Checks the stages of a program with a schedule of slices."""

    partitioned: PartitionedGraph
    schedule: Schedule
    check: Checker

    def run(self) -> None:
        """Check all stages."""
        for stage in self.partitioned.stages:
            owner: dict[object, Node] = {}
            shared = {value: node.op for node in stage.nodes if isinstance(node.op, OfSlices) for value in node.outputs}
            with self.check.at(where=f"on stage {stage.index}"):
                require(len(set(shared.values())) == len(shared), "two tensors that slices share are one")
            for node in stage.nodes:
                with self.check.at(node.span, f"on stage {stage.index}"):
                    self._node(node)
                    for value in node.inputs:
                        if value in shared:
                            first = owner.setdefault(shared[value], node)
                            require(first is node, f"`{value.name}`, which slices share, has two owners", value)
                            allowed = isinstance(node.op, THROUGH_SLICES) and value is node.inputs[0]
                            require(allowed, f"`{node.op.label}` reads `{value.name}`, which slices share", value)

    def _node(self, node: Node) -> None:
        op, slices = node.op, self.schedule.slices
        if isinstance(op, Positioned):
            many = f"`{op.label}` cuts a sequence into {sorted(op.slices)} slices, and the schedule has {slices}"
            require(op.slices <= {slices}, many, *node.outputs)
        if isinstance(op, THROUGH_SLICES):
            forward = node.phase is Phase.FORWARD
            require(forward == isinstance(op, GatherSlices), f"`{op.label}` in phase {node.phase}", *node.outputs)
