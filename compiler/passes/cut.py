"""Placed graph → partitioned graph: one graph for each stage, with sends and receives between them.

There is one pair for each (value, destination stage), however many consumers are there; a consumer two stages on is
sent the value directly. Both ends have the value's name and type. Values computed from inputs and constants alone
(masks, positions) are not sent but computed on each stage that needs them, since the data is a function of (seed,
step). Removing the pairs and joining the stages gives back the graph before the cut (`join`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from functools import cached_property

from attrs import evolve, frozen

from partita.compiler.graph import LAST, Accumulator, Graph, Input, Node, Parameter, Phase, Value, inputs_of
from partita.compiler.instructions import Direction, Message
from partita.compiler.ops.communication import Receive, Send, Transfer
from partita.compiler.ops.optimizer import target_of
from partita.compiler.ops.slices import OfSlices
from partita.compiler.passes.place import iteration_of
from partita.compiler.schedules.schedule import SharedVocabulary
from partita.dsl.diagnostic import refuse
from partita.dsl.reprs import count, outline


@frozen(eq=False)
class StageGraph:
    """One stage: its nodes in order, all phases. Values are its own; equal names across stages mean the same tensor.
    `offloaded` are those that may lie in the host's memory between F and the backward pass.
    """

    index: int
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    accumulators: tuple[Accumulator, ...]
    offloaded: tuple[Value, ...] = ()

    def __repr__(self) -> str:
        return f"<StageGraph {self.index}: {count(len(self.nodes), 'operation')}>"


@frozen(eq=False)
class PartitionedGraph:
    """All stages, the messages between them, and the graph that they were cut from. `first` are the stages that come
    before stage 0.
    """

    graph: Graph
    stages: tuple[StageGraph, ...]
    messages: tuple[Message, ...]
    first: frozenset[int] = frozenset()

    def depth(self, stage: int) -> int:
        """The place of a stage in the order in which F runs through them."""
        return stage - len(self.stages) if stage in self.first else stage

    def __repr__(self) -> str:
        facts = (count(len(self.stages), "stage"), count(len(self.messages), "message"))
        return outline("Partitioned graph of", self.graph.name, facts)

    @cached_property
    def forms(self) -> list[int]:
        """For each stage a number, which it shares with those that are alike (`forms`)."""
        return forms(self)

    def stage_sets(self) -> dict[str, tuple[int, ...]]:
        """The stages that read each parameter."""
        readers: dict[str, tuple[int, ...]] = {}
        for stage in self.stages:
            for parameter in stage.parameters:
                readers[parameter.name] = (*readers.get(parameter.name, ()), stage.index)
        return readers


def cut(graph: Graph, stages: int, spread: SharedVocabulary | None = None) -> PartitionedGraph:
    """Cut a placed graph; `spread` says which stages come before the first. Raises Refused (E0405) if a value would
    have to flow backward.
    """
    graph = _whole_messages(graph)
    portable = portable_values(graph)
    producer: dict[Value, Node] = {v: node for node in graph.nodes for v in node.outputs if v not in portable}
    copies = _copies(graph, portable, stages)
    crossing = _crossing(graph, producer, spread.first if spread else frozenset())
    messages: list[Message] = []
    locals_: list[dict[Value, Value]] = [{} for _ in range(stages)]
    nodes: list[list[Node]] = [[] for _ in range(stages)]
    for node in graph.nodes:
        if node.phase in LAST:
            continue  # belongs to the update graph
        targets = copies.get(node, ()) if node.outputs and node.outputs[0] in portable else (node.placed_on,)
        for stage in targets:
            mapping = locals_[stage]
            inputs = []
            for value in node.inputs:
                if value not in mapping and value in producer:
                    source = producer[value].placed_on
                    direction: Direction = "forward" if producer[value].phase is Phase.FORWARD else "backward"
                    mapping[value] = evolve(value)
                    op = Receive(value.name, source, direction, value.type)
                    phase = Phase.FORWARD if direction == "forward" else Phase.BACKWARD
                    nodes[stage].append(Node(op, (), (mapping[value],), node.scope, node.span, phase, stage))
                inputs.append(mapping.setdefault(value, value))
            for value in node.outputs:
                mapping[value] = value
            nodes[stage].append(node.changed(inputs=tuple(inputs), stage=stage))
            for value in node.outputs:
                for destination in crossing.get(value, ()):
                    direction = "forward" if node.phase is Phase.FORWARD else "backward"
                    send = Send(value.name, destination, direction)
                    nodes[stage].append(Node(send, (value,), (), node.scope, node.span, node.phase, stage))
                    messages.append(message_of(nodes[stage][-1]))
    accumulators = {(each.name, each.stage): each for each in graph.accumulators}
    read = {value for local in nodes for node in local for value in node.inputs}
    # A frozen parameter that nothing reads, such as those of an iteration without effect, is kept for checkpoints.
    unread = {each.value for each in graph.parameters if each.frozen} - read
    return PartitionedGraph(
        graph,
        tuple(
            _stage(graph, index, local, accumulators, set() if index else unread) for index, local in enumerate(nodes)
        ),
        tuple(messages),
        spread.first if spread is not None else frozenset(),
    )


def message_of(node: Node) -> Message:
    """The message that a send or a receive belongs to."""
    assert isinstance(node.op, Transfer), node
    (value,) = (*node.inputs, *node.outputs)
    return Message(node.op.value, *node.op.stages(node.placed_on), node.op.direction, value.type.bytes)


def _stage(
    graph: Graph,
    index: int,
    nodes: Sequence[Node],
    known: dict[tuple[str, int | None], Accumulator],
    unread: set[Value],
) -> StageGraph:
    read = inputs_of(nodes)
    included = read | unread
    targets = [target for node in nodes if (target := target_of(node.op)) is not None]
    return StageGraph(
        index,
        tuple(each for each in graph.inputs if each.value in read),
        tuple(p for p in graph.parameters if p.value in included or index in p.kept),
        # What slices share comes first, so that it does not stand between the nodes of an iteration.
        tuple(sorted(nodes, key=lambda node: not isinstance(node.op, OfSlices))),
        tuple(known[name, index] for name in dict.fromkeys(targets)),
    )


def _whole_messages(graph: Graph) -> Graph:
    """Move to B every W node whose result another stage needs, and the W nodes it depends on."""
    stage = {value: node.stage for node in graph.nodes for value in node.outputs}
    needed: set[Value] = set()
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if node.phase is Phase.WEIGHT and any(value in needed for value in node.outputs):
            node = node.changed(phase=Phase.BACKWARD)
        if node.phase is Phase.BACKWARD:
            needed.update(node.inputs)
        elif node.phase is Phase.WEIGHT:
            needed.update(value for value in node.inputs if stage.get(value, node.stage) != node.stage)
        nodes.append(node)
    return evolve(graph, nodes=tuple(reversed(nodes)))


def portable_values(graph: Graph) -> set[Value]:
    """Values computed from inputs, constants and random numbers alone, before the backward pass."""
    portable = {each.value for each in graph.inputs}
    for node in graph.nodes:
        if node.phase in (Phase.FORWARD, Phase.PROLOGUE) and all(v in portable for v in node.inputs):
            portable.update(node.outputs)
    # Constants of the backward pass too: they are created wherever they are read.
    for node in graph.nodes:
        if node.op.duplicable and not node.inputs:
            portable.update(node.outputs)
    return portable


def _copies(graph: Graph, portable: set[Value], stages: int) -> dict[Node, tuple[int, ...]]:
    """The stages that need each portable node."""
    readers: dict[Value, set[int]] = {}
    copies: dict[Node, tuple[int, ...]] = {}
    for node in reversed(graph.nodes):
        if node.phase in LAST:
            continue
        if node.outputs and node.outputs[0] in portable:
            targets = set[int]().union(*(readers.get(value, ()) for value in node.outputs))
            copies[node] = tuple(sorted(targets))
        else:
            targets = {node.placed_on}
        for value in node.inputs:
            if value in portable:
                readers.setdefault(value, set()).update(targets)
    return copies


def _crossing(graph: Graph, producers: dict[Value, Node], first: Collection[int]) -> dict[Value, tuple[int, ...]]:
    """The other stages that read each value, in ascending order."""
    crossing: dict[Value, dict[int, None]] = {}
    for node in graph.nodes:
        if node.phase in LAST:
            continue
        for value in node.inputs:
            producer = producers.get(value)
            if producer is None or producer.stage == node.stage:
                continue
            source, destination = producer.placed_on, node.placed_on
            forward = producer.phase is Phase.FORWARD
            back = source not in first and (destination in first or destination < source)
            if forward and node.phase is Phase.FORWARD and back:
                raise refuse(
                    "E0405",
                    f"`{value.name}` is produced on stage {source} but read on the earlier stage {destination}",
                    node.span,
                    notes=[f"produced at {producer.span.place}" if producer.span else "made there"],
                    help="place its reader on the same stage or a later one",
                )
            assert forward or back, f"{value.name} would cross from B of {source} to {destination}"
            crossing.setdefault(value, {})[destination] = None
    return {value: tuple(sorted(destinations)) for value, destinations in crossing.items()}


def join(partitioned: PartitionedGraph) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    """The nodes of all stages except sends and receives, as (op, operand names, result names), sorted.

    Equal to `described` of the graph before the cut, up to nodes whose values are portable.
    """
    everything = {
        _described(node) for stage in partitioned.stages for node in stage.nodes if not isinstance(node.op, Transfer)
    }
    return tuple(sorted(everything))


def described(nodes: Iterable[Node]) -> tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]:
    """Nodes as (op, operand names, result names), sorted, without duplicates."""
    return tuple(sorted({_described(node) for node in nodes}))


def _described(node: Node) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    return str(node.op), tuple(v.name for v in node.inputs), tuple(v.name for v in node.outputs)


# ---------------------------------------------------------------- stages that are alike


def forms(partitioned: PartitionedGraph, reduce: Iterable[tuple[int, Sequence[Node]]] = ()) -> list[int]:
    """For each stage, a number that it shares with those that are the same but for names, such as the middle ones of a
    pipeline of equal layers: operations on values of the same types, in the same iterations of repeats; and, if given,
    those that `reduce` gradients, by stage. What is found out about the time and the memory of one holds for all.
    """
    repeats = partitioned.graph.repeats
    last = dict(reduce)
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault(tuple(_form(stage, last.get(stage.index, ()), repeats)), len(numbers))
        for stage in partitioned.stages
    ]


def _form(stage: StageGraph, reduce: Sequence[Node], repeats: dict[str, str]) -> Iterator[Hashable]:
    """What is said of a stage but names: of these, only which are the same."""
    values: dict[Value, int] = {}
    iterations: dict[str | None, int] = {}
    scopes: dict[str, int] = {}

    def known(value: Value) -> Hashable:
        number = values.get(value)
        if number is not None:
            return number
        values[value] = len(values)
        return value.type, value.host

    sums = {each.name: i for i, each in enumerate(stage.accumulators)}
    yield tuple(known(each.value) for each in stage.parameters)
    yield tuple(known(each.value) for each in stage.accumulators)
    for node in (*stage.nodes, *reduce):
        scope = scopes.get(node.scope)
        if scope is None:
            iteration = iteration_of(node.scope, repeats)
            scope = scopes[node.scope] = iterations.setdefault(iteration, len(iterations))
        op = node.op
        yield op.structural_key, sums.get(target_of(op) or ""), node.phase, scope
        yield tuple(map(known, node.inputs))
        yield tuple(map(known, node.outputs))
    yield tuple(map(known, stage.offloaded))
