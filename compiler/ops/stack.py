"""Matrices of one size, from several tensors, as one stack; and operations on each matrix by itself.

Operations on whole matrices cannot be split along rows or columns, but a stack of matrices can be dealt out to ranks.
A stack has the axes `matrix`, then those of one matrix. What such an operation makes of a stack is the stack of what
it makes of each tensor (`Unstack.simplified`), so that it makes no difference to the numbers which are stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from attrs import evolve

from partita.compiler.layout import SUM
from partita.compiler.ops.op import Argument, Known, Op, ShardingRule, fields_of_several, op, permuted
from partita.compiler.ops.traits import Redundant
from partita.dsl.types import Axis, Type

# The axis along which matrices are stacked.
MATRIX = "matrix"


@fields_of_several
class OfMatrices(Op):
    """Base of operations that turn each matrix into another of its size, alike for it and its transpose, and for any
    order of its rows and columns.

    A matrix has rows along the axes `inner` and columns along the rest; along `stacked`, each is a matrix of its own.
    """

    inner: tuple[str, ...]
    stacked: tuple[str, ...]

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The same type."""
        return types

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Whole matrices."""
        return tuple(ShardingRule((name,), (name,)) for name in self.stacked)

    def sides(self, x: Type) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes of rows, and those of columns."""
        rest = tuple(name for name in x.names if name not in self.stacked)
        sides = [tuple(n for n in rest if n in self.inner), tuple(n for n in rest if n not in self.inner)]
        return sides[0], sides[1]

    def of(self, inner: tuple[str, ...], stacked: tuple[str, ...]) -> OfMatrices:
        """The same operation on matrices in other tensors."""
        return evolve(self, inner=inner, stacked=stacked)  # type: ignore[misc]

    def normal(self, x: Type) -> OfMatrices:
        """The same operation in a form that does not depend on which side is called that of the rows."""
        return self.of(min(self.sides(x)), tuple(name for name in x.names if name in self.stacked))


@op("stack")
class Stack(Op):
    """Stack matrices: operand i has its axes in `orders[i]`, of which the last ones become `names`, and the others, if
    any, stack several of its own. There are `count` matrices; zeros follow those of the operands.
    """

    orders: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]
    count: int
    rearranges = True

    def _own(self, i: int, x: Type) -> int:
        """The number of matrices of an operand."""
        return prod(x.axis(name).size for name in self.orders[i][: -len(self.names)])

    def starts(self, operands: Sequence[Type]) -> tuple[int, ...]:
        """The first matrix of each operand, and of what follows them."""
        starts = [0]
        for i, each in enumerate(operands):
            starts.append(starts[-1] + self._own(i, each))
        return tuple(starts)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """`matrix`, then `names`."""
        sizes = [tuple(x.axis(n).size for n in o[-len(self.names) :]) for x, o in zip(types, self.orders, strict=True)]
        assert all(sorted(x.names) == sorted(order) for x, order in zip(types, self.orders, strict=True)), (self, types)
        assert len(set(sizes)) == 1, (self, types)
        assert self.starts(types)[-1] <= self.count, (self, types)
        axes = (Axis(MATRIX, self.count), *map(Axis, self.names, sizes[0]))
        return (Type(types[0].dtype, axes),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the matrices, in all operands; linear in all of them jointly."""
        count = len(self.names)
        columns = zip(*(order[-count:] for order in self.orders), strict=True)
        split = (ShardingRule(states, (name,)) for states, name in zip(columns, self.names, strict=True))
        return (*split, ShardingRule((SUM,) * len(operands), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The zeros, and copies of operands in which axes become one that are not adjacent."""
        zeros = results[0].bytes - sum(x.bytes for x in operands)
        merging = zip(operands, self.orders, strict=True)
        return zeros + sum(x.bytes for x, order in merging if len(order) > len(self.names) + 1)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.cat`."""
        texts = []
        for x, order in zip(arguments, self.orders, strict=True):
            own = len(order) - len(self.names)
            view = permuted(x.text, x.type.names, order)
            texts.append(f"{view}[None]" if not own else view if own == 1 else f"{view}.flatten(0, {own - 1})")
        padding = self.count - self.starts([x.type for x in arguments])[-1]
        if padding:
            sizes = ", ".join(map(str, (padding, *results[0].shape[1:])))
            texts.append(f"{arguments[0].text}.new_zeros({sizes})")
        return f"torch.cat(({', '.join(texts)},))"


@op("unstack")
class Unstack(Redundant):
    """The matrices of a stack from `start` on as a tensor of their own, with `axes`: a view. `order` and `names` are as
    in `Stack`; `sizes` are those of the axes that the stack has merged.
    """

    start: int
    order: tuple[str, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    rearranges = True
    is_view = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The tensor's own axes."""
        (x,) = types
        assert x.names == (MATRIX, *self.names), (self, x)
        assert self.start + prod(self.sizes) <= x.axis(MATRIX).size, (self, x)
        sizes = dict(zip(self.order, (*self.sizes, *x.shape[1:]), strict=True))
        assert sorted(sizes) == sorted(self.axes), self
        return (Type(x.dtype, tuple(Axis(name, sizes[name]) for name in self.axes)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the matrices; linear."""
        own = self.order[len(self.sizes) :]
        split = (ShardingRule((name,), (axis,)) for name, axis in zip(self.names, own, strict=True))
        return (*split, ShardingRule((SUM,), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def simplified(self, known: Known, operands: Sequence[int]) -> tuple[Op | None, tuple[int, ...]] | None:
        """What was stacked; or what an operation on the stack makes of that alone."""
        op, inputs = known.made[operands[0]]
        whole = op if isinstance(op, OfMatrices) else None
        if whole is not None:
            op, inputs = known.made[inputs[0]]
        if not isinstance(op, Stack) or op.names != self.names:
            return None
        types = [known.types[number] for number in inputs]
        for number, type, order, start in zip(inputs, types, op.orders, op.starts(types)[:-1], strict=True):
            if start == self.start and order == self.order and type.names == self.axes:
                if tuple(type.axis(name).size for name in order[: len(self.sizes)]) != self.sizes:
                    return None
                if whole is None:
                    return None, (number,)
                alone = self._alone(whole, type)
                return None if alone is None else (alone, (number,))
        return None

    def _alone(self, whole: OfMatrices, type: Type) -> OfMatrices | None:
        """An operation on the stack as one on this tensor, unless it mixes the matrices of the stack."""
        if MATRIX not in whole.stacked:
            return None
        own = len(self.sizes)
        names = dict(zip(self.names, self.order[own:], strict=True))
        inner = tuple(names[name] for name in whole.inner)
        stacked = (*self.order[:own], *(names[name] for name in whole.stacked if name != MATRIX))
        return whole.of(inner, stacked).normal(type)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A part of the first axis."""
        (x,) = arguments
        own = len(self.sizes)
        view = f"{x.text}[{self.start}]" if not own else f"{x.text}.narrow(0, {self.start}, {prod(self.sizes)})"
        if own > 1:
            view += f".unflatten(0, ({', '.join(map(str, self.sizes))}))"
        return permuted(view, self.order, self.axes)
