"""Products in eight bits (`precision = fp8`): which ones, before differentiation; and of what they are made, after it.

In eight bits are products of an activation with a parameter, forward and for the activation's gradient; gradients of
parameters stay in bf16, since their sums go over the batch, and scales by row of it would depend on how it is cut. That
is the recipe `rowwise_with_gw_hp` of torchao. Not in eight bits are products whose result goes, through casts, views
and elementwise operations with parameters or numbers alone, into a loss, an output, or an operation that compares or
chooses (softmax, top_k): the output layer and routers. Neither are attention, convolutions, the products of experts,
and what is inside a `scan`.
"""

from __future__ import annotations

from attrs import evolve

from partita.compiler.graph import Builder, Graph, Node, Value
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.experts import TopK
from partita.compiler.ops.float8 import ToFloat8
from partita.compiler.ops.loss import NegativeLogLikelihood
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.reduce import ArgMax, Reduce
from partita.compiler.ops.traits import SameTensor


def in_float8(graph: Graph) -> Graph:
    """The forward graph with its products of eight bits marked."""
    weights = {parameter.value for parameter in graph.parameters}
    constants: set[Value] = set()
    for node in graph.nodes:
        if node.op.literal is not None:
            constants.add(node.output)
        elif _keeps_elements(node) and all(value in weights for value in node.inputs):
            weights.update(node.outputs)
    exact = _exact(graph, weights | constants)
    return evolve(graph, nodes=tuple(_marked(node, weights, exact) for node in graph.nodes))


def _keeps_elements(node: Node) -> bool:
    """Whether a parameter in another form is what it makes of a parameter."""
    return bool(node.inputs) and (isinstance(node.op, SameTensor) or node.op.is_view or node.op.rearranges)


# They compare the elements of their operands, choose among them or add them up: their digits matter.
SENSITIVE = (ArgMax, NegativeLogLikelihood, Reduce, TopK)


def _marked(node: Node, weights: set[Value], exact: set[Value]) -> Node:
    positions = [i for i, value in enumerate(node.inputs) if value in weights]
    if len(positions) != 1 or not exact.isdisjoint(node.outputs):
        return node
    if not isinstance(node.op, Dot):
        return node
    op = node.op.in_float8([value.type for value in node.inputs], positions[0])
    return node if op is None else evolve(node, op=op)


def _exact(graph: Graph, plain: set[Value]) -> set[Value]:
    """The values whose digits matter: those that go into a loss, an output or a choice as they are."""
    exact = {graph.loss, *(value for _, value in graph.asked), *(value for _, value in graph.metrics)}
    for node in reversed(graph.nodes):
        axes = {name for value in (*node.inputs, *node.outputs) for name in value.type.names}
        others = [value for value in node.inputs if value not in plain]
        passes = len(others) == 1 and node.op.elementwise_over(axes) and not exact.isdisjoint(node.outputs)
        if isinstance(node.op, SENSITIVE) or passes:
            exact.update(others)
    return exact


# ---------------------------------------------------------------- what they are made of


def expanded(graph: Graph) -> Graph:
    """The graph, differentiated or not, with marked products made of quantized operands. Each operand is quantized once
    on a stage and in a phase, however many products read it.
    """
    build = Builder(graph.names)
    cache: dict[tuple[object, ...], tuple[Value, Value]] = {}
    for node in graph.nodes:
        quantized = node.op.of_quantized if isinstance(node.op, Dot) else None
        if quantized is None:
            build.nodes.append(node)
            continue
        op, over = quantized
        build.at(node).phase = node.phase
        bits, largest = zip(*(_quantized(build, value, over, node, cache) for value in node.inputs), strict=True)
        build.nodes.append(evolve(node, op=op, inputs=(*bits, *largest)))
    return evolve(graph, nodes=tuple(build.nodes))


def _quantized(
    build: Builder,
    value: Value,
    over: tuple[str, ...],
    node: Node,
    cache: dict[tuple[object, ...], tuple[Value, Value]],
) -> tuple[Value, Value]:
    """An operand in eight bits, and the largest magnitudes of its rows."""
    key = value, frozenset(over), node.stage, node.phase
    if key not in cache:
        sizes = pointwise(build, "abs", value)
        largest = build.derive(Reduce("max", over, value.type.dtype), value, sizes, ending="largest")
        cache[key] = build.derive(ToFloat8(), value, value, largest, ending="float8"), largest
    return cache[key]
