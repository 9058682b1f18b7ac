"""What of the updates of buffers is computed once a step, of the whole batch; and which stages keep buffers.

An update is a function of *statistics*: values without the batch axis, made from values with it. Statistics are summed
over the microbatches, as metrics are; what follows from them, from parameters and from other buffers is the *end* of
the update, and is computed once a step from these sums and from masters, in the dtype of accumulation. Every stage that
keeps a buffer computes the end of its update, as every stage that reads a tied parameter updates it.

What becomes of a parameter after its update is such an end as well, of no statistics: it reads masters as they are once
all are updated.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, evolve, field, frozen

from partita.compiler.graph import BufferWrite, Builder, Graph, Master, Node, Parameter, Phase, Value, outputs_of
from partita.compiler.layout import is_split
from partita.compiler.ops.body import widened
from partita.compiler.ops.op import ShardingRule, accumulation
from partita.compiler.ops.pointwise import cast
from partita.compiler.ops.shape import arranged


@frozen(eq=False)
class UpdateEnds:
    """The ends of all updates of a graph: their nodes, and the statistics that they read or that are the new values."""

    nodes: frozenset[Node]
    statistics: frozenset[Value]

    def read(self, graph: Graph, value: Value) -> tuple[list[Node], set[Value]]:
        """The nodes that the end of one update consists of, in order, and what they read."""
        needed, nodes = {value}, list[Node]()
        for node in reversed(graph.nodes):
            if node in self.nodes and any(each in needed for each in node.outputs):
                nodes.append(node)
                needed.update(node.inputs)
        produced = outputs_of(nodes)
        return nodes[::-1], needed - produced


def ends_of(graph: Graph, batch: str) -> UpdateEnds:
    """The ends of a graph's updates. `batch` is the axis that is split into microbatches."""
    if not graph.updates:
        return UpdateEnds(frozenset(), frozenset())
    needed = {each.value for each in graph.updates}
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node.inputs)
    along = _along_batch(graph, batch, needed)
    inputs = {each.value for each in graph.inputs}
    late = {
        node
        for node in graph.nodes
        if any(value in needed for value in node.outputs)
        and not node.op.random
        and not any(along.get(value) or value in inputs for value in (*node.inputs, *node.outputs))
    }
    roots, ends = {each.value for each in graph.updates}, set[Node]()
    for node in reversed(graph.nodes):
        if node in late and any(value in roots for value in node.outputs):
            ends.add(node)
            roots.update(node.inputs)
    produced = outputs_of(ends)
    parameters = {parameter.value for parameter in graph.parameters}
    return UpdateEnds(frozenset(ends), frozenset(roots - produced - parameters))


def _along_batch(graph: Graph, batch: str, needed: set[Value]) -> dict[Value, frozenset[str]]:
    """The axes along which values are split when the batch is: itself, or what it has been split or renamed to."""
    along = {each.value: frozenset([batch]) for each in graph.inputs if each.value.type.has(batch)}
    for node in graph.nodes:
        if not any(value in needed for value in node.outputs):
            continue
        axes: list[set[str]] = [set() for _ in node.outputs]
        if not any(value.type.has(batch) for value in node.inputs):
            for value, own in zip(node.outputs, axes, strict=True):
                own.update([batch] if value.type.has(batch) else [])
        rules: tuple[ShardingRule, ...] = ()
        if any(along.get(value) for value in node.inputs):
            rules = node.op.sharding_rules([v.type for v in node.inputs], [v.type for v in node.outputs])
        for i, value in enumerate(node.inputs):
            split = along.get(value, frozenset())
            for own, output in zip(axes, node.outputs, strict=True):
                own.update(axis for axis in split if output.type.has(axis))
            for rule in rules:
                if rule.operands[i] in split:
                    for own, state in zip(axes, rule.results, strict=True):
                        own.update([state] if is_split(state) else [])
        along.update((value, frozenset(own)) for value, own in zip(node.outputs, axes, strict=True))
    return along


