"""What looks at an image through sliding windows: patches, convolution and their gradients.

A window slides along the `axes` of the image; its positions have the axes `into`, and its elements the axes `size`.
`stride`, `padding` (before and after, of what lies outside) and `dilation` are given for each of them. A convolution is
the `dot` of the patches and a kernel, over the channels and the elements of the window, and runs as torch's; its
gradients are computed as torch computes them.

An axis along which windows slide is whole on each rank, unless windows neither overlap nor begin outside: then each
part of the image has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from attrs import frozen

from partita.compiler.layout import SUM
from partita.compiler.ops.intervals import Interval, union
from partita.compiler.ops.op import (
    Argument,
    Kernel,
    Op,
    ShardingRule,
    agree,
    attributes,
    fields_of_several,
    op,
    permuted,
    shape_text,
    wide_bytes,
)
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@fields_of_several
class Sliding(Op):
    """Base of operations with windows."""

    axes: tuple[Axis, ...]
    into: tuple[Axis, ...]
    size: tuple[Axis, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    fusible = False

    def at_positions(self, axis: Axis) -> Op | None:
        """It is applied at one position of a loop after the other."""
        return None

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
        return all((room - extent) // stride + 1 == into.size for room, extent, stride, into in each)

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
        if self.padded == _sizes(self.axes):
            return 0
        return image.bytes // prod(_sizes(self.axes)) * prod(self.padded)

    def sliding(self) -> str:
        """The arguments of kernels that say how windows slide."""
        return f"{self.stride}, {self.padding}, {self.dilation}"


def _sizes(axes: Sequence[Axis]) -> tuple[int, ...]:
    return tuple(axis.size for axis in axes)


def _names(axes: Sequence[Axis]) -> tuple[str, ...]:
    return tuple(axis.name for axis in axes)


@op("patches")
class Patches(Sliding):
    """The windows of an image: their positions in place of the axes slid along, then their elements."""

    fill: float = 0.0

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The positions in place of the axes slid along, then the elements."""
        (x,) = types
        assert self.fits(), self
        assert agree(x, Type(x.dtype, self.axes)), (self, x)
        into = dict(zip(_names(self.axes), self.into, strict=True))
        return (Type(x.dtype, (*(into.get(axis.name, axis) for axis in x.axes), *self.size)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but those slid along, unless windows lie apart; linear if what lies outside is zero."""
        slid = _names(self.axes)
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
        return f"kernels.patches({x.text}, {dims}, {_sizes(self.size)}, {self.sliding()}, {self.fill!r})"


@op("fold")
class Fold(Sliding):
    """The gradient of `patches`: for each element of the image the sum over the windows that have it."""

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes slid along in place of positions, without the elements."""
        (d,) = types
        assert self.fits(), self
        assert agree(d, Type(d.dtype, self.into), Type(d.dtype, self.size)), (self, d)
        back = dict(zip(_names(self.into), self.axes, strict=True))
        rest = d.without(_names(self.size))
        return (Type(d.dtype, tuple(back.get(axis.name, axis) for axis in rest.axes)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but those of windows, unless they lie apart; linear."""
        whole = (*_names(self.into), *_names(self.size))
        others = (ShardingRule((name,), (name,)) for name in operands[0].names if name not in whole)
        apart = (ShardingRule((into,), (name,)) for name, into in self.apart)
        return (*others, *apart, ShardingRule((SUM,), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One addition for each element of a window."""
        return operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The sums are made one axis after the other, in the dtype of accumulation."""
        return 2 * wide_bytes(operands[0])

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The patches."""
        return (build.apply(Patches(**self.window), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with the elements of windows last."""
        (d,) = arguments
        rest = d.type.without(_names(self.size)).names
        text = permuted(d.text, d.type.names, [*rest, *_names(self.size)])
        dims = tuple(rest.index(axis.name) for axis in self.into)
        return f"kernels.fold({text}, {dims}, {_sizes(self.axes)}, {self.sliding()})"


# ---------------------------------------------------------------- convolution


@fields_of_several
class Product(Sliding):
    """Base of convolution and its gradients: any two of the image, the kernel and the result give the third.

    `over` are the summed axes, the channels. Other axes that image and kernel share are groups; the kernel's rest are
    filters, and the image's are batch axes.
    """

    over: tuple[str, ...]

    def roles(self, image: Type, kernel: Type) -> _Roles:
        """The axes by their roles."""
        slid, own = _names(self.axes), (*self.over, *_names(self.size))
        return _Roles(
            tuple(axis for axis in image.axes if axis.name not in (*slid, *self.over) and not kernel.has(axis.name)),
            tuple(axis for axis in image.axes if axis.name not in (*slid, *own) and kernel.has(axis.name)),
            tuple(axis for axis in image.axes if axis.name in self.over),
            tuple(axis for axis in kernel.axes if axis.name not in own and not image.has(axis.name)),
        )

    def result(self, image: Type, kernel: Type) -> Type:
        """The type of the convolution: positions in place of axes slid along, and filters in that of the channels."""
        into = dict(zip(_names(self.axes), self.into, strict=True))
        filters = self.roles(image, kernel).filters
        first = next((name for name in image.names if name in self.over), None)
        axes: list[Axis] = []
        for axis in image.axes:
            axes.extend(filters if axis.name == first else ())
            axes.extend(() if axis.name in self.over else (into.get(axis.name, axis),))
        return Type(image.dtype, (*axes, *(filters if first is None else ())))

    def consistent(self, image: Type, kernel: Type) -> bool:
        """Whether image and kernel fit each other."""
        both = image.dtype == kernel.dtype and all(image.has(name) and kernel.has(name) for name in self.over)
        rest = image.without(_names(self.axes)), kernel.without(_names(self.size))
        slid = agree(image, Type(image.dtype, self.axes)) and agree(kernel, Type(image.dtype, self.size))
        return both and slid and self.fits() and agree(*rest)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A multiplication and an addition for each product."""
        return 2 * prod(self.matrices(operands, results))

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def of_images(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Type, Type]:
        """The types of the image and the kernel."""
        raise NotImplementedError

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...]:
        """As the product of the patches and the kernel; a product for each group."""
        rows, depth, columns, groups = self._sizes(*self.of_images(operands, results))
        return rows, depth, columns, *((groups,) if groups > 1 else ())

    def _sizes(self, image: Type, kernel: Type) -> tuple[int, int, int, int]:
        """Positions of the batch, summed elements, filters, groups."""
        roles = self.roles(image, kernel)
        positions = prod(_sizes(self.into)) * prod(_sizes(roles.batch))
        depth = prod(_sizes(self.size)) * prod(_sizes(roles.over))
        return positions, depth, prod(_sizes(roles.filters)), prod(_sizes(roles.groups))

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By positions, summed elements, filters and groups."""
        sizes = self._sizes(*self.of_images(operands, results))
        return Kernel(self.name, tuple(map(float, sizes)), float(self.flops(operands, results)))

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """torch pads both ends alike: an image that is padded otherwise is copied."""
        alike = all(before == after for before, after in self.padding)
        return 0 if alike else self.padded_bytes(self.of_images(operands, results)[0])

    def emit_sum(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """In place."""
        return f"{self.emit(arguments, results)}.add_({other.text})"


@frozen
class _Roles:
    """The axes of a convolution, and tensors in the form that torch's takes."""

    batch: tuple[Axis, ...]
    groups: tuple[Axis, ...]
    over: tuple[Axis, ...]
    filters: tuple[Axis, ...]

    def image(self, argument: Argument, slid: Sequence[Axis]) -> str:
        """[batch, groups · channels, …]."""
        return _as(argument, [self.batch, (*self.groups, *self.over)], slid)

    def kernel(self, argument: Argument, size: Sequence[Axis]) -> str:
        """[groups · filters, channels, …]."""
        return _as(argument, [(*self.groups, *self.filters), self.over], size)

    def result(self, argument: Argument, into: Sequence[Axis]) -> str:
        """[batch, groups · filters, …]."""
        return _as(argument, [self.batch, (*self.groups, *self.filters)], into)

    @property
    def count(self) -> int:
        """The number of groups."""
        return prod(_sizes(self.groups))


def _as(argument: Argument, merged: Sequence[tuple[Axis, ...]], rest: Sequence[Axis]) -> str:
    """The text of a tensor with an axis for each of the `merged`, then the rest."""
    order = [*(axis for axes in merged for axis in axes), *rest]
    text = permuted(argument.text, argument.type.names, _names(order))
    if all(len(axes) == 1 for axes in merged):
        return text
    return f"{text}.reshape{shape_text([*(prod(_sizes(axes)) for axes in merged), *_sizes(rest)])}"


def _from(text: str, merged: Sequence[tuple[Axis, ...]], rest: Sequence[Axis], type: Type) -> str:
    """The text of a tensor of `type`, from one with an axis for each of the `merged`, then the rest."""
    order = [*(axis for axes in merged for axis in axes), *rest]
    if not all(len(axes) == 1 for axes in merged):
        text = f"{text}.reshape{shape_text(_sizes(order))}"
    return permuted(text, _names(order), type.names)


@op("conv")
class Conv(Product):
    """`conv(image, kernel)`: the result has positions in place of the axes slid along, and filters in that of the
    channels.
    """

    reads_weights = True
    sums = True

    def fans(self, type: Type) -> tuple[int, int] | None:
        """Of a kernel: the summed elements, and the rest."""
        if not all(type.has(name) for name in (*self.over, *_names(self.size))):
            return None
        summed = prod(type.axis(name).size for name in (*self.over, *_names(self.size)))
        return summed, max(1, type.elements // summed)

    def matrix(self, operands: Sequence[Type], position: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Of a kernel: what is summed, and the groups."""
        if position != 1:
            return None
        return (*self.over, *_names(self.size)), tuple(_names(self.roles(*operands).groups))

    def of_images(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Type, Type]:
        """The operands."""
        image, kernel = operands
        return image, kernel

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """Positions in place of the axes slid along, and filters in that of the channels."""
        image, kernel = types
        assert self.consistent(image, kernel), (self, types)
        return (self.result(image, kernel),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """The batch, groups and filters; channels, which make the result partial; linear in either operand."""
        roles = self.roles(*operands)
        return (
            *(ShardingRule((name, None), (name,)) for name in _names(roles.batch)),
            *(ShardingRule((name, name), (name,)) for name in _names(roles.groups)),
            *(ShardingRule((None, name), (name,)) for name in _names(roles.filters)),
            *(ShardingRule((name, name), (SUM,)) for name in self.over),
            *(ShardingRule((name, None), (into,)) for name, into in self.apart),
            ShardingRule((SUM, None), (SUM,)),
            ShardingRule((None, SUM), (SUM,)),
        )

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Those of the image and of the kernel."""
        image, kernel = node.inputs
        return (
            build.apply(ConvImageGradient(**self.window, over=self.over, image=image.type.axes), d, kernel),
            build.apply(ConvKernelGradient(**self.window, over=self.over, of=kernel.type.axes), image, d),
        )

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """torch's convolution."""
        image, kernel = arguments
        roles = self.roles(image.type, kernel.type)
        texts = f"{roles.image(image, self.axes)}, {roles.kernel(kernel, self.size)}"
        text = f"kernels.convolution({texts}, {self.sliding()}, {roles.count})"
        return _from(text, [roles.batch, (*roles.groups, *roles.filters)], self.into, results[0])


@op("conv_image_gradient")
class ConvImageGradient(Product):
    """The gradient of a convolution's image, with the axes `image`, from that of its result and the kernel."""

    image: tuple[Axis, ...]
    sums = True

    def of_images(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Type, Type]:
        """The result, and the second operand."""
        return results[0], operands[1]

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The image's."""
        d, kernel = types
        image = Type(d.dtype, self.image)
        assert self.consistent(image, kernel), (self, types)
        assert set(self.result(image, kernel).axes) == set(d.axes), (self, types)
        return (image,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """The batch, groups and channels; filters, which make the result partial; linear in either operand."""
        roles = self.roles(results[0], operands[1])
        return (
            *(ShardingRule((name, None), (name,)) for name in _names(roles.batch)),
            *(ShardingRule((name, name), (name,)) for name in _names(roles.groups)),
            *(ShardingRule((None, name), (name,)) for name in self.over),
            *(ShardingRule((name, name), (SUM,)) for name in _names(roles.filters)),
            *(ShardingRule((into, None), (name,)) for name, into in self.apart),
            ShardingRule((SUM, None), (SUM,)),
            ShardingRule((None, SUM), (SUM,)),
        )

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """torch's gradient."""
        d, kernel = arguments
        roles = self.roles(results[0], kernel.type)
        merged = [roles.batch, (*roles.groups, *roles.over)]
        shape = shape_text([*(prod(_sizes(axes)) for axes in merged), *_sizes(self.axes)])
        texts = f"{roles.result(d, self.into)}, {roles.kernel(kernel, self.size)}, {shape}"
        text = f"kernels.convolution_image_gradient({texts}, {self.sliding()}, {roles.count})"
        return _from(text, merged, self.axes, results[0])


@op("conv_kernel_gradient")
class ConvKernelGradient(Product):
    """The gradient of a convolution's kernel, with the axes `of`, from the image and the gradient of the result."""

    of: tuple[Axis, ...]

    def of_images(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Type, Type]:
        """The first operand, and the result."""
        return operands[0], results[0]

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The kernel's."""
        image, d = types
        kernel = Type(image.dtype, self.of)
        assert self.consistent(image, kernel), (self, types)
        assert set(self.result(image, kernel).axes) == set(d.axes), (self, types)
        return (kernel,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Groups, channels and filters; the batch, which makes the result partial; linear in either operand."""
        roles = self.roles(operands[0], results[0])
        return (
            *(ShardingRule((name, name), (SUM,)) for name in _names(roles.batch)),
            *(ShardingRule((name, name), (name,)) for name in _names(roles.groups)),
            *(ShardingRule((name, None), (name,)) for name in self.over),
            *(ShardingRule((None, name), (name,)) for name in _names(roles.filters)),
            *(ShardingRule((name, into), (SUM,)) for name, into in self.apart),
            ShardingRule((SUM, None), (SUM,)),
            ShardingRule((None, SUM), (SUM,)),
        )

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """torch's gradient."""
        image, d = arguments
        roles = self.roles(image.type, results[0])
        merged = [(*roles.groups, *roles.filters), roles.over]
        shape = shape_text([*(prod(_sizes(axes)) for axes in merged), *_sizes(self.size)])
        texts = f"{roles.image(image, self.axes)}, {roles.result(d, self.into)}, {shape}"
        text = f"kernels.convolution_kernel_gradient({texts}, {self.sliding()}, {roles.count})"
        return _from(text, merged, self.size, results[0])
