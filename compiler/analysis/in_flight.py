"""Collectives as what they do to memory: from where they start to where their results are read.

A collective becomes three nodes. The first, where it starts, makes what is in flight: what is sent and what is
received. The others stand where the function waits for it, which is where it first reads a result
(`partita.compiler.codegen.writer`). The second is the last to read what is sent, of which operands may be sent as they
are; the third makes the results of what was received. But Gloo's threads may hold on to operands for a moment longer:
where the ranks do the addition, they are there until the results are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import define, evolve, field, frozen

from partita.compiler.analysis.liveness import Runs, device_bytes, roots
from partita.compiler.graph import Node, Value
from partita.compiler.ops.buffers import Buffers
from partita.compiler.ops.collective import Collective
from partita.dsl.types import Axis, Type


@frozen(eq=False)
class CollectiveLifetime:
    """A collective: its `start` makes what is in `flight`, but for operands that are sent as they are, and its `end`
    the results. `behind` has the memory of those that have none of their own.
    """

    start: Node
    end: tuple[Node, Node]
    flight: tuple[Value, ...]
    behind: Mapping[Value, Value]


@define(eq=False)
class Communicating:
    """The `nodes` of a function in order; for each view, the tensor whose memory it aliases; and what has `begun`."""

    nodes: list[Node]
    behind: dict[Value, Value] = field(factory=dict)
    begun: set[Value] = field(factory=set)

    def left(self, values: Iterable[Value]) -> int:
        """Bytes of the memory behind values that the function makes, or has been given in flight."""
        defined = self.begun.union(*(node.outputs for node in self.nodes))
        return sum(device_bytes(value) for value in {self.behind.get(value, value) for value in values} & defined)


def buffers_of(node: Node, adds: bool) -> Buffers:
    """What a node holds while it communicates; `adds`: the ranks do the addition."""
    operands, results = ([value.type for value in each] for each in (node.inputs, node.outputs))
    return node.op.buffers(operands, results, adds) if isinstance(node.op, Collective) else Buffers()


def lent(node: Node, adds: bool) -> list[Value]:
    """The operands that a collective sends as they are."""
    return [node.inputs[i] for i in buffers_of(node, adds).lent]


def collective_extra_bytes(node: Node, adds: bool) -> tuple[int, int]:
    """Bytes that a collective holds besides operands and results, if results are counted from its start on: in flight,
    and how many more as they are made.
    """
    buffers, results = buffers_of(node, adds), sum(value.type.bytes for value in node.outputs)
    in_flight = buffers.sent + max(results, buffers.received)
    at_end = buffers.received + (0 if buffers.in_place else buffers.made or results) + buffers.adding
    return in_flight - results, max(0, at_end - in_flight)


def posted(node: Node, adds: bool) -> CollectiveLifetime:
    """A collective as what it does to memory."""
    buffers = buffers_of(node, adds)
    sent, received = buffer("sent", node, buffers.sent), buffer("received", node, buffers.received)
    output = received if buffers.in_place else buffer("made", node, buffers.made) if buffers.made else None
    results = node.outputs if output is None else () if buffers.in_place else (output,)
    operands = [node.inputs[i] for i in buffers.lent]
    flight = (sent, received, *operands)
    return CollectiveLifetime(
        evolve(node, outputs=(sent, received)),
        (
            evolve(node, inputs=flight, outputs=()),
            evolve(
                node,
                inputs=(received, *(operands if adds else ())),
                outputs=(*results, buffer("adding", node, buffers.adding)),
            ),
        ),
        flight,
        {} if output is None else dict.fromkeys(node.outputs, output),
    )


def buffer(name: str, node: Node, size: int) -> Value:
    """So many bytes of a collective, as a value."""
    return Value(f"{name} of {node.outputs[0].name}", Type("bool", (Axis("bytes", size),)))


def expanded(runs: Runs, flights: Mapping[Node, CollectiveLifetime]) -> list[list[list[Node]]]:
    """Runs of a function, with what its collectives do to memory: a run waits for its own where it first reads a
    result, or where it ends.
    """
    expanded_runs = []
    for run in runs:
        flying: dict[Value, CollectiveLifetime] = {}
        units: list[list[Node]] = []
        for unit in run:
            units += ([each] for node in unit for each in arriving(flying, node.inputs))
            if unit[0] in flights:
                (node,) = unit
                units.append([flights[node].start])
                flying.update(dict.fromkeys(node.outputs, flights[node]))
            else:
                units.append(list(unit))
        units += ([each] for each in arriving(flying, list(flying)))
        expanded_runs.append(units)
    return expanded_runs


def arriving(flying: dict[Value, CollectiveLifetime], values: Iterable[Value]) -> Iterator[Node]:
    """The ends of those collectives that make values, which do not fly any more."""
    for value in values:
        each = flying.get(value)
        if each is not None:
            for other in [other for other, own in flying.items() if own is each]:
                del flying[other]
            yield from each.end


def memory_behind(nodes: Iterable[Node], flights: Mapping[Node, CollectiveLifetime]) -> dict[Value, Value]:
    """For each value that has no memory of its own, the tensor whose it is: a view's, or a collective's."""
    behind = {value: tensor for each in flights.values() for value, tensor in each.behind.items()}
    for view, tensor in roots(nodes).items():
        behind[view] = behind.get(tensor, tensor)
    return behind


def communicating(
    nodes: Sequence[Node],
    adds: bool,
    outputs: Iterable[Value] = (),
    begun: Iterable[tuple[Node, CollectiveLifetime]] = (),
) -> Communicating:
    """The nodes of a function, with those of its collectives: `begun` are those that others have started. It waits for
    `outputs` values at its end.
    """
    flying: dict[Value, CollectiveLifetime] = {}
    flights: dict[Node, CollectiveLifetime] = {}
    function = Communicating([])

    def fly(node: Node, each: CollectiveLifetime) -> None:
        flying.update(dict.fromkeys(node.outputs, each))
        flights[node] = each

    for node, each in begun:
        fly(node, each)
        function.begun.update(each.flight)
    for node in nodes:
        function.nodes += arriving(flying, node.inputs)
        if isinstance(node.op, Collective):
            own = posted(node, adds)
            function.nodes.append(own.start)
            fly(node, own)
        else:
            function.nodes.append(node)
    function.nodes += arriving(flying, outputs)
    function.behind = memory_behind(nodes, flights)
    return function
