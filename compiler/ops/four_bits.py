"""Matrices in four bits (`freeze … as nf4`), and what makes numbers of them where they are read.

The format is that of QLoRA (Dettmers et al., arXiv:2305.14314, section 3). Elements that are summed over together
follow each other, as in a linear layer of PyTorch, and each `block` of them has a scale: its largest magnitude. An
element is the nearest of 16 quantiles of the normal distribution, times the scale. Scales, less their mean, are in
eight bits (the dynamic map of `adamw_8bit`) times a second scale, of up to 256 that follow each other.

Such a matrix is four tensors, of which the first two have its axes, with blocks in the place of one: so layouts split
them as they split the matrix, where parts have whole blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from math import gcd

from attrs import frozen

from partita.compiler.naming import chunks
from partita.compiler.ops.op import TORCH_DTYPES, Argument, Op, ShardingRule, op, shape_text
from partita.compiler.ops.traits import CachesTable
from partita.dsl.spec import Call
from partita.dsl.types import Axis, Type

# The parts of a matrix in four bits, by the endings of their names.
PARTS = CODES, SCALES, FACTORS, OFFSET = "codes", "scales", "factors", "offset"
FOUR_BITS = "four_bits"  # what initial values of a part are called
SCALES_EACH = 256  # that have one factor
SLAB = 1 << 20  # elements that are made at a time


def matrix_of(name: str, initial: Call) -> str:
    """The name of the matrix that a parameter is part of, if it is, or its own; `initial` is what it begins with."""
    return name.rpartition(".")[0] if initial.name == FOUR_BITS else name


@frozen
class FourBits:
    """A matrix in four bits: its type, its axes in the `order` in which elements follow each other, and how many have a
    scale.
    """

    whole: Type
    order: tuple[str, ...]
    block: int

    @property
    def blocked(self) -> str:
        """The axis that is cut into blocks."""
        return self.order[-1]

    @property
    def length(self) -> int:
        """How many elements a block has; the last may have fewer."""
        return min(self.block, self.whole.axis(self.blocked).size)

    @cached_property
    def scales(self) -> Type:
        """The type of the scales."""
        chunk = Axis(chunks(self.blocked), -(-self.whole.axis(self.blocked).size // self.length))
        return Type("u8", tuple(chunk if axis.name == self.blocked else axis for axis in self.whole.axes))

    @property
    def codes(self) -> Type:
        """The type of the codes, of which a byte has two."""
        return Type("u8", (*self.scales.axes, Axis(f"{self.blocked}~byte", -(-self.length // 2))))

    @property
    def grid(self) -> tuple[str, ...]:
        """The axes of the scales in the order in which they follow each other."""
        return (*self.order[:-1], chunks(self.blocked))

    @cached_property
    def spans(self) -> Mapping[str, int]:
        """How many scales in a row have one factor, along each axis: all along some, a part along one."""
        left, spans = SCALES_EACH, dict[str, int]()
        for name in reversed(self.grid):
            size = self.scales.axis(name).size
            spans[name] = gcd(size, left)
            left = left // size if left % size == 0 else 1
        return spans

    def beside(self, scales: Type) -> tuple[int, ...]:
        """The sizes of the factors of some scales, with as many dimensions."""
        sizes = ((axis.size, self.spans[axis.name], self.scales.axis(axis.name).size) for axis in scales.axes)
        return tuple(1 if span == whole else size // span for size, span, whole in sizes)

    @property
    def factors(self) -> Type:
        """The type of the factors."""
        axes = []
        for axis in self.scales.axes:
            span = self.spans[axis.name]
            if span < axis.size:
                axes.append(axis if span == 1 else Axis(f"{axis.name}~scales", axis.size // span))
        return Type("f32", tuple(axes))

    @classmethod
    def of(cls, initial: Call) -> tuple[FourBits, str, Call]:
        """The form, the part, and the initial values of the matrix, of what a part begins with (`begins`)."""
        arguments = dict(initial.arguments)
        sizes = (each.split("=") for each in arguments.pop("axes").split())
        whole = Type(arguments.pop("dtype"), tuple(Axis(name, int(size)) for name, size in sizes))
        form = cls(whole, tuple(arguments.pop("order").split()), arguments.pop("block"))
        part = arguments.pop("part")
        return form, part, Call(arguments.pop("of"), arguments)

    def begins(self, part: str, initial: Call) -> Call:
        """What a part begins with, if the matrix begins so."""
        arguments = {"part": part, "of": initial.name, "block": self.block, "dtype": self.whole.dtype}
        arguments |= {"axes": " ".join(map(str, self.whole.axes)), "order": " ".join(self.order)}
        return Call(FOUR_BITS, {**arguments, **initial.arguments})

    @property
    def types(self) -> Mapping[str, Type]:
        """The types of the parts."""
        return {CODES: self.codes, SCALES: self.scales, FACTORS: self.factors, OFFSET: Type("f32")}


@op(FOUR_BITS)
class Dequantize(CachesTable):
    """The matrix with these `axes` that is stored as codes, scales, factors and an offset."""

    axes: tuple[Axis, ...]
    order: tuple[str, ...]
    block: int
    dtype: str
    fusible = False

    @property
    def form(self) -> FourBits:
        """The form of the whole matrix."""
        return FourBits(Type(self.dtype, self.axes), self.order, self.block)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The matrix, of the size that its parts say."""
        codes, *_ = types
        return (Type(self.dtype, tuple(self._axis(axis, codes) for axis in self.axes)),)

    def _axis(self, axis: Axis, codes: Type) -> Axis:
        if axis.name != self.form.blocked:
            return codes.axis(axis.name)
        whole, parts = self.form.scales.axis(chunks(axis.name)).size, codes.axis(chunks(axis.name)).size
        return Axis(axis.name, axis.size * parts // whole)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis, by whole blocks, and by whole groups of scales with one factor."""
        rules = []
        for axis in self.form.whole.axes:
            name = chunks(axis.name) if axis.name == self.form.blocked else axis.name
            if axis.name == self.form.blocked and axis.size % self.form.length:
                continue
            span, size = self.form.spans[name], self.form.scales.axis(name).size
            of_factors = None if span == size else name if span == 1 else f"{name}~scales"
            rules.append(ShardingRule((name, name, of_factors, None), (axis.name,)))
        return tuple(rules)

    def vmapped(self, axis: Axis) -> Op | None:
        """It is in no loop: parameters become numbers once all operations are there."""
        return None

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A product for each element."""
        return results[0].elements

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """The numbers of each byte, and the dynamic map."""
        return FOUR_BITS, 4 * (2 * 256 + 256)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Of some elements at a time: indices, their values and their products; and all scales, with their indices."""
        codes, scales, *_ = operands
        some = max(min(2 * codes.elements, SLAB), 2 * codes.elements // max(codes.axes[0].size, 1))
        return 14 * some + 20 * scales.elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel, with the factors as they stand beside the scales."""
        codes, scales, factors, offset = arguments
        form = self.form
        position, size = form.whole.position(form.blocked), results[0].axis(form.blocked).size
        dtype = TORCH_DTYPES[self.dtype]
        tensors = (
            f"{codes.text}, {scales.text}, {factors.text}.view{shape_text(form.beside(scales.type))}, {offset.text}"
        )
        return f"kernels.nf4({tensors}, {position}, {size}, {form.length}, {dtype})"
