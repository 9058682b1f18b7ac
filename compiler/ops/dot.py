"""Sums of products over named axes: all matrix products of the graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.op import (
    Argument,
    Kernel,
    Op,
    ShardingRule,
    accumulation,
    agree,
    broadcast,
    copied_bytes,
    make,
    op,
    permuted,
    shape_text,
)
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.traits import Adding, DenseOperands, ReadsWeights, Summing
from partita.dsl.types import Axis, Type

# FLOPs from which a product goes through `kernels.matmul`, which chooses a library: below, oneDNN's 12 µs a call
# outweigh its speed. Doubled if the left matrix is transposed in memory, since oneDNN copies it.
LARGE = 1 << 22

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@op("dot")
class Dot(ReadsWeights, Adding, Summing, DenseOperands):
    """`dot(a, b)` sums over the axes `over`, which both have; an axis of both that is not summed is a batch axis.

    The result has a's remaining axes, then those of b that a lacks. `float8` is the position of a parameter, if both
    are to be multiplied in eight bits (`partita.compiler.passes.float8`).
    """

    over: tuple[str, ...]
    float8: int | None = None
    orderless = True
    fusible = False

    def fans(self, type: Type) -> tuple[int, int] | None:
        """The summed elements, and the rest."""
        summed = prod(type.axis(name).size for name in self.over)
        return summed, max(1, type.elements // summed)

    def matrix(self, operands: Sequence[Type], position: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Either operand: `over`, and the axes of both that are not summed."""
        operand, other = operands[position], operands[1 - position]
        return self.over, tuple(name for name in operand.names if other.has(name) and name not in self.over)

    def in_float8(self, operands: Sequence[Type], weight: int) -> Op | None:
        """The operation in eight bits (`partita.compiler.passes.float8`), where the operand at the position `weight` is
        a parameter; None if it is no product of two matrices.
        """
        plan = MatrixPlan(self, operands)
        return Dot(self.over, weight) if self.over and plan.rows and plan.columns and not plan.batch else None

    @property
    def of_quantized(self) -> tuple[Op, tuple[str, ...]] | None:
        """If it is to be in eight bits: the operation on operands that are quantized, which are followed by the largest
        magnitudes of their rows, and the axes of a row: what is summed over.
        """
        return None if self.float8 is None else (make("float8_dot", self.over), self.over)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """a's remaining axes, then b's."""
        a, b = types
        assert all(a.has(name) and b.has(name) for name in self.over), (self.over, a, b)
        assert a.dtype == b.dtype, (a, b)
        assert agree(a, b), (a, b)
        rest = tuple(axis for axis in b.axes if not a.has(axis.name))
        return (Type(a.dtype, a.without(self.over).axes + rest),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the result; a summed axis, which makes the result partial; linear in either operand."""
        a, b = operands
        aligned = tuple(
            ShardingRule((name if a.has(name) else None, name if b.has(name) else None), (name,))
            for name in results[0].names
        )
        summed = tuple(ShardingRule((name, name), (SUM,)) for name in self.over)
        return (*aligned, *summed, ShardingRule((SUM, None), (SUM,)), ShardingRule((None, SUM), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A multiplication and an addition for each product."""
        return 2 * prod(operands[0].axis(name).size for name in self.over) * results[0].elements

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """None for a product of two vectors, which is a reduction."""
        return MatrixPlan(self, operands).sizes if results[0].axes else None

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By the number of matrices, if batched, and their rows, depth and columns."""
        plan = MatrixPlan(self, operands)
        name = "dot.batched" if plan.batch else "dot.turned" if plan.left_is_turned else "dot"
        sizes = (*plan.sizes[3:], *plan.sizes[:3])
        return Kernel(name, tuple(map(float, sizes)), float(self.flops(operands, results)))

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """oneDNN copies a left matrix that is transposed in memory; and what is no view of a matrix is copied."""
        plan = MatrixPlan(self, operands)
        return plan.copied + (operands[0].bytes if plan.left_is_turned and self._large(plan, results) else 0)

    def workspace_strided(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The same, and copies of operands of which several axes are one of a matrix."""
        plan = MatrixPlan(self, operands)
        return self.workspace(operands, results) - plan.copied + plan.copied_strided

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Two products, each with its operands in the order that yields the right order of axes, if one does."""
        a, b = node.inputs
        weight = None if self.float8 is None else node.inputs[self.float8]
        return _ordered(build, d, b, a.type, weight), _ordered(build, a, d, b.type, weight)

    def to_broadcast(self, operands: Sequence[Type], axis: str) -> tuple[int, ...]:
        """None: operands may have any axes."""
        return ()

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Unless it sums over them."""
        return not any(name in rows for name in self.over)

    def unflattened(self, flat: Collection[str], axes: tuple[Axis, ...]) -> Op | None:
        """A sum over all axes is one: zeros add nothing."""
        return (
            Dot(tuple(axis.name for axis in axes)) if set(self.over) == set(flat) else super().unflattened(flat, axes)
        )

    def total(self, axis: str) -> Dot:
        """The product whose result is the sum of its own over the positions of an axis that both operands have."""
        return Dot((axis, *self.over))

    def views(self, operands: Sequence[Type]) -> Sequence[str]:
        """For each operand of which its source reads only a view, the source that makes this view without a copy
        (`.t()`); "" for other operands. Empty if there are no views.
        """
        plan = MatrixPlan(self, operands)
        return () if plan.batch or not plan.result_axes or not self.over else plan.views()

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.mm` on matrix views; `torch.bmm` with batch axes."""
        plan = MatrixPlan(self, [each.type for each in arguments])
        if not plan.result_axes and not plan.batch:
            order = arguments[0].type.names
            other = permuted(arguments[1].text, arguments[1].type.names, order)
            return f"torch.dot({arguments[0].text}.reshape(-1), {other}.reshape(-1))"
        if not self.over:
            names = results[0].names  # torch.bmm takes several times as long for products without a sum
            return " * ".join(broadcast(each, names) for each in arguments)
        left, right = plan.matrices(arguments)
        large = self._large(plan, results)
        product = f"{'torch.bmm' if plan.batch else 'kernels.matmul' if large else 'torch.mm'}({left}, {right})"
        text = product if plan.flat else f"{product}.view{shape_text(plan.product_shape)}"
        return permuted(text, plan.product_axes, results[0].names)

    def adds_to(self, target: Type, operands: Sequence[Type], result: Type) -> bool:
        """If the order of axes matches; the target may be wider."""
        plan = MatrixPlan(self, operands)
        alike = target.dtype in (result.dtype, accumulation(result.dtype)) and plan.product_axes == target.names
        return alike and not plan.batch and bool(plan.result_axes)

    def emit_added(self, target: Argument, arguments: Sequence[Argument], result: Type) -> str:
        """`addmm_` into the accumulator."""
        plan = MatrixPlan(self, [each.type for each in arguments])
        left, right = plan.matrices(arguments)
        rows, columns = plan.matrix_shape
        total = target.text if plan.flat else f"{target.text}.view({rows}, {columns})"
        if self._large(plan, (result,)) or target.type.dtype != result.dtype:
            return f"kernels.add_matmul({total}, {left}, {right})"
        return f"{total}.addmm_({left}, {right})"

    def emit_sum(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """In place: on CPUs faster than `torch.addmm`, which begins with a copy, and it rounds as `+` does."""
        text = self.emit(arguments, results)
        return f"{text if self.over else f'({text})'}.add_({other.text})"

    def emit_into(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str | None:
        """As `emit_sum`, of a tensor that ends with that: it may become the sum. A kernel of the runtime, for large
        products: GPUs add while they multiply. None for others.
        """
        plan = MatrixPlan(self, [each.type for each in arguments])
        alike = plan.product_axes == results[0].names and self.over and not plan.batch
        if not alike or other.literal or not self._large(plan, results):
            return None
        left, right = plan.matrices(arguments)
        return f"kernels.sum_matmul({other.text}, {left}, {right})"

    def _large(self, plan: MatrixPlan, results: Sequence[Type]) -> bool:
        """Any is in f64: small programs are verified in it, and what large ones do is to be verified."""
        threshold = 0 if plan.a.dtype == "f64" else LARGE * (2 if plan.left_is_turned else 1)
        return self.flops((plan.a, plan.b), results) >= threshold


def _ordered(build: Builder, a: Value, b: Value, target: Type, weight: Value | None = None) -> Value:
    """The product of `a` and `b` with the axes of `target`, summed over all others; in eight bits where one of them is
    the `weight`.
    """
    if not a.type.axes or not b.type.axes:
        return pointwise(build, "multiply", a, b)
    over = tuple(name for name in a.type.names if b.type.has(name) and not target.has(name))
    product = Dot(over)
    if product.infer(a.type, b.type)[0].names != target.names:
        swapped = product.infer(b.type, a.type)[0]
        if swapped.names == target.names:
            a, b = b, a
    position = next((i for i, value in enumerate((a, b)) if value is weight), None)
    return build.apply(Dot(over, position), a, b)


class MatrixPlan:
    """How a dot becomes a matrix product: groups of axes, and views of the operands as matrices."""

    def __init__(self, dot: Dot, operands: Sequence[Type]) -> None:
        self.a, self.b = a, b = operands
        summed = set(dot.over)
        self.batch = tuple(axis for axis in a.axes if b.has(axis.name) and axis.name not in summed)
        shared = {axis.name for axis in self.batch} | summed
        self.rows = tuple(axis for axis in a.axes if axis.name not in shared)
        self.columns = tuple(axis for axis in b.axes if axis.name not in shared)
        # The summed axes in the larger operand's order: if one must be copied, it is the smaller one.
        larger = a if a.elements >= b.elements else b
        self.depth = tuple(axis for axis in larger.axes if axis.name in summed)
        self.result_axes = self.batch + self.rows + self.columns
        self.product_axes = tuple(axis.name for axis in self.result_axes)
        self.product_shape = tuple(axis.size for axis in self.result_axes)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the product."""
        return _size(self.rows), _size(self.columns)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows, depth and columns of the matrices; with batch axes, also their number."""
        rows, columns = self.matrix_shape
        return rows, _size(self.depth), columns, *((_size(self.batch),) if self.batch else ())

    @property
    def flat(self) -> bool:
        """Whether the matrix product is the result without reshaping."""
        return not self.batch and len(self.rows) == len(self.columns) == 1

    @property
    def left_is_turned(self) -> bool:
        """Whether the left operand is a matrix that is transposed in memory."""
        return not self.batch and self._turned(self.a, self.rows, self.depth)

    def views(self) -> tuple[str, str]:
        """For each operand, what views it as its matrix, "" if it must be copied; without batch axes."""
        return self._view(self.a, self.rows, self.depth), self._view(self.b, self.depth, self.columns)

    @property
    def copied(self) -> int:
        """Bytes of copies of operands that are no matrices in memory."""
        return sum(copied_bytes(type, [_names(axes) for axes in groups]) for type, groups in self._groups)

    @property
    def copied_strided(self) -> int:
        """The same if no two axes of an operand follow each other in memory."""
        return sum(
            type.bytes
            for type, groups in self._groups
            if any(sum(axis.size > 1 for axis in axes) > 1 for axes in groups)
        )

    @property
    def _groups(self) -> list[tuple[Type, tuple[tuple[Axis, ...], ...]]]:
        """The operands, and the groups of their axes that are one dimension each."""
        return [
            (self.a, (self.batch, self.rows, self.depth)),
            (self.b, (self.batch, self.depth, self.columns)),
        ]

    def matrices(self, arguments: Sequence[Argument]) -> tuple[str, str]:
        """Texts of both operands as matrices (stacks of matrices with batch axes)."""
        a, b = arguments
        return self._matrix(a, self.rows, self.depth), self._matrix(b, self.depth, self.columns)

    def _view(self, type: Type, first: tuple, second: tuple) -> str:  # type: ignore[type-arg]
        straight = [*(axis.name for axis in first), *(axis.name for axis in second)]
        if self._turned(type, first, second):
            # A view, no copy.
            return ".t()" if len(first) == len(second) == 1 else f"{_reshape(second, first)}.t()"
        if len(first) == len(second) == 1 or list(type.names) != straight:
            return ""
        return _reshape(first, second)

    def _matrix(self, argument: Argument, first: tuple, second: tuple) -> str:  # type: ignore[type-arg]
        names = argument.type.names
        straight = [axis.name for axis in (*self.batch, *first, *second)]
        if self.batch:
            return permuted(argument.text, names, straight) + _reshape(self.batch, first, second)
        if view := self._view(argument.type, first, second):
            return argument.viewed(view)
        text = permuted(argument.text, names, straight)
        return text if len(first) == len(second) == 1 else text + _reshape(first, second)

    def _turned(self, type: Type, first: tuple, second: tuple) -> bool:  # type: ignore[type-arg]
        """Whether the matrix of two groups of axes is transposed in memory."""
        names = type.names
        straight, turned = ([axis.name for axis in axes] for axes in (first + second, second + first))
        return list(names) == turned and turned != straight


def _reshape(*groups: tuple) -> str:  # type: ignore[type-arg]
    """`.reshape(2, 3)`: one axis for each group."""
    return f".reshape{shape_text([_size(axes) for axes in groups])}"


def _names(axes: tuple) -> list[str]:  # type: ignore[type-arg]
    return [axis.name for axis in axes]


def _size(axes: tuple) -> int:  # type: ignore[type-arg]
    return prod(axis.size for axis in axes)
