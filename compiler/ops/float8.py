"""Products in eight bits: what quantizes a tensor, and the product of two quantized ones.

A tensor that is summed over in a product is scaled by *row*: each row of the summed axes has a power of two for which
its largest magnitude just fits into e4m3, the float of four exponent and three fraction bits (OCP, 8-bit Floating Point
Specification). So scaling is exact, and only the rounding to eight bits loses anything. The largest magnitude of a row
is a maximum like any other: where the summed axes are split over ranks it is reduced, so the numbers do not depend on
the layout. Torch's `_scaled_mm` takes such operands on GPUs.

Quantized tensors have the dtype `u8`, as bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from partita.compiler.layout import SUM
from partita.compiler.ops.dot import Dot, MatrixPlan
from partita.compiler.ops.op import (
    TORCH_DTYPES,
    Argument,
    Kernel,
    Op,
    ShardingRule,
    agree,
    aligned_rules,
    broadcast,
    op,
    wide_bytes,
)
from partita.dsl.types import Type

BITS = "u8"


@op("to_float8")
class ToFloat8(Op):
    """x in e4m3, divided by the power of two of its row, whose largest magnitude is the second operand: [rows]."""

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes of x."""
        x, largest = types
        assert all(x.has(name) for name in largest.names), (x, largest)
        assert agree(x, largest), (x, largest)
        return (x.with_dtype(BITS),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis: along those that are summed, all parts of a row have its maximum."""
        return aligned_rules(operands, results)

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Yes."""
        return True

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A division and the rounding."""
        return 2 * results[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The quotients, and the inverse of each scale; or, of few elements, what scales are made of."""
        x, largest = operands
        return max(x.bytes + largest.bytes, 6 * wide_bytes(largest))

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel."""
        x, largest = arguments
        return f"kernels.to_float8({x.text}, {broadcast(largest, x.type.names)})"


@op("float8_dot")
class Float8Dot(Op):
    """`dot(a, b)` over the axes `over` of two tensors in e4m3, whose rows have the largest magnitudes of the third and
    fourth operand; in the dtype of these. There are no batch axes.
    """

    over: tuple[str, ...]
    orderless = True
    fusible = False

    @property
    def label(self) -> str:
        """As any product."""
        return "dot"

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """a's remaining axes, then b's."""
        a, b, of_a, of_b = types
        assert a.dtype == b.dtype == BITS, (a, b)
        assert of_a.dtype == of_b.dtype, (of_a, of_b)
        assert of_a.names == a.without(self.over).names, (a, of_a)
        assert of_b.names == b.without(self.over).names, (b, of_b)
        (result,) = Dot(self.over).infer(a, b)
        assert len(result.axes) == len(of_a.axes) + len(of_b.axes), (a, b)
        return (result.with_dtype(of_a.dtype),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the result; a summed axis, which makes the result partial."""
        of_a = tuple(ShardingRule((axis.name, None, axis.name, None), (axis.name,)) for axis in operands[2].axes)
        of_b = tuple(ShardingRule((None, axis.name, None, axis.name), (axis.name,)) for axis in operands[3].axes)
        summed = tuple(ShardingRule((name, name, None, None), (SUM,)) for name in self.over)
        return (*of_a, *of_b, *summed)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Those of the product."""
        return Dot(self.over).flops(operands[:2], results)

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """Those of the product."""
        return Dot(self.over).matrices(operands[:2], results)

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By rows, depth and columns."""
        sizes = MatrixPlan(Dot(self.over), operands[:2]).sizes
        return Kernel("float8_dot", tuple(map(float, sizes)), float(self.flops(operands, results)))

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Without a kernel for eight bits, both operands and the sums in the dtype of accumulation; with it, copies of
        those that do not lie as it wants them.
        """
        wide = (operands[0], operands[1], results[0])
        return sum(type.elements for type in wide) * (8 if results[0].dtype == "f64" else 4)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel on matrices."""
        a, b, of_a, of_b = arguments
        plan = MatrixPlan(Dot(self.over), (a.type, b.type))
        left, right = plan.matrices((a, b))
        dtype = TORCH_DTYPES[results[0].dtype]
        rows, columns = (f"{each.text}.reshape(-1)" if len(each.type.axes) != 1 else each.text for each in (of_a, of_b))
        text = f"kernels.float8_matmul({left}, {right}, {rows}, {columns}, {dtype})"
        return text if plan.flat else f"{text}.view{tuple(plan.product_shape)}"
