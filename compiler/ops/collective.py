"""Changes of layout: collectives along one mesh axis, and local steps without communication.

Each takes one or more tensors (a bucket), and knows the states of each, before and after, along the mesh axis `over` of
`parts` ranks; but steps to and from a flat form (`Flatten`, `Unflatten`) keep all states. Types are local, of one rank.
`TRANSITIONS`, at the end, maps kinds of states before and after to operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from partita.compiler.layout import MAX, SUM, State, is_split
from partita.compiler.ops.buffers import Buffers, by_dtype, packed
from partita.compiler.ops.op import Argument, Op, ShardingRule, op, permuted
from partita.dsl.types import BYTES, Axis, Type

if TYPE_CHECKING:
    from partita.compiler.costs.links import Link

# The states of each tensor along the mesh axis, before and after.
StatePairs: TypeAlias = tuple[tuple[State, State], ...]
# The kind of all states that name an axis; other states are their own kinds.
SPLIT = "split"
# A local step costs next to nothing, but not zero: paths prefer fewer steps.
LOCAL_SECONDS = 1e-9


def kind_of(state: State) -> State:
    """A state, regardless of which axis is sharded."""
    return SPLIT if is_split(state) else state


class Reshard(Op):
    """Base of all changes of layout."""

    over: str
    parts: int
    # Whether that is all it does: it changes no values.
    reshards: ClassVar[bool] = True
    # Whether it is a step to or from a flat form, which keeps all states, and if so, whether to one.
    reforms: ClassVar[bool] = False
    flattens: ClassVar[bool] = False
    # Suffix of its results' names.
    made: ClassVar[str] = "moved"

    @classmethod
    def between(cls, over: str, parts: int, ends: StatePairs) -> Reshard:
        """The operation for tensors with these ends, which are all of one kind."""
        raise NotImplementedError

    @property
    def words(self) -> str:
        """What it does, for display: `all_gather over data`."""
        return f"{self.name} over {self.over}"

    @property
    def ends(self) -> StatePairs:
        """The states of each tensor along the mesh axis, before and after."""
        raise NotImplementedError

    def takes(self, order: tuple[str, ...]) -> bool:
        """Whether it takes elements in this order of axes."""
        return True

    @property
    def count(self) -> int:
        """The number of tensors in the bucket."""
        return len(self.ends)

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """One for each operand."""
        return ("",) * self.count

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """None: layouts are made of these operations, not the other way round."""
        return ()

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """None worth counting."""
        return 0

    def seconds(self, local_bytes: float, link: Link) -> tuple[float, float]:
        """Latency and transfer time over the mesh axis's link, for tensors of which a rank holds `local_bytes`."""
        return LOCAL_SECONDS, 0.0


class Collective(Reshard):
    """A change of layout that communicates. Emitted as a start, and a wait before the first use of a result.

    `moved` is what each rank sends, in bytes, with ring algorithms (Thakur, Rabenseifner and Gropp 2005).
    """

    fusible = False

    @property
    def bucket(self) -> tuple[object, ...]:
        """A key, equal for collectives that can be bucketed."""
        before, after = self.ends[0]
        return self.over, kind_of(before), kind_of(after)

    @property
    def combines(self) -> bool:
        """Whether it reduces partial sums or maxima."""
        return any(before in (SUM, MAX) for before, _ in self.ends)

    def moved(self, operands: Sequence[Type]) -> float:
        """Bytes that one rank sends."""
        raise NotImplementedError

    def buffers(self, operands: Sequence[Type], results: Sequence[Type], adds: bool) -> Buffers:
        """What it holds while it communicates; `adds`: ranks add what they receive (over Gloo). By default copies of
        what it sends, and as much that it receives, from which the results are copied.
        """
        rows = packed(operands, self.parts)
        return Buffers(rows, rows)

    def start(self, arguments: Sequence[Argument]) -> str:
        """The call on the context that starts it; waiting for it returns a tuple of the results."""
        raise NotImplementedError

    def together(self, others: Sequence[Collective]) -> Reshard:
        """One bucket of all tensors of these collectives, which are of one kind and include this one."""
        return self.between(self.over, self.parts, tuple(end for other in others for end in other.ends))

    def _tensors(self, arguments: Sequence[Argument]) -> str:
        return f"({', '.join(argument.text for argument in arguments)},)"


