"""Validates copies to the host's memory and back: they are of what F makes and the backward pass reads, and no other.

A copy is an identity of the tensors in some slots of a frame, so it changes no value. What may go wrong is that it is
of something that is not there yet, or that something else reads or writes meanwhile: what a stage has for a whole step,
or shares with other microbatches or slices. That every copy back is complete before it is read is invariant 7 of the
schedule (`partita.compiler.schedules.invariants`), here only that the instructions copy what the schedule says.
"""

from __future__ import annotations

from collections import Counter

from attrs import define

from partita.compiler.graph import Phase, Value
from partita.compiler.instructions import PostCopy, WaitCopy
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.program import Program, RankProgram, StageProgram
from partita.compiler.schedules.schedule import COPIES
from partita.compiler.verify.checker import Checker
from partita.compiler.verify.rules import require


@define(eq=False)
class Copies:
    """Checks the copies of a program against the graphs of its stages and its schedule."""

    partitioned: PartitionedGraph
    program: Program
    check: Checker

    def run(self) -> None:
        """Check all stages and ranks."""
        for stage, graph in zip(self.program.stages, self.partitioned.stages, strict=True):
            with self.check.at(where=f"on stage {graph.index}"):
                self._values(graph)
                self._slots(stage, graph)
        for rank in self.program.ranks:
            with self.check.at():
                self._instructions(rank)

    def _values(self, graph: StageGraph) -> None:
        """What is copied is in memory that F makes for one microbatch alone, and all of it is copied that is kept."""
        behind: dict[Value, Value] = {}
        made: set[Value] = set()
        read = {v for node in graph.nodes if node.phase in (Phase.BACKWARD, Phase.WEIGHT) for v in node.inputs}
        for node in graph.nodes:
            if node.op.is_view:
                behind[node.output] = behind.get(node.inputs[0], node.inputs[0])
            elif node.phase is Phase.FORWARD and node.op.literal is None and not node.op.of_slices:
                made.update(node.outputs)
        forward = {value for node in graph.nodes if node.phase is Phase.FORWARD for value in node.outputs}
        copied = {behind.get(value, value) for value in graph.offloaded}
        require(len(set(graph.offloaded)) == len(graph.offloaded), "a value is copied twice to the host's memory")
        for value in graph.offloaded:
            require(value in read, f"`{value.name}` is copied to the host's memory, but not kept", value)
            require(
                value in forward and behind.get(value, value) in made,
                f"`{value.name}` is copied to the host's memory, but is not one microbatch's own",
                value,
            )
        for value in forward & read - set(graph.offloaded):
            require(
                behind.get(value, value) not in copied,
                f"`{value.name}` stays on the device, but shares memory with what is copied to the host's",
                value,
            )

    def _slots(self, stage: StageProgram, graph: StageGraph) -> None:
        slots = set(stage.copied)
        whole = len(slots) == len(stage.copied) == len(graph.offloaded) and slots <= set(range(stage.frame))
        require(whole, "other slots are copied to the host's memory than hold its values")
        require(not slots & set(stage.input_slots), "inputs are copied to the host's memory")

    def _instructions(self, rank: RankProgram) -> None:
        schedule = self.program.schedule
        stages = schedule.placement[rank.rank]
        wanted = Counter(
            (stages[action.chunk], action) for action in schedule.actions[rank.rank] if action.kind in COPIES
        )
        for kind in (PostCopy, WaitCopy):
            found = Counter((each.stage, each.action) for each in rank.instructions if isinstance(each, kind))
            require(found == wanted, f"rank {rank.rank} copies other microbatches than its schedule says")
