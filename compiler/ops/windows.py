"""What looks at an image through sliding windows, and the patches that it sees there.

A window slides along the `axes` of the image; its positions have the axes `into`, and its elements the axes `size`.
`stride`, `padding` (before and after, of what lies outside) and `dilation` are given for each of them.

An axis along which windows slide is whole on each rank, unless windows neither overlap nor begin outside: then each
part of the image has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from attrs import evolve

from partita.compiler.layout import SUM
from partita.compiler.ops.decoding import ConcatHistory
from partita.compiler.ops.intervals import Interval, union
from partita.compiler.ops.op import (
    Argument,
    Op,
    ShardingRule,
    agree,
    attributes,
    fields_of_several,
    op,
    permuted,
    wide_bytes,
)
from partita.compiler.ops.traits import Stencil
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@fields_of_several
class Sliding(Stencil):
    """Base of operations with windows."""

    axes: tuple[Axis, ...]
    into: tuple[Axis, ...]
    size: tuple[Axis, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    fusible = False

    def renamed(self, axis: str) -> str:
        """What its results call an axis along which it is continued: that of the positions."""
        return dict(zip(names_of(self.axes), names_of(self.into), strict=True)).get(axis, axis)

    def decode_step(
        self, build: Builder, operands: Sequence[Value], axis: str, state: Callable[[Type], Value]
    ) -> tuple[Value, ...] | None:
        """The windows of a part begin in what is kept of the positions before it, if none sees later ones."""
        image, *others = operands
        if axis not in names_of(self.axes) or any(each.type.has(axis) for each in others):
            return None
        i = names_of(self.axes).index(axis)
        by, part = self.extents[i] - 1, image.type.axis(axis).size
        if self.stride[i] != 1 or self.padding[i] != (by, 0):
            return None
        longer = (
            build.apply(ConcatHistory(axis, by, self.outside), state(image.type.resized(axis, by)), image)
            if by
            else image
        )
        made = self.inside(axis, evolve(self.axes[i], size=part + by), evolve(self.into[i], size=part))
        return (build.apply(made, longer, *others),)

    def reach(self, axis: str) -> tuple[int, int] | None:
        """The padding, if there are as many windows as positions, and zeros outside."""
        if axis not in names_of(self.axes):
            return None
        i = names_of(self.axes).index(axis)
        as_many = self.stride[i] == 1 and self.into[i] == self.axes[i]
        return self.padding[i] if as_many and not self.outside else None

    def inside(self, axis: str, longer: Axis, into: Axis) -> Op:
        """Without padding."""
        changed = {
            name: tuple(
                new if axis == own.name else each for each, own in zip(getattr(self, name), self.axes, strict=True)
            )
            for name, new in (("axes", longer), ("into", into), ("padding", (0, 0)))
        }
        return evolve(self, **changed)  # type: ignore[misc]

    @property
    def outside(self) -> float:
        """What lies outside of the image."""
        return 0.0

    @property
    def window(self) -> dict[str, Any]:
        """The fields that all of them have."""
        return {field.name: getattr(self, field.name) for field in attributes(Sliding)}

    @property
    def extents(self) -> tuple[int, ...]:
        """The elements that a window spans."""
        return tuple(spread * (axis.size - 1) + 1 for axis, spread in zip(self.size, self.dilation, strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        """The sizes of the image's axes with padding."""
        return tuple(axis.size + sum(ends) for axis, ends in zip(self.axes, self.padding, strict=True))

    def fits(self) -> bool:
        """Whether there are as many positions as the sizes say."""
        each = zip(self.padded, self.extents, self.stride, self.into, strict=True)
        return all((padded - extent) // stride + 1 == into.size for padded, extent, stride, into in each)

    @property
    def apart(self) -> tuple[tuple[str, str], ...]:
        """The axes, of the image and of positions, along which windows lie apart, each in its own part of the image."""
        each = zip(self.axes, self.into, self.padding, self.stride, strict=True)
        # As many windows as there are strides: none is longer than a stride.
        return tuple(
            (axis.name, into.name)
            for axis, into, ends, stride in each
            if ends == (0, 0) and axis.size == stride * into.size
        )

    def padded_bytes(self, image: Type) -> int:
        """Bytes of the image with padding; none without."""
        if self.padded == sizes_of(self.axes):
            return 0
        return image.bytes // prod(sizes_of(self.axes)) * prod(self.padded)

    def sliding(self) -> str:
        """The arguments of kernels that say how windows slide."""
        return f"{self.stride}, {self.padding}, {self.dilation}"


def sizes_of(axes: Sequence[Axis]) -> tuple[int, ...]:
    """Their sizes."""
    return tuple(axis.size for axis in axes)


def names_of(axes: Sequence[Axis]) -> tuple[str, ...]:
    """Their names."""
    return tuple(axis.name for axis in axes)


@op("patches")
class Patches(Sliding):
    """The windows of an image: their positions in place of the axes slid along, then their elements."""

    fill: float = 0.0

    @property
    def outside(self) -> float:
        """The fill."""
        return self.fill

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The positions in place of the axes slid along, then the elements."""
        (x,) = types
        assert self.fits(), self
        assert agree(x, Type(x.dtype, self.axes)), (self, x)
        into = dict(zip(names_of(self.axes), self.into, strict=True))
        return (Type(x.dtype, (*(into.get(axis.name, axis) for axis in x.axes), *self.size)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but those slid along, unless windows lie apart; linear if what lies outside is zero."""
        slid = names_of(self.axes)
        others = (ShardingRule((name,), (name,)) for name in operands[0].names if name not in slid)
        apart = (ShardingRule((name,), (into,)) for name, into in self.apart)
        return (*others, *apart, *(() if self.fill else (ShardingRule((SUM,), (SUM,)),)))

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """The image's, and what lies outside."""
        return union((operands[0], (self.fill, self.fill)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The image with padding."""
        return self.padded_bytes(operands[0])

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Adds up what the windows say of each element."""
        return (build.apply(Fold(**self.window), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (x,) = arguments
        dims = tuple(x.type.position(axis.name) for axis in self.axes)
        return f"kernels.patches({x.text}, {dims}, {sizes_of(self.size)}, {self.sliding()}, {self.fill!r})"


@op("fold")
class Fold(Sliding):
    """The gradient of `patches`: for each element of the image the sum over the windows that have it."""

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes slid along in place of positions, without the elements."""
        (d,) = types
        assert self.fits(), self
        assert agree(d, Type(d.dtype, self.into), Type(d.dtype, self.size)), (self, d)
        back = dict(zip(names_of(self.into), self.axes, strict=True))
        rest = d.without(names_of(self.size))
        return (Type(d.dtype, tuple(back.get(axis.name, axis) for axis in rest.axes)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but those of windows, unless they lie apart; linear."""
        whole = (*names_of(self.into), *names_of(self.size))
        others = (ShardingRule((name,), (name,)) for name in operands[0].names if name not in whole)
        apart = (ShardingRule((into,), (name,)) for name, into in self.apart)
        return (*others, *apart, ShardingRule((SUM,), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One addition for each element of a window."""
        return operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The sums are made one axis after the other, in the dtype of accumulation; what is spread lies apart."""
        (d,) = operands
        sizes = {axis.name: axis.size for axis in d.axes}
        present = most = d.elements
        for into, size, spread, padded in reversed(
            [*zip(self.into, self.size, self.dilation, self.padded, strict=True)]
        ):
            windows = sizes.pop(size.name)
            if spread > 1:
                apart = prod(sizes.values()) * (spread * (windows - 1) + 1)
                present, most = apart, max(most, present + apart)
            sizes[into.name] = padded
            sums = prod(sizes.values())
            present, most = sums, max(most, present + sums)
        return most * wide_bytes(d) // d.elements

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The patches."""
        return (build.apply(Patches(**self.window), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with the elements of windows last."""
        (d,) = arguments
        rest = d.type.without(names_of(self.size)).names
        text = permuted(d.text, d.type.names, [*rest, *names_of(self.size)])
        dims = tuple(rest.index(axis.name) for axis in self.into)
        return f"kernels.fold({text}, {dims}, {sizes_of(self.axes)}, {self.sliding()})"