def _outermost(type: Type, axis: str) -> bool:
    """Whether parts along an axis follow one another in memory."""
    return all(each.size == 1 for each in type.axes[: type.position(axis)])


def _positions(arguments: Sequence[Argument], axes: Sequence[str]) -> str:
    return f"({', '.join(str(a.type.position(axis)) for a, axis in zip(arguments, axes, strict=True))},)"


@op("all_gather")
class AllGather(Collective):
    """Every rank gets the full `axes[i]` of tensor i, shards in order of the coordinate."""

    over: str
    parts: int
    axes: tuple[str, ...]
    made = "gathered"

    @classmethod
    def between(cls, over: str, parts: int, ends: StatePairs) -> Reshard:
        """Gathers the axes that are sharded before."""
        return cls(over, parts, tuple(str(before) for before, _ in ends))

    @property
    def ends(self) -> StatePairs:
        """From sharded to replicated."""
        return tuple((axis, None) for axis in self.axes)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is `parts` times as long."""
        pairs = zip(types, self.axes, strict=True)
        return tuple(type.resized(axis, type.axis(axis).size * self.parts) for type, axis in pairs)

    def seconds(self, local_bytes: float, link: Link) -> tuple[float, float]:
        """An all-gather of the result."""
        return link.gather(self.parts, local_bytes * self.parts)

    def buffers(self, operands: Sequence[Type], results: Sequence[Type], adds: bool) -> Buffers:
        """A tensor alone is sent as it is, and arrives in place if its shards follow one another in memory."""
        row = packed(operands)
        if self.count > 1:
            return Buffers(row, row * self.parts)
        return Buffers(0, row * self.parts, in_place=_outermost(operands[0], self.axes[0]), lent=(0,))

    def moved(self, operands: Sequence[Type]) -> float:
        """K(N−1), for shards of K bytes."""
        return sum(type.bytes for type in operands) * (self.parts - 1)

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.all_gather(mesh axis, tensors, dimensions)`."""
        return f"c.all_gather({self.over!r}, {self._tensors(arguments)}, {_positions(arguments, self.axes)})"


@op("reduce_scatter")
class ReduceScatter(Collective):
    """Every rank gets its shard along `axes[i]` of the sum of tensor i."""

    over: str
    parts: int
    axes: tuple[str, ...]
    made = "reduced"

    @classmethod
    def between(cls, over: str, parts: int, ends: StatePairs) -> Reshard:
        """Scatters along the axes that are sharded after."""
        return cls(over, parts, tuple(str(after) for _, after in ends))

    @property
    def ends(self) -> StatePairs:
        """From partial sum to sharded."""
        return tuple((SUM, axis) for axis in self.axes)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is divided by `parts`."""
        pairs = zip(types, self.axes, strict=True)
        return tuple(type.resized(axis, type.axis(axis).size // self.parts) for type, axis in pairs)

    def seconds(self, local_bytes: float, link: Link) -> tuple[float, float]:
        """A reduce-scatter of the operand."""
        return link.scatter(self.parts, local_bytes)

    def moved(self, operands: Sequence[Type]) -> float:
        """K(N−1)/N."""
        return sum(type.bytes for type in operands) * (self.parts - 1) / self.parts

    def buffers(self, operands: Sequence[Type], results: Sequence[Type], adds: bool) -> Buffers:
        """Of each dtype, a tensor alone is sent as it is, if its shards are contiguous. If the ranks do the addition,
        they receive the parts of all and make the sum; else that arrives.
        """
        buffers = Buffers()
        for own in by_dtype(zip(operands, self.axes, range(self.count), strict=True)):
            rows = packed([type for type, *_ in own], self.parts)
            type, axis, position = own[0]
            lent = (position,) if len(own) == 1 and _outermost(type, axis) else ()
            sent, part = 0 if lent else rows, rows // self.parts
            buffers += Buffers(sent, rows, part, lent=lent) if adds else Buffers(sent, part, in_place=True, lent=lent)
        return buffers

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.reduce_scatter(mesh axis, tensors, dimensions)`."""
        return f"c.reduce_scatter({self.over!r}, {self._tensors(arguments)}, {_positions(arguments, self.axes)})"


