"""Layer norm and RMS norm without scale and shift, which are pointwise.

The gradients of a norm that has a scale, and of a layer norm that has a shift as well, come from one operation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar

from partita.compiler.layout import SUM
from partita.compiler.ops.op import (
    Argument,
    Op,
    ShardingRule,
    accumulation,
    agree,
    aligned_rules,
    broadcast,
    fields_of_several,
    op,
    permuted,
    wide_bytes,
    widening_bytes,
)
from partita.compiler.ops.pointwise import added, cast, constant, pointwise
from partita.compiler.ops.reduce import scaled, total
from partita.compiler.ops.shape import arranged
from partita.compiler.ops.traits import CachesTable, Summing
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


def _positions(type: Type, over: Sequence[str]) -> tuple[int, ...]:
    """Their dimensions, counted from the last (−1), in ascending order."""
    return tuple(sorted(type.position(name) - len(type.axes) for name in over))


def _means(build: Builder, over: Sequence[str], *values: Value) -> list[Value]:
    """Means of values with the same axes; their sums are adjacent, so that they can be bucketed."""
    sums = [total(build, value, over, value.type.dtype) for value in values]
    count = values[0].type.elements // sums[0].type.elements
    return [scaled(build, value, 1 / count) for value in sums]


def _split_gradient(build: Builder, over: Sequence[str], center: bool, d: Value, y: Value, rate: Value) -> Value:
    """The gradient of a normalized tensor `y` from primitives that can be sharded along the axes `over`."""
    wide_d = arranged(build, cast(build, d, rate.type.dtype), y.type.names)
    wide_y = cast(build, y, rate.type.dtype)
    product = pointwise(build, "multiply", wide_d, wide_y)
    mean, *means = _means(build, over, product, *([wide_d] if center else []))
    rest = pointwise(build, "subtract", wide_d, pointwise(build, "multiply", wide_y, mean))
    for other in means:
        rest = pointwise(build, "subtract", rest, other)
    return cast(build, pointwise(build, "multiply", rest, rate), y.type.dtype)


def _means_and_rates(rate: Type) -> tuple[Hashable, int]:
    """Constant means and rates, as arguments of torch's layer norm gradient."""
    return (rate.dtype, *rate.shape, 1), 2 * rate.bytes


