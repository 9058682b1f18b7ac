"""Validates what lies in the host's memory, and copies to there and back.

Of parameters: those are there that the layout says. An operation has all its operands and results in one memory; only
copies lead from one to the other, and each runs in the phase that reads it, which waits for it first. A copy is freed
behind its last reader, as is any tensor; so none may outlive its phase.

What updates and averages read there of the device is copied while other work runs, too: the copy is not read before it
has landed, and what it is a copy of neither written to nor freed. That is held in the order in which a rank runs these.

Of what microbatches keep: copied is what F makes and the backward pass reads, and nothing else. Such a copy is an
identity of the tensors in some slots of a frame, so it changes no value. What may go wrong is that it is of something
that is not there yet, or that something else reads or writes meanwhile: what a stage has for a whole step, or shares
with other microbatches or slices. That every copy back is complete before it is read is invariant 7 of the
schedule (`partita.compiler.schedules.invariants`), here only that the instructions copy what the schedule says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from attrs import define

from partita.compiler.analysis.liveness import roots
from partita.compiler.graph import Node, Phase, Value, outputs_of
from partita.compiler.instructions import PostCopy, WaitCopy
from partita.compiler.ops.collective import Collective
from partita.compiler.ops.host import ASYNC_COPIES, HostCopy, ToDevice, ToHost
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.slices import OfSlices
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.passes.update import UpdateGraph
from partita.compiler.program import Program, RankProgram, StageProgram
from partita.compiler.schedules.schedule import COPIES, Schedule
from partita.compiler.verify.checker import Checker, quoted
from partita.compiler.verify.rules import require


@define(eq=False)
class Copies:
    """Checks the copies of a program against the graphs of its stages and its schedule. The parameters `on_host` lie in
    the host's memory.
    """

    partitioned: PartitionedGraph
    update: UpdateGraph
    program: Program | None
    check: Checker
    on_host: Collection[str] = ()

    def run(self) -> None:
        """Check all stages and ranks; without a program, the graphs alone."""
        for graph in self.partitioned.stages:
            for parameter in graph.parameters:
                with self.check.at(parameter.span, f"on stage {graph.index}"):
                    right = parameter.value.host == (parameter.name in self.on_host)
                    require(right, f"`{parameter.name}` is read from the wrong memory", parameter.value)
            self._memories(graph)
        if self.program is None:
            return
        for stage, graph in zip(self.program.stages, self.partitioned.stages, strict=True):
            with self.check.at(where=f"on stage {graph.index}"):
                self._values(graph)
                self._slots(stage, graph)
        for rank in self.program.ranks:
            with self.check.at():
                self._instructions(rank, self.program.schedule)
            names, reduce = self._parameters(rank), dict(self.update.reduce)
            early = [
                node for stage in rank.stages for node in reduce.get(stage, ()) if isinstance(node.op, ASYNC_COPIES)
            ]
            with self.check.at(where=f"the updates of rank {rank.rank}"):
                self._in_order([*early, *self.update.parameter_updates(names)])
            with self.check.at(where=f"the averages of rank {rank.rank}"):
                self._in_order(self.update.outer_updates(names))

    def _in_order(self, nodes: Sequence[Node]) -> None:
        """Nodes, in a rank's order, read what is there, and wait for each copy to the host once."""
        behind = roots(nodes)
        outputs = outputs_of(nodes)
        available: set[Value] = set()
        in_flight: dict[Value, Value] = {}  # copies under way, and what they are of
        copied = Counter[Value]()  # the memory of that
        for node in nodes:
            lands = isinstance(node.op, HostCopy) and node.op.is_view and node.output.host
            for value in node.inputs:
                require(value not in outputs or value in available, f"`{value.name}` is read before it is made", value)
                early = value in in_flight and not (lands and value is node.inputs[0])
                require(not early, f"`{value.name}` is read before it has landed", value)
            written = [each for each in _overwritten(node) if copied[behind.get(each, each)]]
            require(not written, "what is on its way to the host is overwritten", *written)
            if lands:
                copy, source = node.inputs
                require(in_flight.pop(copy, None) is source, f"`{copy.name}` is not of `{source.name}`", copy, source)
                copied[behind.get(source, source)] -= 1
            elif isinstance(node.op, ASYNC_COPIES):
                (source,) = node.inputs
                in_flight[node.output] = source
                copied[behind.get(source, source)] += 1
            available.update(node.outputs)
        require(not in_flight, "what is copied to the host is not waited for", *in_flight)

    def _parameters(self, rank: RankProgram) -> list[str]:
        """The rank's parameters, in its order, by the names that updates have: of a part of one, the part's own."""
        read = [each for stage in rank.stages for each in self.partitioned.stages[stage].parameters]
        parts = {each.part.name: each.name for each in read if each.part is not None}
        return [parts.get(name, name) for name in rank.parameters]

    def _memories(self, graph: StageGraph) -> None:
        """Every node of a stage runs in one memory, and reads what has arrived there."""
        in_flight: dict[Value, Node] = {}  # what is copied beside other work
        loaded: dict[Value, Node] = {}  # copies of what lies in the host's memory
        for node in graph.nodes:
            with self.check.at(node.span, f"on stage {graph.index}"):
                memories(node)
                arrives = isinstance(node.op, HostCopy) and node.op.is_view
                for value in node.inputs:
                    message = f"`{value.name}` is read before it has arrived"
                    require(
                        arrives == (value in in_flight),
                        message if value in in_flight else "nothing is under way",
                        value,
                    )
                    copied = in_flight.get(value) or loaded.get(value)
                    same = copied is None or copied.phase is node.phase
                    require(same, f"a copy of a parameter is kept from one phase to another: `{value.name}`", value)
                if isinstance(node.op, ASYNC_COPIES):
                    in_flight.update(dict.fromkeys(node.outputs, node))
                elif arrives:
                    loaded.update(dict.fromkeys(node.outputs, node))

    def _values(self, graph: StageGraph) -> None:
        """What is copied is in memory that F makes for one microbatch alone, and all of it is copied that is kept."""
        behind: dict[Value, Value] = {}
        allocated: set[Value] = set()
        read = {v for node in graph.nodes if node.phase in (Phase.BACKWARD, Phase.WEIGHT) for v in node.inputs}
        for node in graph.nodes:
            if node.op.is_view:
                behind[node.output] = behind.get(node.inputs[0], node.inputs[0])
            elif node.phase is Phase.FORWARD and node.op.literal is None and not isinstance(node.op, OfSlices):
                allocated.update(node.outputs)
        forward = {value for node in graph.nodes if node.phase is Phase.FORWARD for value in node.outputs}
        copied = {behind.get(value, value) for value in graph.offloaded}
        require(len(set(graph.offloaded)) == len(graph.offloaded), "a value is copied twice to the host's memory")
        for value in graph.offloaded:
            require(value in read, f"`{value.name}` is copied to the host's memory, but not kept", value)
            require(
                value in forward and behind.get(value, value) in allocated,
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

    def _instructions(self, rank: RankProgram, schedule: Schedule) -> None:
        stages = schedule.placement[rank.rank]
        expected = Counter(
            (stages[action.chunk], action) for action in schedule.actions[rank.rank] if action.kind in COPIES
        )
        for kind in (PostCopy, WaitCopy):
            actual = Counter((each.stage, each.action) for each in rank.instructions if isinstance(each, kind))
            require(actual == expected, f"rank {rank.rank} copies other microbatches than its schedule says")


def memories(node: Node) -> None:
    """A node runs in the memory in which its operands lie; only copies lead to the other one. Ranks exchange what is on
    their devices. Raises Violation.
    """
    sources = {value.host for value in node.inputs}
    targets = {value.host for value in node.outputs}
    require(
        not (isinstance(node.op, Collective) and any(sources)),
        f"{quoted(node)} is sent from the host's memory",
        *node.inputs,
    )
    if isinstance(node.op, (ToHost, ToDevice)):
        host = isinstance(node.op, ToHost)
        right = sources == {not host} and targets == {host}
        require(right, f"{quoted(node)} is not copied from one memory to the other", *node.inputs)
    elif isinstance(node.op, HostCopy):
        require(
            node.inputs[0].host in targets, f"{quoted(node)} has not arrived in the memory in which it is", *node.inputs
        )
    elif node.outputs:
        require(len(sources | targets) <= 1, f"{quoted(node)} is made of tensors in two memories", *node.inputs)


def _overwritten(node: Node) -> Sequence[Value]:
    """The operands to which a node may write."""
    if isinstance(node.op, Update):
        return node.op.overwritten(node.inputs)
    return node.inputs if node.op.overwrites else ()
