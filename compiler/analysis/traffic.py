"""What a program sends along its mesh axes: every collective of a step with its count, bytes, seconds and cause.

Where groups train apart, a rank that trains several runs a step for each; their average is not made in every step, and
its records have their share of one.

There is one record for each tensor in a collective, for each stage (or rank, at the end of a step) that runs it. Bytes
are what one rank of that stage sends, with ring algorithms (`Collective.moved`); seconds come from the cost function
that chose the layouts (`Reshard.seconds`), with a bucket's latency shared by its tensors.

Each collective is attributed to a source line: the parameter's, if a parameter is stored sharded or its gradient is
summed; the line that produces a partial sum, for its reduction; for any other, the line that first reads the result. So
a `dot` whose operand is gathered is also charged with the reduction of that operand's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import Layout
from partita.compiler.ops.collective import Collective, is_reshard
from partita.compiler.ops.optimizer import target_of
from partita.compiler.passes.outer import joined_mesh
from partita.compiler.passes.shard.resharding import Resharding
from partita.compiler.program import RankPlan
from partita.compiler.state import Partitioned, Scheduled
from partita.dsl.grouping import grouped
from partita.dsl.reprs import Shortened
from partita.dsl.syntax.source import Span
from partita.dsl.types import Type

# What runs once for each microbatch; everything else runs once a step.
EACH_MICROBATCH = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)


@frozen(eq=False, repr=False)
class Traffic(Shortened):
    """One tensor in a collective `kind` along mesh axis `axis`, over a step, on each rank of a pipeline rank.

    `tensor` is the value that is resharded from `source` to `target`, and `type` its local type before. `parameter`
    names the parameter that it is, or whose gradient it is. `count` is how often it is communicated in a step,
    `launches` its share of as many messages (in a bucket of four: a quarter), `bytes` what one rank sends in a step,
    and `seconds` how long that takes.
    """

    kind: str
    axis: str
    phase: Phase
    tensor: str
    parameter: str | None
    type: Type
    source: Layout
    target: Layout
    scope: str
    span: Span | None
    rank: int
    count: int
    launches: float
    bytes: float
    seconds: float


@frozen
class Sums:
    """Sums over records: tensors, messages, and what one rank of each stage sends, in bytes and seconds."""

    count: int
    messages: float
    bytes: float
    seconds: float


@frozen
class Cost:
    """The cost of records in a step: summed over the ranks of one pipeline, and on the rank that sends most."""

    total: Sums
    busiest: Sums

    def as_json(self) -> dict[str, Any]:
        """All totals, and the bytes of the rank that sends most."""
        return {
            "count": self.total.count,
            "messages": round(self.total.messages, 3),
            "bytes": round(self.total.bytes),
            "busiest": round(self.busiest.bytes),
            "seconds": self.total.seconds,
        }


def cost(records: Iterable[Traffic]) -> Cost:
    """The cost of some records."""
    rows = list(records)
    ranks = [_sums(own) for own in grouped(rows, lambda each: each.rank).values()]
    return Cost(_sums(rows), max(ranks, key=lambda each: each.bytes, default=_sums(())))


def _sums(records: Sequence[Traffic]) -> Sums:
    return Sums(
        sum(each.count for each in records),
        sum(each.launches for each in records),
        sum(each.bytes for each in records),
        sum(each.seconds for each in records),
    )


def traffic(state: Scheduled) -> tuple[Traffic, ...]:
    """All collectives of a step, stage by stage, then those at its end."""
    spans = {each.name: each.span for each in state.partitioned.graph.parameters}
    resharding = Resharding(joined_mesh(state.mesh))
    records: list[Traffic] = []
    for stage in state.partitioned.stages:
        rank = state.plan.stages[stage.index].rank
        parameters = {each.value: each.name for each in stage.parameters}
        records += _TrafficCollector(
            resharding, state.replicas_per_rank * state.microbatches, state.replicas_per_rank, rank, spans, parameters
        ).records(stage.nodes)
        parameters = {each.value: each.parameter for each in stage.accumulators if each.parameter}
        reduce = dict(state.update.reduce).get(stage.index, ())
        records += _TrafficCollector(resharding, 0, state.replicas_per_rank, rank, spans, parameters).records(reduce)
        metrics = [node for node in state.update.metrics if node.stage == stage.index]
        records += _TrafficCollector(resharding, 0, state.replicas_per_rank, rank, spans, {}).records(metrics)
    for each in state.plan.ranks:
        nodes = update_nodes(state, each)
        parameters = {value: node.scope for node in nodes for value in node.outputs if node.scope in spans}
        records += _TrafficCollector(resharding, 0, state.replicas_per_rank, each.rank, spans, parameters).records(
            nodes
        )
        outer = outer_nodes(state, each)
        parameters = {value: node.scope for node in outer for value in node.outputs if node.scope in spans}
        records += _TrafficCollector(resharding, 0, 1, each.rank, spans, parameters, state.every).records(outer)
    return tuple(records)


def update_nodes(state: Partitioned, rank: RankPlan) -> list[Node]:
    """The nodes of a rank's update, bucketed as they are emitted."""
    update = state.update
    before, after = update.buffer_updates(rank.parameters), update.after_updates(rank.parameters)
    return [*before, *update.parameter_updates(rank.parameters), *after]


