"""Layer normalisation and root-mean-square normalisation, without scale and shift: those are pointwise.

For a layer norm with both there is one operation that makes all three gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.op import (
    Argument,
    Op,
    Way,
    accumulation,
    agree,
    aligned_ways,
    broadcast,
    op,
    permuted,
    wide_bytes,
)
from partita.compiler.ops.pointwise import cast, constant, pointwise
from partita.compiler.ops.reduce import scaled, total
from partita.compiler.ops.shape import arranged
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


def _positions(type: Type, over: Sequence[str]) -> tuple[int, ...]:
    """Of these axes, from the last, which is -1; ascending."""
    return tuple(sorted(type.position(name) - len(type.axes) for name in over))


def _means(build: Builder, over: Sequence[str], *values: Value) -> list[Value]:
    """Means of values of equal axes, whose sums stand side by side, so that they can be reduced together."""
    sums = [total(build, value, over, value.type.dtype) for value in values]
    count = values[0].type.elements // sums[0].type.elements
    return [scaled(build, value, 1 / count) for value in sums]


def _split_gradient(build: Builder, over: Sequence[str], center: bool, d: Value, y: Value, rate: Value) -> Value:
    """The gradient of a normalized tensor `y` by primitives that can be split along the axes `over`."""
    wide_d = arranged(build, cast(build, d, rate.type.dtype), y.type.names)
    wide_y = cast(build, y, rate.type.dtype)
    product = pointwise(build, "multiply", wide_d, wide_y)
    mean, *means = _means(build, over, product, *([wide_d] if center else []))
    rest = pointwise(build, "subtract", wide_d, pointwise(build, "multiply", wide_y, mean))
    for other in means:
        rest = pointwise(build, "subtract", rest, other)
    return cast(build, pointwise(build, "multiply", rest, rate), y.type.dtype)


def _means_and_rates(rate: Type) -> tuple[Hashable, int]:
    """What torch's gradient of a layer norm is given for means and rates."""
    return (rate.dtype, *rate.shape, 1), 2 * rate.bytes


@op("normalize")
class Normalize(Op):
    """`x * rate`, with rate = 1/sqrt(mean(x²) + eps) over the axes `over`; with `center`, x less its mean first.

    Results: the normalized tensor and the rate, which the gradient needs. Computes in f32 at least.
    """

    over: tuple[str, ...]
    eps: float
    center: bool
    results = ("", "rate")

    @property
    def label(self) -> str:
        """`layer_norm` or `rms_norm`."""
        return "layer_norm" if self.center else "rms_norm"

    @property
    def reduces(self) -> tuple[str, ...]:
        """For the means."""
        return self.over

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """What torch's layer norm is given for scale and shift."""
        (x,) = operands
        shape = tuple(x.axis(name).size for name in self.over)
        return ((x.dtype, *shape), 2 * prod(shape) * x.bytes // x.elements) if self.center else None

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """x, and its axes without `over`."""
        (x,) = types
        return x, x.without(self.over).with_dtype(accumulation(x.dtype))

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis but those normalized over."""
        return aligned_ways(operands, results)

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """Along an axis normalized over: means by partial sums."""
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

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two passes."""
        return 7 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The centred tensor and its squares."""
        return 2 * wide_bytes(operands[0])

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """From the results alone: x itself need not be kept."""
        return (build.apply(NormalizeGradient(self.over, self.center), d, *node.outputs),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (x,) = arguments
        return f"kernels.normalize({x.text}, {_positions(x.type, self.over)}, {self.eps}, {self.center})"


@op("normalize_gradient")
class NormalizeGradient(Op):
    """`rate * (d - mean(d·y)·y)`, with `center` less mean(d) too; y is the normalized tensor."""

    over: tuple[str, ...]
    center: bool
    sums = True

    @property
    def reduces(self) -> tuple[str, ...]:
        """For the means."""
        return self.over

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """With `center` that of torch's gradient."""
        return _means_and_rates(operands[2]) if self.center else None

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The normalized tensor's."""
        assert agree(*types), (self, types)
        return (types[1],)

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis but those normalized over; linear in d."""
        return (*aligned_ways(operands, results, whole=self.over), Way((SUM, None, None), (SUM,)))

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """Along an axis normalized over: means by partial sums."""
        return (_split_gradient(build, self.over, self.center, *node.inputs),) if axis in self.over else None

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two passes."""
        return 8 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The product and what is subtracted."""
        return 2 * wide_bytes(operands[0])

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.normalize_gradient({self._call(arguments)})"

    def emit_sum(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """In the kernel's last pass."""
        return f"kernels.normalize_gradient({self._call(arguments)}, plus={other.text})"

    def _call(self, arguments: Sequence[Argument]) -> str:
        d, y, rate = arguments
        turned = permuted(d.text, d.type.names, y.type.names)
        return f"{turned}, {y.text}, {rate.text}, {_positions(y.type, self.over)}, {self.center}"


@op("layer_norm_gradient")
class LayerNormGradient(Op):
    """Gradients of a layer norm's input, scale and shift at once, of the scaled and shifted result's cotangent.

    Operands: d, the normalized tensor, its rate, the scale. Of these `lowering.fuse` makes it.
    """

    over: tuple[str, ...]
    results = ("", "scale", "shift")
    sums = True

    @property
    def reduces(self) -> tuple[str, ...]:
        """For the means."""
        return self.over

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """That of torch's gradient."""
        return _means_and_rates(operands[2])

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The normalized tensor's, and twice its axes `over`."""
        assert agree(*types), (self, types)
        y = types[1]
        scale = Type(y.dtype, tuple(axis for axis in y.axes if axis.name in self.over))
        return y, scale, scale

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis but those normalized over, which makes the sums over it partial; linear in d."""
        kept = tuple(Way((name, name, name, None), (name, SUM, SUM)) for name in operands[2].names)
        return (*kept, Way((SUM, None, None, None), (SUM, SUM, SUM)))

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """Along an axis normalized over: the gradient of the input by its own replacement, and two sums."""
        if axis not in self.over:
            return None
        d, y, rate, scale = node.inputs
        d = arranged(build, d, y.type.names)
        gradient = _split_gradient(build, self.over, True, pointwise(build, "multiply", d, scale), y, rate)
        product = pointwise(build, "multiply", d, y)
        return gradient, *(total(build, value, rate.type.names, y.type.dtype) for value in (product, d))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Those of the parts."""
        return 12 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Products of d with the scale and with the normalized tensor."""
        return 2 * wide_bytes(operands[0])

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.layer_norm_gradient({self._call(arguments)})"

    def emit_sum(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """In the kernel's last pass."""
        return f"kernels.layer_norm_gradient({self._call(arguments)}, plus={other.text})"

    def _call(self, arguments: Sequence[Argument]) -> str:
        d, y, rate, scale = arguments
        turned = permuted(d.text, d.type.names, y.type.names)
        by = broadcast(scale, y.type.names)
        return f"{turned}, {y.text}, {rate.text}, {by}, {_positions(y.type, self.over)}"