@op("normalize")
class Normalize(CachesTable):
    """`x * rate`, with rate = 1/sqrt(mean(x²) + eps) over the axes `over`; with `center`, x minus its mean.

    Results: the normalized tensor and the rate, which the gradient needs. Computes in f32 at least.
    """

    over: tuple[str, ...]
    eps: float
    center: bool
    results = ("", "rate")
    orderless = True

    @property
    def label(self) -> str:
        """`layer_norm` or `rms_norm`."""
        return "layer_norm" if self.center else "rms_norm"

    @property
    def reduces(self) -> tuple[str, ...]:
        """`over`."""
        return self.over

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """Constant scale and shift, as arguments of torch's layer norm."""
        (x,) = operands
        shape = tuple(x.axis(name).size for name in self.over)
        return ((x.dtype, *shape), 2 * prod(shape) * x.bytes // x.elements) if self.center else None

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """x, and x without the axes `over`."""
        (x,) = types
        return x, x.without(self.over).with_dtype(accumulation(x.dtype))

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis not normalized over."""
        return aligned_rules(operands, results)

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """Along an axis normalized over: means from partial sums."""
        if axis not in self.over:
            return None
        (x,) = node.inputs
        wide = cast(build, x, accumulation(x.type.dtype))
        if self.center:
            (mean,) = _means(build, self.over, wide)
            wide = pointwise(build, "subtract", wide, mean)
        (square,) = _means(build, self.over, pointwise(build, "multiply", wide, wide))
        rate = pointwise(build, "rsqrt", pointwise(build, "add", square, constant(build, self.eps, square)))
        return cast(build, pointwise(build, "multiply", wide, rate), x.type.dtype), rate

    @property
    def keeps_zeros(self) -> bool:
        """If the rate is finite."""
        return self.eps > 0

    @property
    def is_finite(self) -> bool:
        """If the rate is."""
        return self.eps > 0

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two passes."""
        return 7 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The centered tensor and its squares."""
        return 2 * wide_bytes(operands[0])

    def gradients(self, build: Builder, node: Node, d: Sequence[Value | None]) -> tuple[Value | None, ...]:
        """From the results alone; x need not be kept. The rate, which gradients read, has the gradient -rate²·y/n."""
        parts, (y, rate) = [], node.outputs
        if d[0] is not None:
            parts.append(build.apply(NormalizeGradient(self.over, self.center), d[0], y, rate))
        if d[1] is not None:
            slope = pointwise(build, "multiply", pointwise(build, "multiply", rate, rate), d[1])
            slope = scaled(build, slope, -rate.type.elements / y.type.elements)
            parts.append(pointwise(build, "multiply", y, cast(build, slope, y.type.dtype)))
        return (added(build, parts),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (x,) = arguments
        return f"kernels.normalize({x.text}, {_positions(x.type, self.over)}, {self.eps}, {self.center})"


def _in_passing(type: Type) -> int:
    """Bytes of temporaries of a gradient: a product, and operands of 16 bits in 32."""
    return wide_bytes(type) + 2 * widening_bytes(type)


@op("normalize_gradient")
class NormalizeGradient(CachesTable, Summing):
    """`rate * (d - mean(d·y)·y)`, with `center` also minus mean(d); y is the normalized tensor."""

    over: tuple[str, ...]
    center: bool

    @property
    def reduces(self) -> tuple[str, ...]:
        """`over`."""
        return self.over

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """For torch's gradient of a layer norm, or of an RMS norm on a GPU."""
        return _means_and_rates(operands[2])

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of the normalized tensor."""
        assert agree(*types), (self, types)
        return (types[1],)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis not normalized over; linear in d."""
        return (*aligned_rules(operands, results, whole=self.over), ShardingRule((SUM, None, None), (SUM,)))

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """Along an axis normalized over: means from partial sums."""
        return (_split_gradient(build, self.over, self.center, *node.inputs),) if axis in self.over else None

    def formula(self, build: Builder, node: Node) -> tuple[Value, ...] | None:
        """Of means."""
        return (_split_gradient(build, self.over, self.center, *node.inputs),)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two passes."""
        return 8 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The product with d; in 16 bits also d and y in 32."""
        return _in_passing(operands[0])

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.normalize_gradient({self._call(arguments)})"

    def emit_sum(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Adds in the kernel's last pass."""
        return f"kernels.normalize_gradient({self._call(arguments)}, plus={other.text})"

    def _call(self, arguments: Sequence[Argument]) -> str:
        d, y, rate = arguments
        turned = permuted(d.text, d.type.names, y.type.names)
        return f"{turned}, {y.text}, {rate.text}, {_positions(y.type, self.over)}, {self.center}"


@fields_of_several
class ScaledNormGradient(CachesTable, Summing):
    """Gradients of a scaled norm's input and parameters at once, by the kernel of the operation's name.

    Operands: d, the normalized tensor, its rate, the scale. Made by `passes.fuse`.
    """

    over: tuple[str, ...]

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """As of `NormalizeGradient`."""
        return _means_and_rates(operands[2])

    def vmapped(self, axis: Axis) -> Op | None:
        """It has one scale for all positions."""
        return None

    @property
    def reduces(self) -> tuple[str, ...]:
        """`over`."""
        return self.over

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.{self.name}({self._call(arguments)})"

    def emit_sum(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Adds in the kernel's last pass."""
        return f"kernels.{self.name}({self._call(arguments)}, plus={other.text})"

    def _call(self, arguments: Sequence[Argument]) -> str:
        d, y, rate, scale = arguments
        turned = permuted(d.text, d.type.names, y.type.names)
        by = broadcast(scale, y.type.names)
        return f"{turned}, {y.text}, {rate.text}, {by}, {_positions(y.type, self.over)}"

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Products of d with the scale and with the normalized tensor; in 16 bits also both in 32."""
        return _in_passing(operands[0]) + operands[0].bytes


@op("layer_norm_gradient")
class LayerNormGradient(ScaledNormGradient):
    """Gradients of a layer norm's input, scale and shift, from the cotangent of the scaled and shifted result."""

    results = ("", "scale", "shift")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of the normalized tensor, and twice its axes `over`."""
        assert agree(*types), (self, types)
        y = types[1]
        scale = Type(y.dtype, tuple(axis for axis in y.axes if axis.name in self.over))
        return y, scale, scale

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis not normalized over, which makes the scale's and shift's gradients partial; linear in d."""
        aligned = tuple(ShardingRule((name, name, name, None), (name, SUM, SUM)) for name in operands[2].names)
        return (*aligned, ShardingRule((SUM, None, None, None), (SUM, SUM, SUM)))

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """Along an axis normalized over: the input's gradient as in `NormalizeGradient.split`, and two sums."""
        if axis not in self.over:
            return None
        d, y, rate, scale = node.inputs
        d = arranged(build, d, y.type.names)
        gradient = _split_gradient(build, self.over, True, pointwise(build, "multiply", d, scale), y, rate)
        product = pointwise(build, "multiply", d, y)
        return gradient, *(total(build, value, rate.type.names, y.type.dtype) for value in (product, d))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Those of the operations that it replaces."""
        return 12 * operands[0].elements


@op("rms_norm_gradient")
class RmsNormGradient(ScaledNormGradient):
    """Gradients of an RMS norm's input and scale, from the cotangent of the scaled result."""

    results = ("", "scale")
    center: ClassVar = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of the normalized tensor, and its axes `over`."""
        assert agree(*types), (self, types)
        y = types[1]
        return y, Type(y.dtype, tuple(axis for axis in y.axes if axis.name in self.over))

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis not normalized over, which makes the scale's gradient partial; linear in d."""
        aligned = tuple(ShardingRule((name, name, name, None), (name, SUM)) for name in operands[2].names)
        return (*aligned, ShardingRule((SUM, None, None, None), (SUM, SUM)))

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """Along an axis normalized over: the input's gradient as in `NormalizeGradient.split`, and a sum."""
        if axis not in self.over:
            return None
        d, y, rate, scale = node.inputs
        d = arranged(build, d, y.type.names)
        gradient = _split_gradient(build, self.over, self.center, pointwise(build, "multiply", d, scale), y, rate)
        return gradient, total(build, pointwise(build, "multiply", d, y), rate.type.names, y.type.dtype)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Those of the operations that it replaces."""
        return 11 * operands[0].elements


@op("layer_norm_scale_gradient")
class LayerNormScaleGradient(RmsNormGradient):
    """Gradients of the input and scale of a layer norm without a shift, from the cotangent of the scaled result."""

    center: ClassVar = True
