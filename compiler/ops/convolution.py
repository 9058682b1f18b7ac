"""Convolution and its gradients.

A convolution is the `dot` of the patches that its windows see (`partita.compiler.ops.windows`) and a kernel, over the
channels and the elements of the window, and runs as torch's; its gradients are computed as torch computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

from partita.compiler.layout import SUM
from partita.compiler.ops.op import (
    Argument,
    Kernel,
    Op,
    ShardingRule,
    agree,
    fields_of_several,
    op,
    permuted,
    shape_text,
)
from partita.compiler.ops.shape import arranged
from partita.compiler.ops.traits import ReadsWeights, Summing
from partita.compiler.ops.windows import Sliding, names_of, sizes_of
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value

# What is linear in either operand.
BILINEAR = (ShardingRule((SUM, None), (SUM,)), ShardingRule((None, SUM), (SUM,)))


@fields_of_several
class Product(Sliding):
    """Base of convolution and its gradients: any two of the image, the kernel and the result give the third.

    `over` are the summed axes, the channels. Other axes that image and kernel share are groups; the kernel's rest are
    filters, and the image's are batch axes.
    """

    over: tuple[str, ...]

    def vmapped(self, axis: Axis) -> Op | None:
        """It is applied at one position of a loop after the other."""
        return None

    def roles(self, image: Type, kernel: Type) -> _Roles:
        """The axes by their roles."""
        slid, own = names_of(self.axes), (*self.over, *names_of(self.size))
        return _Roles(
            tuple(axis for axis in image.axes if axis.name not in (*slid, *self.over) and not kernel.has(axis.name)),
            tuple(axis for axis in image.axes if axis.name not in (*slid, *own) and kernel.has(axis.name)),
            tuple(axis for axis in image.axes if axis.name in self.over),
            tuple(axis for axis in kernel.axes if axis.name not in own and not image.has(axis.name)),
        )

    def result(self, image: Type, kernel: Type) -> Type:
        """The type of the convolution: positions in place of axes slid along, and filters in that of the channels."""
        into = dict(zip(names_of(self.axes), self.into, strict=True))
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
        rest = image.without(names_of(self.axes)), kernel.without(names_of(self.size))
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
        positions = prod(sizes_of(self.into)) * prod(sizes_of(roles.batch))
        depth = prod(sizes_of(self.size)) * prod(sizes_of(roles.over))
        return positions, depth, prod(sizes_of(roles.filters)), prod(sizes_of(roles.groups))

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By positions, summed elements, filters and groups."""
        sizes = self._sizes(*self.of_images(operands, results))
        return Kernel(self.name, tuple(map(float, sizes)), float(self.flops(operands, results)))

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """torch pads both ends alike: an image that is padded otherwise is copied, as is what has another order."""
        image, kernel = self.of_images(operands, results)
        roles = self.roles(image, kernel)
        orders = (
            names_of((*roles.batch, *roles.groups, *roles.over, *self.axes)),
            names_of((*roles.groups, *roles.filters, *roles.over, *self.size)),
            names_of((*roles.batch, *roles.groups, *roles.filters, *self.into)),
        )
        moved = sum(type.bytes for type in operands if type.names not in [tuple(order) for order in orders])
        alike = all(before == after for before, after in self.padding)
        return moved + (0 if alike else self.padded_bytes(image))

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
        return prod(sizes_of(self.groups))


def _as(argument: Argument, merged: Sequence[tuple[Axis, ...]], rest: Sequence[Axis]) -> str:
    """The text of a tensor with an axis for each of the `merged`, then the rest."""
    order = [*(axis for axes in merged for axis in axes), *rest]
    text = permuted(argument.text, argument.type.names, names_of(order))
    if all(len(axes) == 1 for axes in merged):
        return text
    return f"{text}.reshape{shape_text([*(prod(sizes_of(axes)) for axes in merged), *sizes_of(rest)])}"


