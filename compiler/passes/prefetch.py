"""Stages whose parameters lie in the host's memory (`offload param`) read copies, which start one layer ahead.

Takes the stages of a partitioned graph, in their final order. A unit is an iteration of a repeat; outside of repeats,
it begins with each node that reads such a parameter. What a unit reads is copied when the unit before it begins
(`prefetch`), so that the copy runs beside that one's work, and waited for where it is first read (`arrive`); it is
freed behind its last reader. So the device has the parameters of two units at a time, as in the first tier of
ZeRO-Infinity (arXiv 2104.07857). A copy serves one unit, and the next if that reads it as well, in one function: none
outlives F, B or W. Where parameters are stored as shards, it is the shard that is copied, and then gathered.

A lookup of rows runs where the table lies: ids are copied to the host, and the rows that they name to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from attrs import define, evolve, field

from partita.compiler.graph import Builder, Node, Phase, Value, substitute
from partita.compiler.ops.host import Arrive, Prefetch, ToDevice, ToHost
from partita.compiler.ops.op import Op
from partita.compiler.passes.cut import PartitionedGraph, StageGraph
from partita.compiler.passes.place import iteration_of

# Phases whose nodes may run in one function. In each phase the copies are its own.
GROUPS = ((Phase.PROLOGUE,), (Phase.FORWARD,), (Phase.BACKWARD, Phase.WEIGHT))


def prefetched(partitioned: PartitionedGraph, on_host: Collection[str]) -> PartitionedGraph:
    """The same stages, whose parameters `on_host` lie in the host's memory."""
    if not on_host:
        return partitioned
    repeats = {scope.path: scope.name for scope in partitioned.graph.scopes if scope.repeat}
    build = Builder(value.name for stage in partitioned.stages for node in stage.nodes for value in node.outputs)
    stages = (
        _Prefetching(stage, on_host, lambda node: iteration_of(node.scope, repeats), partitioned.graph.name, build)
        for stage in partitioned.stages
    )
    return evolve(partitioned, stages=tuple(each.stage_graph() for each in stages))


def looks_up(node: Node, value: Value) -> bool:
    """Whether all that a node does with a value is to look up rows of it."""
    return node.op.looks_up is not None and value not in node.inputs[:-1]


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
            units = self._units([node for node in nodes if not (node.op.sends or node.op.receives)])
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
        ahead = phase is not Phase.PROLOGUE
        copies: dict[Value, Value] = {}
        for i, unit in enumerate(units):
            own = [node for node in unit if node.phase is phase]
            read = dict.fromkeys(value for node in own for value in self._copied(node))
            copies = {value: copy for value, copy in copies.items() if value in read}
            started: dict[Value, Value] = {}
            start = self.before.setdefault((units[i - 1] if i else unit)[0], [])
            for value in read:
                if value not in copies and ahead:
                    started[value] = self._made(value, "prefetched", host=False)
                    start.append(self._node(Prefetch(), self.there[value], started[value], own[0], self.root))
            for node in own:
                found: list[Node] = []
                for value in self._copied(node):
                    if value not in copies:
                        op, source = (Arrive(), started[value]) if ahead else (ToDevice(), self.there[value])
                        copies[value] = self._made(value, "arrived", host=False)
                        found.append(self._node(op, source, copies[value], node, node.scope))
                local = substitute(node, copies)
                if any(value in self.there and looks_up(node, value) for value in node.inputs):
                    found += self._looked_up(local)
                else:
                    found.append(local)
                self.instead[node] = found

    def _looked_up(self, node: Node) -> list[Node]:
        """A lookup in the host's memory."""
        *given, table = node.inputs
        ids = [self._made(value, "on_host", host=True) for value in given]
        rows = self._made(node.output, "rows", host=True)
        return [
            *(self._node(ToHost(), value, copy, node, node.scope) for value, copy in zip(given, ids, strict=True)),
            evolve(node, inputs=(*ids, self.there[table]), outputs=(rows,)),
            self._node(ToDevice(), rows, node.output, node, node.scope),
        ]

    def _made(self, value: Value, ending: str, host: bool) -> Value:
        return evolve(value.derived(self.build.unique(f"{value.name}.{ending}")), host=host)

    @staticmethod
    def _node(op: Op, operand: Value, result: Value, like: Node, scope: str) -> Node:
        return evolve(like, op=op, inputs=(operand,), outputs=(result,), scope=scope)
