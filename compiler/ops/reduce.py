"""Reductions over named axes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import MAX, SUM
from partita.compiler.ops.intervals import Interval, product
from partita.compiler.ops.op import TORCH_DTYPES, Argument, Op, ShardingRule, agree, op, permuted
from partita.compiler.ops.pointwise import Cast, constant, pointwise
from partita.compiler.ops.position import PLACE, Positioned, Shards, offset_text
from partita.compiler.ops.shape import Expand, arranged
from partita.compiler.ops.traits import PartialReduction
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@op("reduce")
class Reduce(Op):
    """Sum or maximum over the axes `over`, computed in `dtype`."""

    function: str
    over: tuple[str, ...]
    dtype: str
    orderless = True

    @property
    def label(self) -> str:
        """`sum` or `max`."""
        return self.function

    @property
    def reduces(self) -> tuple[str, ...]:
        """`over`."""
        return self.over

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """The operand's for a maximum; for a sum, multiplied by the number of elements added."""
        if self.function == "max":
            return operands[0]
        count = types[0].elements // max(1, result.elements)
        return product((operands[0], (count, count)))

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The remaining axes."""
        (x,) = types
        assert all(x.has(name) for name in self.over), (self.over, x)
        return (x.without(self.over).with_dtype(self.dtype),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any remaining axis; a reduced one, which makes the result partial; partial values of its own kind."""
        partial = SUM if self.function == "sum" else MAX
        aligned = tuple(ShardingRule((name,), (name,)) for name in results[0].names)
        reduced = tuple(ShardingRule((name,), (partial,)) for name in self.over)
        return (*aligned, *reduced, ShardingRule((partial,), (partial,)))

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Unless it reduces over them."""
        return not any(name in rows for name in self.over)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One for each element read."""
        return operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Maxima before they are cast."""
        cast = self.function == "max" and operands[0].dtype != self.dtype
        return results[0].with_dtype(operands[0].dtype).bytes if cast else 0

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """A sum's is broadcast; a maximum's is shared equally among the elements that attain it."""
        (x,) = node.inputs
        if d.type.dtype != x.type.dtype:
            d = build.apply(Cast(x.type.dtype), d)
        if self.function == "max":
            peak = node.output
            if peak.type.dtype != x.type.dtype:
                peak = build.apply(Cast(x.type.dtype), peak)
            hit = build.apply(Cast(x.type.dtype), pointwise(build, "equal", x, peak))
            share = pointwise(build, "divide", d, build.apply(Reduce("sum", self.over, x.type.dtype), hit))
            return (pointwise(build, "multiply", hit, share),)
        axes = tuple(axis for axis in x.type.axes if axis.name in self.over)
        return (arranged(build, build.apply(Expand(axes), d), x.type.names),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`sum` or `amax`."""
        (x,) = arguments
        positions = tuple(x.type.position(name) for name in self.over)
        if not positions:
            return f"{x.text}.to({TORCH_DTYPES[self.dtype]})"
        if self.function == "max":
            text = f"{x.text}.amax({positions})"
            return text if x.type.dtype == self.dtype else f"{text}.to({TORCH_DTYPES[self.dtype]})"
        return f"{x.text}.sum({positions}, dtype={TORCH_DTYPES[self.dtype]})"


@op("argmax")
class ArgMax(PartialReduction):
    """The index along `over` of the greatest element (the first, if there are several)."""

    over: str

    @property
    def reduces(self) -> tuple[str, ...]:
        """`over`."""
        return (self.over,)

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """Indices of the axis."""
        return 0, types[0].axis(self.over).size - 1

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The remaining axes, i64."""
        return (types[0].without([self.over]).with_dtype("i64"),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any remaining axis."""
        return tuple(ShardingRule((name,), (name,)) for name in results[0].names)

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """Along `over`: the maximum, then the first index at which any shard attains it."""
        partial = self.partial_reduce(build, node, axis)
        return None if partial is None else (pointwise(build, "negate", partial[1]),)

    def partial_reduce(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """The maximum of a part, and minus the first index at which it attains it."""
        if axis != self.over:
            return None
        (x,) = node.inputs
        peak = build.apply(Reduce("max", (self.over,), x.type.dtype), x)
        return peak, build.apply(FirstIndex(self.over), x, peak)

    def combine_parts(self, build: Builder, node: Node, parts: Sequence[tuple[Value, ...]]) -> tuple[Value, ...]:
        """The index of the first part with the greatest maximum."""
        peak, first = parts[0]
        for other, index in parts[1:]:
            first = pointwise(build, "where", pointwise(build, "greater", other, peak), index, first)
            peak = pointwise(build, "maximum", peak, other)
        return (pointwise(build, "negate", first),)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One for each element read."""
        return operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`argmax`."""
        (x,) = arguments
        return f"{x.text}.argmax({x.type.position(self.over)})"


@op("first_index")
class FirstIndex(Positioned):
    """Minus the first index along `over` at which x equals `peak`, its maximum; in a shard without it, less than any.

    It is negated so that a maximum over shards yields the first index. Operands: x, and peak with x's other axes.
    """

    over: str
    shards: Shards = ()

    @property
    def begins(self) -> tuple[str, ...]:
        """The axis that is indexed."""
        return (self.over,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The peak's axes, i64."""
        x, peak = types
        assert peak.dtype == x.dtype, types
        assert agree(x, peak), (self, types)
        return (peak.with_dtype("i64"),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any remaining axis; shards of `over`, which make the result a partial maximum."""
        aligned = tuple(ShardingRule((name, name), (name,)) for name in results[0].names)
        return (*aligned, ShardingRule((self.over, None), (MAX,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One for each element read."""
        return operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Where the greatest elements of this shard are."""
        return PLACE * results[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with `over` last."""
        x, peak = arguments
        view = permuted(x.text, x.type.names, [*peak.type.names, self.over])
        return f"kernels.first_index({view}, {peak.text}, {offset_text(x.type.axis(self.over), self.shards)})"


def total(build: Builder, value: Value, over: Sequence[str], dtype: str, name: str | None = None) -> Value:
    """The sum over `over`."""
    return build.apply(Reduce("sum", tuple(over), dtype), value, name=name)


def scaled(build: Builder, value: Value, factor: float, name: str | None = None) -> Value:
    """The value times a literal."""
    return pointwise(build, "multiply", value, constant(build, factor, value), name=name)