@op("all_reduce")
class AllReduce(Collective):
    """Every rank gets the sum (or the maximum) of each tensor."""

    over: str
    parts: int
    tensors: int = 1
    maximum: bool = False
    made = "reduced"

    @classmethod
    def between(cls, over: str, parts: int, ends: StatePairs) -> Reshard:
        """Of as many sums, or maxima, as there are ends."""
        return cls(over, parts, len(ends), ends[0][0] == MAX)

    @property
    def ends(self) -> StatePairs:
        """From partial sum or maximum to replicated."""
        return ((MAX if self.maximum else SUM, None),) * self.tensors

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operands' types."""
        return types

    def seconds(self, local_bytes: float, link: Link) -> tuple[float, float]:
        """An all-reduce, by ring or tree."""
        return link.add(self.parts, local_bytes)

    def moved(self, operands: Sequence[Type]) -> float:
        """2K(N−1)/N."""
        return 2 * sum(type.bytes for type in operands) * (self.parts - 1) / self.parts

    def buffers(self, operands: Sequence[Type], results: Sequence[Type], adds: bool) -> Buffers:
        """All arrives in place. If the ranks do the addition, each makes its part of the sum, for which what is sent is
        filled up, unless it is one tensor that is long enough: that is sent as it is. Else the sum takes the place of
        what is sent.
        """
        buffers = Buffers()
        for own in by_dtype(zip(operands, range(self.count), strict=True)):
            row = packed([type for type, _ in own])
            type, position = own[0]
            filled = row + -row % (self.parts * BYTES[type.dtype])
            lent = (position,) if len(own) == 1 and filled == row else ()
            in_place = Buffers(0 if lent else filled, filled, adding=filled // self.parts, in_place=True, lent=lent)
            buffers += in_place if adds else Buffers(0, row, in_place=True)
        return buffers

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.all_reduce(mesh axis, tensors, maximum)`."""
        return f"c.all_reduce({self.over!r}, {self._tensors(arguments)}, {self.maximum})"


@op("all_to_all")
class AllToAll(Collective):
    """From shards along `source[i]` to shards along `axes[i]`."""

    over: str
    parts: int
    source: tuple[str, ...]
    axes: tuple[str, ...]

    @classmethod
    def between(cls, over: str, parts: int, ends: StatePairs) -> Reshard:
        """From the axes before to the axes after."""
        return cls(over, parts, tuple(str(before) for before, _ in ends), tuple(str(after) for _, after in ends))

    @property
    def ends(self) -> StatePairs:
        """From sharded along one axis to sharded along another."""
        return tuple(zip(self.source, self.axes, strict=True))

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """One axis is `parts` times as long, the other divided by `parts`."""
        return tuple(
            type.resized(old, type.axis(old).size * self.parts).resized(new, type.axis(new).size // self.parts)
            for type, old, new in zip(types, self.source, self.axes, strict=True)
        )

    def seconds(self, local_bytes: float, link: Link) -> tuple[float, float]:
        """An exchange with every other rank."""
        return link.exchange(self.parts, local_bytes)

    def moved(self, operands: Sequence[Type]) -> float:
        """K(N−1)/N: everything except its own share."""
        return sum(type.bytes for type in operands) * (self.parts - 1) / self.parts

    def buffers(self, operands: Sequence[Type], results: Sequence[Type], adds: bool) -> Buffers:
        """A tensor alone is sent as it is if its parts follow one another in memory, and arrives in place if what has
        been gathered does.
        """
        if self.count > 1:
            return super().buffers(operands, results, adds)
        (type,), (before,), (after,) = operands, self.source, self.axes
        lent = (0,) if _outermost(type, after) else ()
        return Buffers(0 if lent else type.bytes, type.bytes, in_place=_outermost(results[0], before), lent=lent)

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.all_to_all(mesh axis, tensors, gathered dimensions, split dimensions)`."""
        gathered, cut = _positions(arguments, self.source), _positions(arguments, self.axes)
        return f"c.all_to_all({self.over!r}, {self._tensors(arguments)}, {gathered}, {cut})"


@op("part")
class Part(Reshard):
    """This rank's shard along an axis: a view, without communication."""

    over: str
    parts: int
    axis: str
    is_view = True
    made = "part"

    @classmethod
    def between(cls, over: str, parts: int, ends: StatePairs) -> Reshard:
        """Along the axis that is sharded after."""
        ((_, after),) = ends
        return cls(over, parts, str(after))

    @property
    def ends(self) -> StatePairs:
        """From replicated to sharded."""
        return ((None, self.axis),)

    @property
    def reads_context(self) -> bool:
        """The rank's coordinate."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is divided by `parts`."""
        return (types[0].resized(self.axis, types[0].axis(self.axis).size // self.parts),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`narrow` at the rank's coordinate."""
        (x,) = arguments
        size = results[0].axis(self.axis).size
        return f"{x.text}.narrow({x.type.position(self.axis)}, c.coordinates[{self.over!r}] * {size}, {size})"


@op("once")
class KeepOnFirst(Reshard):
    """The tensor on the first rank, zeros on the others: turns a replicated value into a partial sum."""

    over: str
    parts: int

    @classmethod
    def between(cls, over: str, parts: int, ends: StatePairs) -> Reshard:
        """Of one tensor."""
        return cls(over, parts)

    @property
    def ends(self) -> StatePairs:
        """From replicated to partial sum."""
        return ((None, SUM),)

    @property
    def reads_context(self) -> bool:
        """The rank's coordinate."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand's type."""
        return types

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Selects by the rank's coordinate; a product with 0 would turn infinities into NaN."""
        (x,) = arguments
        return f"({x.text} if c.coordinates[{self.over!r}] == 0 else torch.zeros_like({x.text}))"


class Reform(Reshard):
    """Base of steps between a tensor's own axes and its flat form (`partita.compiler.layout.Flat`)."""

    reforms = True

    @property
    def words(self) -> str:
        """Its name."""
        return self.name

    @property
    def ends(self) -> StatePairs:
        """Those of every mesh axis stay."""
        return ((None, None),)


@op("flatten")
class Flatten(Reform):
    """A tensor of so many `elements`, in the `order` of its axes, as one `axis` of `size`, with zeros at its end; axes
    `kept` have one position. Without zeros it is a view.
    """

    axis: str
    order: tuple[str, ...]
    elements: int
    size: int
    kept: tuple[str, ...] = ()
    fusible = False
    flattens = True
    made = "flat"

    def takes(self, order: tuple[str, ...]) -> bool:
        """Its own."""
        return self.order == order

    @property
    def is_view(self) -> bool:  # type: ignore[override]
        """Whether there is nothing to add."""
        return self.elements == self.size

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The flat axis first."""
        assert types[0].elements == self.elements <= self.size, (self, types)
        assert sorted(types[0].names) == sorted(self.order), (self, types)
        return (Type(types[0].dtype, (Axis(self.axis, self.size), *(Axis(name, 1) for name in self.kept))),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`reshape`, or a kernel of the runtime that copies it."""
        (x,) = arguments
        text = permuted(x.text, x.type.names, self.order)
        return f"{text}.reshape({results[0].shape})" if self.is_view else f"kernels.flatten({text}, {results[0].shape})"


@op("unflatten")
class Unflatten(Reform):
    """A flat tensor with its own `axes` again, which are those of a shard: a view."""

    axes: tuple[Axis, ...]
    is_view = True
    made = "whole"

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes, of which there are as many elements at least."""
        result = Type(types[0].dtype, self.axes)
        assert result.elements <= types[0].elements, (self, types)
        return (result,)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`narrow`, without the zeros."""
        return f"{arguments[0].text}.flatten().narrow(0, 0, {results[0].elements}).view({results[0].shape})"


# The operation for each change of layout that takes one step, by the kinds of the states before and after. Others take
# several steps.
TRANSITIONS: Mapping[tuple[State, State], type[Reshard]] = {
    (SPLIT, None): AllGather,
    (SPLIT, SPLIT): AllToAll,
    (SUM, None): AllReduce,
    (SUM, SPLIT): ReduceScatter,
    (MAX, None): AllReduce,
    (None, SPLIT): Part,
    (None, SUM): KeepOnFirst,
}


def transition(over: str, parts: int, before: State, after: State) -> Reshard | None:
    """The operation from one state to another along a mesh axis; None if no single one does it."""
    operation = TRANSITIONS.get((kind_of(before), kind_of(after)))
    return None if operation is None or before == after else operation.between(over, parts, ((before, after),))


# Those that make each piece of their result, if they have one tensor, of the same piece of all ranks' operands.
PIECEWISE = (AllGather, ReduceScatter, AllReduce)


def is_reshard(op: Op) -> bool:
    """Whether it changes the layout of tensors but not their values."""
    return isinstance(op, Reshard) and op.reshards
