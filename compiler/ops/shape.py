"""Operations that change axes and at most copy elements: rename, split, merge, expand, slice, pad, concat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.decoding import ConcatHistory
from partita.compiler.ops.op import Argument, Op, ShardingRule, agree, fields_of_several, make, op, permuted, shape_text
from partita.compiler.ops.traits import SameTensor, Stencil
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value

LINEAR = ShardingRule((SUM,), (SUM,))


def _others(operand: Type, *changed: str) -> tuple[ShardingRule, ...]:
    """Shard any axis that the operation leaves unchanged."""
    return tuple(ShardingRule((name,), (name,)) for name in operand.names if name not in changed)


def arranged(build: Builder, value: Value, names: Sequence[str]) -> Value:
    """The value with its axes in the given order; the value itself if they are in that order."""
    if value.type.names == tuple(names):
        return value
    return build.apply(Arrange(tuple(names)), value)


@op("arrange")
class Arrange(Op):
    """Reorder the axes: a view."""

    order: tuple[str, ...]
    rearranges = True
    is_view = True
    orderless = True

    def vmapped(self, axis: Axis) -> Op | None:
        """With the axis first."""
        return Arrange((axis.name, *self.order))

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The same axes in `order`."""
        assert sorted(self.order) == sorted(types[0].names), (self.order, types[0])
        return (Type(types[0].dtype, tuple(types[0].axis(name) for name in self.order)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear."""
        return (*_others(operands[0]), LINEAR)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The original order."""
        return (arranged(build, d, node.inputs[0].type.names),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`permute`."""
        return permuted(arguments[0].text, arguments[0].type.names, self.order)


@op("rename")
class Rename(SameTensor):
    """Rename axes, without moving data."""

    pairs: tuple[tuple[str, str], ...]
    rearranges = True
    is_view = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The same sizes under new names."""
        names = dict(self.pairs)
        return (Type(types[0].dtype, tuple(Axis(names.get(a.name, a.name), a.size) for a in types[0].axes)),)

    def sources(self, operand: Type) -> Mapping[str, tuple[str, ...]]:
        """The old names."""
        names = dict(self.pairs)
        return {names.get(name, name): (name,) for name in operand.names}

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear."""
        names = dict(self.pairs)
        return (*(ShardingRule((name,), (names.get(name, name),)) for name in operands[0].names), LINEAR)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The original names."""
        return (build.apply(Rename(tuple((new, old) for old, new in self.pairs)), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """The tensor itself."""
        return arguments[0].text


@op("split")
class Split(SameTensor):
    """View one axis as several, the first varying slowest."""

    axis: str
    into: tuple[Axis, ...]
    rearranges = True
    is_view = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The new axes in place of the old one."""
        (x,) = types
        position = x.position(self.axis)
        result = Type(x.dtype, x.axes[:position] + self.into + x.axes[position + 1 :])
        assert result.elements == x.elements, (self, x)
        return (result,)

    def sources(self, operand: Type) -> Mapping[str, tuple[str, ...]]:
        """The old axis for each new one."""
        own = {name: (name,) for name in operand.names if name != self.axis}
        return own | {axis.name: (self.axis,) for axis in self.into}

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Shards of the old axis are shards of the slowest new one; any other axis; linear."""
        first = ShardingRule((self.axis,), (self.into[0].name,))
        return (*_others(operands[0], self.axis), first, LINEAR)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Merges the axes again."""
        old = node.inputs[0].type.axis(self.axis)
        return (build.apply(Merge(tuple(a.name for a in self.into), old), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`reshape`."""
        return f"{arguments[0].text}.reshape{shape_text(results[0].shape)}"


@op("merge")
class Merge(SameTensor):
    """View several axes as one, the first varying slowest; the new axis takes the place of the first."""

    axes: tuple[str, ...]
    into: Axis
    rearranges = True

    def _order(self, x: Type) -> tuple[str, ...]:
        rest = [name for name in x.names if name not in self.axes]
        before = sum(1 for name in x.names[: x.position(self.axes[0])] if name not in self.axes)
        return (*rest[:before], *self.axes, *rest[before:])

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The new axis in place of the first old one."""
        (x,) = types
        order = self._order(x)
        position = order.index(self.axes[0])
        axes = [x.axis(name) for name in order]
        axes[position : position + len(self.axes)] = [self.into]
        result = Type(x.dtype, tuple(axes))
        assert result.elements == x.elements, (self, x)
        return (result,)

    def sources(self, operand: Type) -> Mapping[str, tuple[str, ...]]:
        """The old axes for the new one."""
        return {name: (name,) for name in operand.names if name not in self.axes} | {self.into.name: self.axes}

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Shards of the slowest old axis are shards of the new one; any other axis; linear."""
        first = ShardingRule((self.axes[0],), (self.into.name,))
        return (*_others(operands[0], *self.axes), first, LINEAR)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Splits the axis again."""
        x = node.inputs[0].type
        axes = tuple(x.axis(name) for name in self.axes)
        return (arranged(build, build.apply(Split(self.into.name, axes), d), x.names),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A permutation that makes the axes adjacent, then `reshape`, of a copy where that has been cut from a larger
        tensor, lest it keep all of it.
        """
        (x,) = arguments
        text = permuted(x.text, x.type.names, self._order(x.type))
        return f"{text}.contiguous().reshape{shape_text(results[0].shape)}"


@op("expand")
class Expand(Op):
    """Repeat the tensor along new axes: a view."""

    axes: tuple[Axis, ...]
    rearranges = True
    is_view = True
    orderless = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The old axes, then the new ones."""
        return (Type(types[0].dtype, types[0].axes + self.axes),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any old axis; any new one, with the operand replicated; linear."""
        new = tuple(ShardingRule((None,), (axis.name,)) for axis in self.axes)
        return (*_others(operands[0]), *new, LINEAR)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The sum over the new axes."""
        return (build.apply(make("reduce", "sum", tuple(a.name for a in self.axes), d.type.dtype), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`expand` of a view with new axes."""
        (x,) = arguments
        if not self.axes:
            return x.text
        if not x.type.axes:
            return f"{x.text}.expand{shape_text(results[0].shape)}"
        index = ", ".join([*(":" for _ in x.type.axes), *("None" for _ in self.axes)])
        return f"{x.text}[{index}].expand{shape_text(results[0].shape)}"


@op("slice")
class Slice(SameTensor):
    """A range of an axis from `start`, under a new name: a view."""

    axis: str
    into: Axis
    start: int
    rearranges = True
    is_view = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The new axis in place of the old one."""
        (x,) = types
        assert self.start + self.into.size <= x.axis(self.axis).size, (self, x)
        return (Type(x.dtype, tuple(self.into if a.name == self.axis else a for a in x.axes)),)

    def sources(self, operand: Type) -> Mapping[str, tuple[str, ...]]:
        """The old axis for the new one."""
        return {self.into.name if name == self.axis else name: (name,) for name in operand.names}

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis; linear."""
        return (*_others(operands[0], self.axis), LINEAR)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Pads with zeros."""
        old = node.inputs[0].type.axis(self.axis)
        return (build.apply(Pad(self.into.name, old, self.start), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`narrow`."""
        (x,) = arguments
        return f"{x.text}.narrow({x.type.position(self.axis)}, {self.start}, {self.into.size})"


@op("pad")
class Pad(Op):
    """Pad an axis with zeros: the operand begins at `start` of the new axis."""

    axis: str
    into: Axis
    start: int

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The new axis in place of the old one."""
        (x,) = types
        assert self.start + x.axis(self.axis).size <= self.into.size, (self, x)
        return (Type(x.dtype, tuple(self.into if a.name == self.axis else a for a in x.axes)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis; linear."""
        return (*_others(operands[0], self.axis), LINEAR)

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Slices off the padding."""
        old = node.inputs[0].type.axis(self.axis)
        return (build.apply(Slice(self.into.name, old, self.start), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.nn.functional.pad`, which counts axes from the last."""
        (x,) = arguments
        position = x.type.position(self.axis)
        after = self.into.size - self.start - x.type.axes[position].size
        zeros = "0, 0, " * (len(x.type.axes) - position - 1)
        return f"torch.nn.functional.pad({x.text}, ({zeros}{self.start}, {after}))"


@fields_of_several
class _Moved(Op):
    """The entries of an axis change places."""

    over: str

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand's type."""
        assert types[0].has(self.over), (self, types)
        return types

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis; linear."""
        return (*_others(operands[0], self.over), LINEAR)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0


@op("shift")
class Shift(_Moved, Stencil):
    """Each entry of an axis is that `by` entries before it (after it, if `by` is negative), or zero where none is."""

    by: int

    def decode_step(
        self, build: Builder, operands: Sequence[Value], axis: str, state: Callable[[Type], Value]
    ) -> tuple[Value, ...] | None:
        """The last positions before the part come first, if it shifts forward."""
        (x,) = operands
        if axis != self.over or self.by < 1:
            return None
        longer = build.apply(ConcatHistory(axis, self.by), state(x.type.resized(axis, self.by)), x)
        return (build.apply(Slice(axis, x.type.axis(axis), 0), longer),)

    def reach(self, axis: str) -> tuple[int, int] | None:
        """As far as it shifts."""
        return (max(self.by, 0), max(-self.by, 0)) if axis == self.over else None

    def inside(self, axis: str, longer: Axis, into: Axis) -> Op:
        """Those before, or after, the part."""
        return Slice(longer.name, into, max(-self.by, 0))

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Shifts back."""
        return (build.apply(Shift(self.over, -self.by), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.nn.functional.pad`, which cuts off what moves beyond the end; it counts axes from the last."""
        (x,) = arguments
        position, size = x.type.position(self.over), x.type.axis(self.over).size
        by = max(-size, min(size, self.by))
        zeros = "0, 0, " * (len(x.type.axes) - position - 1)
        return f"torch.nn.functional.pad({x.text}, ({zeros}{by}, {-by}))"


@op("flip")
class Flip(_Moved):
    """The entries of an axis in the other direction."""

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Flipped back."""
        return (build.apply(self, d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.flip`."""
        (x,) = arguments
        return f"{x.text}.flip({x.type.position(self.over)})"


@op("rotate")
class Rotate(_Moved):
    """Each entry of an axis is that `by` entries before it; those that leave at one end enter at the other."""

    by: int

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Rolled back."""
        return (build.apply(Rotate(self.over, -self.by), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.roll`."""
        (x,) = arguments
        return f"{x.text}.roll({self.by}, {x.type.position(self.over)})"


@op("concat")
class Concat(Op):
    """Concatenate tensors along one axis of each; the new axis takes the place of the first operand's."""

    axes: tuple[str, ...]
    into: Axis
    rearranges = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The first operand's axes with the new axis in place of its own."""
        first = types[0]
        assert agree(*(x.without([name]) for x, name in zip(types, self.axes, strict=True))), (self, types)
        sizes = sum(x.axis(name).size for x, name in zip(types, self.axes, strict=True))
        assert sizes == self.into.size, (self, types)
        return (Type(first.dtype, tuple(self.into if a.name == self.axes[0] else a for a in first.axes)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis, in all operands; linear in all of them jointly."""
        names = [name for name in results[0].names if name != self.into.name]
        count = len(operands)
        return (*(ShardingRule((name,) * count, (name,)) for name in names), ShardingRule((SUM,) * count, (SUM,)))

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Each operand's slice."""
        parts, start = [], 0
        for value, name in zip(node.inputs, self.axes, strict=True):
            axis = value.type.axis(name)
            parts.append(build.apply(Slice(self.into.name, axis, start), d) if value.type.is_float else None)
            start += axis.size
        return tuple(parts)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.cat`."""
        texts = []
        for x, own in zip(arguments, self.axes, strict=True):
            order = [own if name == self.into.name else name for name in results[0].names]
            texts.append(permuted(x.text, x.type.names, order))
        return f"torch.cat(({', '.join(texts)},), {results[0].position(self.into.name)})"
