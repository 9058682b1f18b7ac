"""Placed graph → the graph of training or of evaluation: what `where(training(), a, b)` chooses, and nothing else.

Both kinds of steps are placed alike, from one graph with both choices, so that an evaluation finds every parameter and
buffer on the stage that reads it. Evaluation updates no buffers.
"""

from __future__ import annotations

from attrs import evolve

from partita.compiler.graph import Builder, Graph, Value
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.shape import Arrange, Expand
from partita.compiler.passes.buffers import stages_of, with_stages
from partita.compiler.passes.differentiate import without_dead

WHERE, NOT = Pointwise("where"), Pointwise("logical_not")


def of_mode(graph: Graph, training: bool, batch: str) -> Graph:
    """The graph of one kind of step. `batch` is the axis that is split into microbatches."""
    chosen = _chosen(graph)
    if chosen is graph and not any(parameter.buffer for parameter in graph.parameters):
        return graph
    if not training:
        return without_dead(evolve(chosen, updates=()))
    return with_stages(without_dead(chosen), batch, stages_of(graph, batch))


def _chosen(graph: Graph) -> Graph:
    """The graph in which conditions that are known choose their operand."""
    known = {node.output: bool(node.op.literal) for node in graph.nodes if node.op.literal is not None}
    if not any(value.type.dtype == "bool" for value in known):
        return graph
    build = Builder(graph.names)
    for node in graph.nodes:
        if node.op == NOT and node.inputs[0] in known:
            known[node.output] = not known[node.inputs[0]]
        if node.op == WHERE and node.inputs[0] in known:
            build.at(node).phase = node.phase
            value = _widened(build, node.inputs[1 if known[node.inputs[0]] else 2], node.output)
            # Under the name that layout rules may use.
            op = Arrange(node.output.type.names)
            build.nodes.append(evolve(node, op=op, inputs=(value,)))
        else:
            build.nodes.append(node)
    return evolve(graph, nodes=tuple(build.nodes))


def _widened(build: Builder, value: Value, like: Value) -> Value:
    """The value with all axes of another."""
    missing = tuple(axis for axis in like.type.axes if not value.type.has(axis.name))
    return build.apply(Expand(missing), value) if missing else value