def _from(text: str, merged: Sequence[tuple[Axis, ...]], rest: Sequence[Axis], type: Type) -> str:
    """The text of a tensor of `type`, from one with an axis for each of the `merged`, then the rest."""
    order = [*(axis for axes in merged for axis in axes), *rest]
    if not all(len(axes) == 1 for axes in merged):
        text = f"{text}.reshape{shape_text(sizes_of(order))}"
    return permuted(text, names_of(order), type.names)


@op("conv")
class Conv(ReadsWeights, Product, Summing):
    """`conv(image, kernel)`: the result has positions in place of the axes slid along, and filters in that of the
    channels.
    """

    def fans(self, type: Type) -> tuple[int, int] | None:
        """Of a kernel: the summed elements, and the rest."""
        if not all(type.has(name) for name in (*self.over, *names_of(self.size))):
            return None
        summed = prod(type.axis(name).size for name in (*self.over, *names_of(self.size)))
        return summed, max(1, type.elements // summed)

    def matrix(self, operands: Sequence[Type], position: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Of a kernel: what is summed, and the groups."""
        if position != 1:
            return None
        return (*self.over, *names_of(self.size)), tuple(names_of(self.roles(*operands).groups))

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
            *(ShardingRule((name, None), (name,)) for name in names_of(roles.batch)),
            *(ShardingRule((name, name), (name,)) for name in names_of(roles.groups)),
            *(ShardingRule((None, name), (name,)) for name in names_of(roles.filters)),
            *(ShardingRule((name, name), (SUM,)) for name in self.over),
            *(ShardingRule((name, None), (into,)) for name, into in self.apart),
            *BILINEAR,
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
class ConvImageGradient(Product, Summing):
    """The gradient of a convolution's image, with the axes `image`, from that of its result and the kernel."""

    image: tuple[Axis, ...]

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
            *(ShardingRule((name, None), (name,)) for name in names_of(roles.batch)),
            *(ShardingRule((name, name), (name,)) for name in names_of(roles.groups)),
            *(ShardingRule((None, name), (name,)) for name in self.over),
            *(ShardingRule((name, name), (SUM,)) for name in names_of(roles.filters)),
            *(ShardingRule((into, None), (name,)) for name, into in self.apart),
            *BILINEAR,
        )

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """It is linear in both operands: the convolution of d, and d's part in the gradient of the kernel."""
        cotangent, kernel = node.inputs
        back = build.apply(Conv(**self.window, over=self.over), d, kernel)
        of_kernel = ConvKernelGradient(**self.window, over=self.over, of=kernel.type.axes)
        return arranged(build, back, cotangent.type.names), build.apply(of_kernel, d, cotangent)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """torch's gradient."""
        d, kernel = arguments
        roles = self.roles(results[0], kernel.type)
        merged = [roles.batch, (*roles.groups, *roles.over)]
        shape = shape_text([*(prod(sizes_of(axes)) for axes in merged), *sizes_of(self.axes)])
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
            *(ShardingRule((name, name), (SUM,)) for name in names_of(roles.batch)),
            *(ShardingRule((name, name), (name,)) for name in names_of(roles.groups)),
            *(ShardingRule((name, None), (name,)) for name in self.over),
            *(ShardingRule((None, name), (name,)) for name in names_of(roles.filters)),
            *(ShardingRule((name, into), (SUM,)) for name, into in self.apart),
            *BILINEAR,
        )

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """It is linear in both operands: those of a convolution with the kernel d."""
        image, cotangent = node.inputs
        of_image = ConvImageGradient(**self.window, over=self.over, image=image.type.axes)
        back = build.apply(Conv(**self.window, over=self.over), image, d)
        return build.apply(of_image, cotangent, d), arranged(build, back, cotangent.type.names)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """torch's gradient."""
        image, d = arguments
        roles = self.roles(image.type, results[0])
        merged = [(*roles.groups, *roles.filters), roles.over]
        shape = shape_text([*(prod(sizes_of(axes)) for axes in merged), *sizes_of(self.size)])
        texts = f"{roles.image(image, self.axes)}, {roles.result(d, self.into)}, {shape}"
        text = f"kernels.convolution_kernel_gradient({texts}, {self.sliding()}, {roles.count})"
        return _from(text, merged, self.size, results[0])