def outer_nodes(state: Partitioned, rank: RankPlan) -> list[Node]:
    """The nodes of the average over replica groups, bucketed as they are emitted."""
    return state.update.outer_updates(rank.parameters)


def launch_seconds(resharding: Resharding, node: Node, op: Collective) -> tuple[float, float]:
    """Latency and transfer time of a node that is a collective."""
    return op.seconds(sum(value.type.bytes for value in node.inputs), resharding.mesh.link(op.over))


@define(eq=False)
class _TrafficCollector:
    """Reads the records from nodes in order, which run for so many `microbatches`, or `steps` at once. `parameters` are
    values that are parameters, or gradient sums. What follows one of `every` so many steps has that share of its bytes
    and seconds.
    """

    resharding: Resharding
    microbatches: int
    steps: int
    rank: int
    spans: Mapping[str, Span | None]
    parameters: Mapping[Value, str]
    every: int = 1
    makers: dict[Value, Node] = field(factory=dict)
    readers: dict[Value, Node] = field(factory=dict)
    roots: dict[Value, Value] = field(factory=dict)

    def records(self, nodes: Sequence[Node]) -> Iterator[Traffic]:
        for node in nodes:
            for value in node.outputs:
                self.makers[value] = node
            if is_reshard(node.op):
                for before, after in zip(node.inputs, node.outputs, strict=True):
                    self.roots[after] = self.roots.get(before, before)
        for node in reversed(nodes):
            if is_reshard(node.op):
                for before, after in zip(node.inputs, node.outputs, strict=True):
                    if after in self.readers:
                        self.readers[before] = self.readers[after]
            else:
                self.readers.update(dict.fromkeys(node.inputs, node))
        for node in nodes:
            if isinstance(node.op, Collective):
                yield from self._of(node, node.op)

    def _of(self, node: Node, op: Collective) -> Iterator[Traffic]:
        times = self.microbatches if node.phase in EACH_MICROBATCH else self.steps
        latency, wire = launch_seconds(self.resharding, node, op)
        whole = op.moved([value.type for value in node.inputs])
        for before, after in zip(node.inputs, node.outputs, strict=True):
            root = self.roots.get(before, before)
            parameter = self._parameter(root, after)
            moved = op.moved((before.type,))
            yield Traffic(
                op.name,
                op.over,
                node.phase,
                root.name,
                parameter,
                before.type,
                before.layout,
                after.layout,
                node.scope,
                self.spans[parameter] if parameter else self._cause(node, op, root, after),
                self.rank,
                times,
                times / op.count / self.every,
                times * moved / self.every,
                times * (latency / op.count + wire * moved / whole) / self.every,
            )

    def _parameter(self, root: Value, after: Value) -> str | None:
        if root in self.parameters:
            return self.parameters[root]
        reader = self.readers.get(after)
        target = target_of(reader.op) if reader is not None else None
        return target if target in self.spans else None

    def _cause(self, node: Node, op: Collective, root: Value, after: Value) -> Span | None:
        cause = self.makers.get(root) if isinstance(op, Collective) and op.combines else self.readers.get(after)
        return cause.span if cause is not None and cause.span is not None else node.span
