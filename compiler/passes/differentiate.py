"""Graph → joint graph: gradients of the loss for every parameter, on one device, over the full batch.

Reverse-mode differentiation. Every backward node has the scope and span of its forward node. The contributions to a
parameter's gradient, one for each use, are not added here but in its accumulators, one for each stage, so that tied
parameters need no special treatment.

A rule may say by which of several losses its parameters have their gradients: each of these has a backward pass of its
own.

Frozen parameters are not differentiated, and neither is what depends on no other ones.

A backward node is BACKWARD if the cotangent of some activation (a forward value that depends on data) needs it, and
WEIGHT if only gradients of parameters do. Inputs of the model are not differentiated, even on the first stage.
"""

from __future__ import annotations

from attrs import evolve

from partita.compiler.graph import Builder, Gradient, Graph, Node, Parameter, Phase, Value
from partita.compiler.ops.pointwise import Constant, constant, pointwise
from partita.compiler.reverse import Parts, dependent, reverse
from partita.dsl.diagnostic import Diagnostic, Refused


def differentiate(graph: Graph) -> Graph:
    """Append the backward pass.

    A parameter that reaches the loss only in some iterations or calls has zero gradients in the others. Raises Refused
    (E0408) if it never does.
    """
    activations = _data_dependent(graph)
    names = [value.name for node in graph.nodes for value in node.outputs]
    build = Builder([*names, *(p.name for p in graph.parameters), *(i.value.name for i in graph.inputs)])
    build.phase = Phase.BACKWARD
    build.literals = {node.output: node.op.literal for node in graph.nodes if node.op.literal is not None}
    contributions: Parts = {}
    marked: set[Value] = set()
    renamed: dict[Value, Value] = {}

    def cotangent_of(value: Value, structural_key: Value) -> Value:
        """The value `unnamed`, renamed as the cotangent of `value`."""
        return Value(build.unique(f"d({value.name})"), structural_key.type, of=value.tensor, cotangent=True)

    def cotangent(value: Value, producer: Node) -> Value | None:
        """The sum of a value's contributions, in the order in which they were made.

        Those of one stage are added on that stage, so that one cotangent is sent for each value that was sent.
        """
        parts = contributions.pop(value, [])
        build.at(producer)
        if not parts:
            return None
        by_stage: dict[int | None, list[tuple[Value, Node]]] = {}
        for part, reader in parts:
            by_stage.setdefault(reader.stage, []).append((part, reader))
        sums = []
        for own in by_stage.values():
            result = own[0][0]
            for part, reader in own[1:]:
                result = pointwise(build.at(reader), "add", result, part)
            sums.append(result)
        build.at(producer)
        result = sums[0]
        for part in sums[1:]:
            result = pointwise(build, "add", result, part)
        if result not in renamed:
            renamed[result] = cotangent_of(value, result)
        if value in activations:
            marked.add(result)
        return result

    producers = graph.producers()
    trained = [p for p in graph.parameters if p.trained]
    losses: dict[str | None, Value] = {None: graph.loss, **dict(graph.metrics)}
    for name in dict.fromkeys(parameter.loss for parameter in trained):
        loss = losses[name]
        if loss in producers:
            seed = build.at(producers[loss]).apply(Constant(1.0, loss.type.dtype))
            contributions[loss] = [(seed, producers[loss])]
        own = dependent(graph.nodes, (each.value for each in trained if each.loss == name))
        reverse(build, graph.nodes, contributions, own, cotangent)

    missing = [p for p in trained if not contributions.get(p.value)]
    declared = {p.span for p in trained if contributions.get(p.value)}
    lost = [p for p in missing if p.span not in declared]
    if lost:
        raise Refused(
            Diagnostic(
                "E0408",
                f"parameter `{parameter.name}` does not reach {_loss_of(parameter)} with a gradient",
                parameter.span,
                help="use it, remove it, or freeze it" + ("; or another loss after `by`" if parameter.loss else ""),
            )
            for parameter in lost
        )
    for parameter in missing:
        reader = next((node for node in graph.nodes if parameter.value in node.inputs), graph.nodes[-1])
        nothing = constant(build.at(reader), 0.0, parameter.value)
        zeros = pointwise(build, "multiply", parameter.value, nothing)
        contributions[parameter.value] = [(zeros, reader)]
    gradients_out: list[Gradient] = []
    for parameter in trained:
        for d, reader in contributions[parameter.value]:
            if d not in renamed:
                renamed[d] = cotangent_of(parameter.value, d)
            gradients_out.append(Gradient(parameter.name, d, reader.stage))
    joint = evolve(graph, nodes=graph.nodes + tuple(build.nodes), gradients=tuple(gradients_out))
    return _renamed(_phased(without_dead(joint), marked), renamed)


def _loss_of(parameter: Parameter) -> str:
    return "the loss" if parameter.loss is None else f"the loss `{parameter.loss}`"


def _data_dependent(graph: Graph) -> set[Value]:
    """Values that depend on the model's inputs or on random numbers."""
    found = {each.value for each in graph.inputs}
    for node in graph.nodes:
        if node.op.random or any(value in found for value in node.inputs):
            found.update(node.outputs)
    return found


def without_dead(graph: Graph) -> Graph:
    """The graph without nodes that no output needs. Nodes without results (accumulations) are kept."""
    alive = set(graph.outputs())
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not node.outputs or any(value in alive for value in node.outputs):
            kept.append(node)
            alive.update(node.inputs)
    return evolve(graph, nodes=tuple(reversed(kept)))


def _phased(graph: Graph, marked: set[Value]) -> Graph:
    """Separate B from W: B is what the cotangents of activations (`marked`) depend on."""
    needed = set(marked)
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if node.phase is Phase.BACKWARD:
            if any(value in needed for value in node.outputs):
                needed.update(node.inputs)
            else:
                node = node.changed(phase=Phase.WEIGHT)
        nodes.append(node)
    return evolve(graph, nodes=tuple(reversed(nodes)))


def _renamed(graph: Graph, renamed: dict[Value, Value]) -> Graph:
    """The graph with values replaced by others of the same type."""

    def new(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(renamed.get(value, value) for value in values)

    return evolve(
        graph,
        nodes=tuple(n.changed(inputs=new(n.inputs), outputs=new(n.outputs)) for n in graph.nodes),
        gradients=tuple(evolve(g, value=renamed.get(g.value, g.value)) for g in graph.gradients),
    )
