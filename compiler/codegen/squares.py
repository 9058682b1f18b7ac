"""Norms by one call: squares of many tensors, added one after the other, become one operation."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import evolve, frozen

from partita.compiler.codegen.sums import ADD, read_once
from partita.compiler.graph import Node, Value
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Argument, Op
from partita.compiler.ops.pointwise import Cast
from partita.dsl.types import Type

WIDE = Cast("f64")


@frozen
class SumOfSquares(Op):
    """Of all elements of its operands, in f64. It exists in emitted functions alone."""

    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """One number."""
        return (Type("f64", ()),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.sum_of_squares([{', '.join(argument.text for argument in arguments)}])"


def with_sums_of_squares(nodes: Sequence[Node], keep: Collection[Value]) -> Sequence[Node]:
    """The nodes, with one in place of each sum of squares of several tensors of f32; `keep` outlives them.

    A square in f32 that is added in f64 is that of all products of a tensor's elements with themselves.
    """
    if not any(_squared(node) for node in nodes):  # of most functions
        return nodes
    once = read_once(nodes, keep)
    replaced: set[Node] = set()
    sums: dict[Node, Node] = {}

    def square(value: Value) -> tuple[Node, Node] | None:
        """The nodes that square a tensor, and make it wide."""
        wide = once.get(value)
        if wide is None or wide.op != WIDE:
            return None
        dot = once.get(wide.inputs[0])
        return (dot, wide) if dot is not None and _squared(dot) else None

    for node in reversed(nodes):
        if node in replaced or node.op != ADD:
            continue
        covered: list[Node] = []
        operands: list[Value] = []
        last: Node | None = node
        while last is not None and last.op == ADD:
            right = square(last.inputs[1])
            if right is None:
                break
            covered += [last, *right]
            operands.append(right[0].inputs[0])
            left = square(last.inputs[0])
            if left is not None:
                replaced.update(covered, left)
                inputs = (left[0].inputs[0], *reversed(operands))
                sums[node] = evolve(node, op=SumOfSquares(), inputs=inputs)
                break
            last = once.get(last.inputs[0])
    return [sums.get(node, node) for node in nodes if node in sums or node not in replaced]


def _squared(node: Node) -> bool:
    """Whether a node makes the sum of the squares of all elements of a tensor of f32."""
    if len(node.inputs) != 2 or node.inputs[0] is not node.inputs[1]:
        return False
    type = node.inputs[0].type
    return bool(type.axes) and type.dtype == "f32" and node.op == Dot(type.names)