def stages_of(graph: Graph, batch: str) -> dict[Value, set[int]]:
    """The stages of a placed graph that keep each parameter and buffer: those where an operation of a microbatch reads
    it, and those that keep a buffer whose update reads it. What none of these reads is kept where its update is made.
    """
    ends = ends_of(graph, batch)
    stages: dict[Value, set[int]] = {parameter.value: set() for parameter in graph.parameters}
    for node in _needed(graph, ends):
        for value in node.inputs:
            if value in stages:
                stages[value].add(node.placed_on)
    written = {parameter.name: parameter.value for parameter in graph.parameters}
    buffers = {parameter.name: parameter.value for parameter in graph.parameters if parameter.buffer}
    reads: dict[Value, set[Value]] = {}
    for each in graph.updates:
        buffer = written[each.buffer]
        nodes, read = ends.read(graph, each.value)
        reads[buffer] = {value for value in read if value in stages}
        if not stages[buffer]:
            producers = [node for node in graph.nodes if each.value in node.outputs]
            stages[buffer].update(node.placed_on for node in (*producers, *nodes)[:1])
    for buffer in buffers.values():
        stages[buffer] = stages[buffer] or {0}
    changed = True
    while changed:
        changed = False
        for buffer, others in reads.items():
            for other in others:
                if not stages[buffer] <= stages[other]:
                    stages[other] |= stages[buffer]
                    changed = True
    return stages


def with_stages(graph: Graph, batch: str, stages: dict[Value, set[int]]) -> Graph:
    """The graph whose parameters know the stages that keep them although no operation of a microbatch reads them."""
    read: dict[Value, set[int]] = {value: set() for value in stages}
    for node in _needed(graph, ends_of(graph, batch)):
        for value in node.inputs:
            if value in read:
                read[value].add(node.placed_on)
    parameters = (evolve(p, kept=tuple(sorted(stages[p.value] - read[p.value]))) for p in graph.parameters)
    return evolve(graph, parameters=tuple(parameters))


def _needed(graph: Graph, ends: UpdateEnds) -> set[Node]:
    """The nodes that run for each microbatch."""
    needed = {graph.loss, *(value for _, value in graph.metrics)}
    needed |= ends.statistics
    nodes: set[Node] = set()
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outputs):
            nodes.add(node)
            needed.update(node.inputs)
    return nodes


# ---------------------------------------------------------------- the ends as nodes


@define(eq=False)
class Endings:
    """Builds the ends of updates as UPDATE nodes. `statistic` accumulates a value, for a node that reads it."""

    source: Graph
    ends: UpdateEnds
    build: Builder
    statistic: Callable[[Value, Node | None], Value]
    nodes: list[Node] = field(factory=list)
    masters: dict[tuple[Value, bool], Master] = field(factory=dict)
    _made: dict[bool, dict[Value, Value]] = field(factory=lambda: {False: {}, True: {}})
    _after: bool = False

    def update(self, each: BufferWrite) -> BufferWrite:
        """A value after the step, with the dtype and the order of axes of its master."""
        self._after = each.after
        nodes, _ = self.ends.read(self.source, each.value)
        for node in nodes:
            if node.outputs[0] not in self._late:
                self._copied(node)
        master = next(parameter.master for parameter in self.source.parameters if parameter.name == each.buffer)
        own = self.build.fresh()
        own.scope, own.span, own.phase = each.buffer, each.span, Phase.UPDATE
        value = self._read(each.value, nodes[-1] if nodes else None)
        value = arranged(own, cast(own, value, master.dtype), master.names)
        self.nodes += own.nodes
        return evolve(each, value=value)

    @property
    def _late(self) -> dict[Value, Value]:
        """What is made already for updates, or for what comes after all of them."""
        return self._made[self._after]

    def _copied(self, node: Node) -> None:
        """A node of the end, in the dtype of accumulation."""
        inputs = tuple(self._read(value, node) for value in node.inputs)
        op = widened(node.op)
        types = op.infer(*(value.type for value in inputs))
        outputs = tuple(self.build.part(v, "after", type) for v, type in zip(node.outputs, types, strict=True))
        self.nodes.append(evolve(node, op=op, inputs=inputs, outputs=outputs, phase=Phase.UPDATE, stage=None))
        self._late.update(zip(node.outputs, outputs, strict=True))

    def _widened(self, parameter: Parameter, master: Value) -> Value:
        """A master in the dtype of accumulation: one that is not trained may have another."""
        own = self.build.fresh()
        own.scope, own.span, own.phase = parameter.name, parameter.span, Phase.UPDATE
        value = cast(own, master, accumulation(master.type.dtype))
        self.nodes += own.nodes
        return value

    def _read(self, value: Value, reader: Node | None) -> Value:
        """A value as the end of an update reads it: a master, or what the microbatches have summed up."""
        if value not in self._late:
            parameter = next((each for each in self.source.parameters if each.value is value), None)
            if parameter is not None:
                kind = "updated" if self._after else "master"
                master = self.build.value(f"{kind}({parameter.name})", parameter.master)
                self.masters[value, self._after] = Master(parameter.name, master, self._after)
                self._late[value] = self._widened(parameter, master)
            else:
                self._late[value] = self.statistic(value, reader)
        return self._late[value]
