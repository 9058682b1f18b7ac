"""The inverse of small matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Argument, Op, ShardingRule, aligned_rules, op, permuted, wide_bytes
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.position import where_compared
from partita.compiler.ops.shape import Rename, arranged
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@op("inverse")
class Inverse(Op):
    """The inverse of the matrices of two axes: the sum over `rows` of x and the result is 1 where their `columns` are
    the same, and else 0; likewise over `columns`.

    `triangular`: a matrix has ones on its diagonal and zeros above it (at greater columns than rows), which are not
    read.
    """

    rows: str
    columns: str
    triangular: bool = False
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand's type."""
        (x,) = types
        assert x.axis(self.rows).size == x.axis(self.columns).size, (self, x)
        return types

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis."""
        return aligned_rules(operands, results, whole=[self.rows, self.columns])

    @property
    def is_finite(self) -> bool:
        """Matrices need not have one."""
        return False

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two products and sums for each element and column; a third of a half for triangles."""
        return 2 * operands[0].axis(self.rows).size * operands[0].elements // (3 if self.triangular else 1)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The matrices in the dtype of accumulation, factors, and the result before it is turned."""
        return 4 * wide_bytes(operands[0])

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """−yᵀ·d·yᵀ, of the inverse y."""
        (x,), y = node.inputs, node.output
        turned = f"{self.rows}~turned"
        rename = Rename(((self.rows, turned),))
        left = build.apply(Dot((self.columns,)), y, build.apply(rename, d))
        product = pointwise(build, "negate", build.apply(Dot((turned,)), left, build.apply(rename, y)))
        if self.triangular:
            rows, columns = x.type.axis(self.rows), x.type.axis(self.columns)
            below = where_compared(build, "greater", rows, columns, x.type.dtype)
            product = pointwise(build, "multiply", product, below)
        return (arranged(build, product, x.type.names),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (x,) = arguments
        others = [name for name in x.type.names if name not in (self.rows, self.columns)]
        matrices = permuted(x.text, x.type.names, [*others, self.rows, self.columns])
        text = f"kernels.inverse({matrices}, {self.triangular})"
        return permuted(text, [*others, self.columns, self.rows], results[0].names)
