"""Joint graph → joint graph: one operation for the gradients of an RMS norm with a scale, or of a layer norm with a
scale and perhaps a shift.

The gradients of its input, scale and shift all read the cotangent and the normalized tensor, and torch computes them in
one pass. The operation belongs to B even if the sums over the batch alone would not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from partita.compiler.graph import Graph, Node, Value, outputs_of, readers_of
from partita.compiler.ops.normalize import (
    LayerNormGradient,
    LayerNormScaleGradient,
    NormalizeGradient,
    RmsNormGradient,
)
from partita.compiler.ops.op import Op
from partita.compiler.ops.pointwise import Pointwise
from partita.compiler.ops.reduce import Reduce

MULTIPLY = Pointwise("multiply")


def fuse(graph: Graph) -> Graph:
    """Replace each group by one operation."""
    producers = graph.producers()
    readers = readers_of(graph.nodes)
    outputs = set(graph.outputs())
    instead: dict[Node, Node | None] = {}  # None: the fused operation covers it
    for node in graph.nodes:
        if isinstance(node.op, NormalizeGradient):
            parts = _parts(node, node.op, producers, readers)
            inner = outputs_of(parts[:2])
            if parts and inner.isdisjoint(outputs):
                scaled, _, *sums = parts
                d, scale = scaled.inputs
                results = (node.output, *(each.output for each in sums))
                centered = LayerNormGradient if len(sums) > 1 else LayerNormScaleGradient
                op = (centered if node.op.center else RmsNormGradient)(node.op.over)
                if op.infer(d.type, *(v.type for v in (*node.inputs[1:], scale))) == tuple(v.type for v in results):
                    instead |= dict.fromkeys(parts)
                    instead[node] = evolve(node, op=op, inputs=(d, *node.inputs[1:], scale), outputs=results)
    replaced = (instead.get(node, node) for node in graph.nodes)
    return evolve(graph, nodes=tuple(node for node in replaced if node is not None))


def _parts(
    gradient: Node, op: NormalizeGradient, producers: Mapping[Value, Node], readers: Mapping[Value, Sequence[Node]]
) -> tuple[Node, ...]:
    """The nodes of a group: the cotangent times scale, and times the normalized tensor; the gradients of scale and of
    shift, if there is one. Or none.
    """
    scaled = producers.get(gradient.inputs[0])
    if scaled is None or scaled.op != MULTIPLY or len(readers[scaled.output]) > 1:
        return ()
    d, scale = scaled.inputs
    y = gradient.inputs[1]
    if set(scale.type.names) != set(op.over) or len({v.type.dtype for v in (d, y, scale)}) > 1:
        return ()

    def sole(value: Value, op: Op, *others: Value) -> Node | None:
        """The only node that applies `op` to these operands, if it is on the gradient's stage."""
        matches = [node for node in readers.get(value, ()) if node.op == op and node.inputs == (value, *others)]
        return matches[0] if len(matches) == 1 and matches[0].stage == gradient.stage else None

    rest = tuple(name for name in d.type.names if not scale.type.has(name))
    sums = Reduce("sum", rest, scale.type.dtype)
    product = sole(d, MULTIPLY, y)
    if product is None or len(readers.get(product.output, ())) > 1:
        return ()
    of_scale, of_shift = (sole(each, sums) for each in (product.output, d))
    if of_scale is None or readers.get(of_scale.output):
        return ()
    if of_shift is None or readers.get(of_shift.output) or not op.center:
        return scaled, product, of_scale
    return scaled, product, of_scale, of_shift
