"""Stages whose parameters lie in the host's memory (`offload param`) read copies, which start one layer ahead.

Takes the stages of a partitioned graph, in the order in which they overlap communication. A unit is an iteration of a
repeat; outside of repeats, it begins with each node that reads such a parameter. What a unit reads is copied when the
unit before it begins (`prefetch`), so that the copy runs beside that one's work, and has arrived when its own begins
(`arrive`); it is freed behind its last reader. So the device has the parameters of two units at a time, as in the first
tier of ZeRO-Infinity (arXiv 2104.07857). A copy serves one unit, and the next if that reads it as well, in one
function: none outlives F, B or W. Where parameters are stored as shards, it is the shard that is copied, and gathered.

A lookup of rows runs where the table lies if rows are less than the table: ids are copied to the host, and the rows
that they name to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from attrs import define, evolve, field

from partita.compiler.graph import Builder, Node, Phase, Value, substitute
from partita.compiler.ops.communication import Transfer
from partita.compiler.ops.host import HostCopy, Prefetch, ToDevice, ToHost, WaitPrefetch
from partita.compiler.ops.op import Op
from partita.compiler.ops.traits import LooksUp
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.passes.place import iteration_of

# Phases whose nodes may run in one function. In each phase the copies are its own.
GROUPS = ((Phase.PROLOGUE,), (Phase.FORWARD,), (Phase.BACKWARD, Phase.WEIGHT))


def prefetched(partitioned: PartitionedGraph, on_host: Collection[str]) -> PartitionedGraph:
    """The same stages, whose parameters `on_host` lie in the host's memory."""
    if not on_host:
        return partitioned
    repeats = partitioned.graph.repeats
    build = Builder(value.name for stage in partitioned.stages for node in stage.nodes for value in node.outputs)
    stages = (
        _Prefetching(stage, on_host, lambda node: iteration_of(node.scope, repeats), partitioned.graph.name, build)
        for stage in partitioned.stages
    )
    return evolve(partitioned, stages=tuple(each.stage_graph() for each in stages))


def without_copies(partitioned: PartitionedGraph) -> PartitionedGraph:
    """The stages as they were before (but that parameters lie in the host's memory)."""
    stages = []
    for stage in partitioned.stages:
        behind: dict[Value, Value] = {}
        for node in stage.nodes:
            if isinstance(node.op, HostCopy):
                behind[node.output] = behind.get(node.inputs[0], node.inputs[0])
        # The rows of a lookup have their own name once they are on the device.
        ahead = {source: copy for copy, source in behind.items() if source.host and source not in _parameters(stage)}
        nodes = [
            evolve(substitute(node, behind), outputs=tuple(ahead.get(value, value) for value in node.outputs))
            for node in stage.nodes
            if not isinstance(node.op, HostCopy)
        ]
        back = [substitute(node, ahead) for node in nodes]
        stages.append(evolve(stage, nodes=tuple(back)))
    return evolve(partitioned, stages=tuple(stages))


def _parameters(stage: StageGraph) -> set[Value]:
    return {each.value for each in stage.parameters}


def looks_up(node: Node, value: Value) -> bool:
    """Whether all that a node does with a value is to look up rows of it, which are less than all of it."""
    rows = isinstance(node.op, LooksUp) and value not in node.inputs[:-1]
    return rows and node.output.type.bytes < value.type.bytes


@define(eq=False)
class _Prefetching:
    stage: StageGraph
    on_host: Collection[str]
    iteration: Callable[[Node], str | None]
    root: str
    build: Builder
    there: dict[Value, Value] = field(init=False)  # the parameters, as they lie in the host's memory
    before: dict[Node, list[Node]] = field(factory=dict)  # what runs before a node
    instead: dict[Node, list[Node]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.there = {
            each.value: evolve(each.value, host=True) for each in self.stage.parameters if each.name in self.on_host
        }

    def stage_graph(self) -> StageGraph:
        """The stage that reads copies."""
        for phases in GROUPS:
            nodes = [node for node in self.stage.nodes if node.phase in phases]
            units = self._units([node for node in nodes if not isinstance(node.op, Transfer)])
            for phase in phases:
                self._copy(units, phase)
        nodes = [
            each for node in self.stage.nodes for each in (*self.before.get(node, ()), *self.instead.get(node, (node,)))
        ]
        parameters = tuple(evolve(each, value=self.there.get(each.value, each.value)) for each in self.stage.parameters)
        return evolve(self.stage, nodes=tuple(nodes), parameters=parameters)

    def _units(self, nodes: Sequence[Node]) -> list[list[Node]]:
        units: list[list[Node]] = []
        last: str | None = None
        for node in nodes:
            iteration = self.iteration(node)
            if not units or iteration != last or (iteration is None and self._copied(node)):
                units.append([])
            units[-1].append(node)
            last = iteration
        return units

    def _copied(self, node: Node) -> list[Value]:
        """The parameters of which a node reads a copy."""
        return [value for value in dict.fromkeys(node.inputs) if value in self.there and not looks_up(node, value)]

    def _copy(self, units: Sequence[Sequence[Node]], phase: Phase) -> None:
        """Copies for the nodes of one phase."""
        copies: dict[Value, Value] = {}
        for i, unit in enumerate(units):
            own = [node for node in unit if node.phase is phase]
            read = {value: node for node in reversed(own) for value in reversed(self._copied(node))}
            copies = {value: copy for value, copy in copies.items() if value in read}
            for value in [value for value in reversed(read) if value not in copies]:
                copies[value] = self._begun(value, read[value], units[i - 1][0] if i else unit[0], unit[0])
            for node in own:
                local = substitute(node, copies)
                reads_host = any(value in self.there for value in local.inputs)
                self.instead[node] = self._looked_up(local) if reads_host else [local]

    def _begun(self, value: Value, reader: Node, start: Node, end: Node) -> Value:
        """A copy of a parameter for a reader, which starts before one node and has arrived before another."""
        copy = self._made(value, "here", host=False)
        if reader.phase is Phase.PROLOGUE:
            begun = [self._node(ToDevice(), self.there[value], copy, reader, self.root)]
        else:
            in_flight = self._made(value, "coming", host=False)
            started = self._node(Prefetch(), self.there[value], in_flight, reader, self.root)
            self.before.setdefault(start, []).append(started)
            begun = [self._node(WaitPrefetch(), in_flight, copy, reader, self.root)]
        self.before.setdefault(end, []).extend(begun)
        return copy

    def _looked_up(self, node: Node) -> list[Node]:
        """A lookup in the host's memory."""
        *indices, table = node.inputs
        ids = [self._made(value, "on_host", host=True) for value in indices]
        rows = self._made(node.output, "rows", host=True)
        return [
            *(self._node(ToHost(), value, copy, node, node.scope) for value, copy in zip(indices, ids, strict=True)),
            evolve(node, inputs=(*ids, self.there[table]), outputs=(rows,)),
            self._node(ToDevice(), rows, node.output, node, node.scope),
        ]

    def _made(self, value: Value, ending: str, host: bool) -> Value:
        return evolve(value.derived(self.build.unique(f"{value.name}.{ending}")), host=host)

    @staticmethod
    def _node(op: Op, operand: Value, result: Value, like: Node, scope: str) -> Node:
        return evolve(like, op=op, inputs=(operand,), outputs=(result,), scope=scope)
