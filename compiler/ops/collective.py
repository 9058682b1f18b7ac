"""Changes of layout along one mesh axis: collectives, and the local steps that need no communication.

Each takes one or more tensors at once (a bucket), and knows for each the states along the mesh axis `over`, of `parts`
ranks, that it leads from and to. Types are those of one rank. `TRANSITIONS`, at the end, says which operation leads
from which kind of state to which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from partita.compiler.layout import MAX, SUM, State, is_split
from partita.compiler.ops.op import Argument, Op, Way, op
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.costs.links import Link

# The states of each tensor along the mesh axis, before and after.
Ends: TypeAlias = tuple[tuple[State, State], ...]
# The kind of a state that names an axis. Others are kinds by themselves.
SPLIT = "split"
# A local step costs next to nothing, but more than none.
LOCAL_SECONDS = 1e-9


def kind_of(state: State) -> State:
    """A state, whichever axis is split."""
    return SPLIT if is_split(state) else state


class Move(Op):
    """Base of all changes of layout."""

    over: str
    parts: int
    reshards = True
    # What the name of a value that it makes ends with.
    made: ClassVar[str] = "moved"

    @classmethod
    def between(cls, over: str, parts: int, ends: Ends) -> Move:
        """The operation for tensors with these ends, which are of one kind."""
        raise NotImplementedError

    @property
    def ends(self) -> Ends:
        """The states of each tensor along the mesh axis, before and after."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """The number of tensors that travel together."""
        return len(self.ends)

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """One for each operand."""
        return ("",) * self.count

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """None: layouts are made of these, not the other way round."""
        return ()

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """None worth counting."""
        return 0

    def seconds(self, held: float, link: Link) -> tuple[float, float]:
        """Of tensors of which a rank holds so many bytes, over the mesh axis's link: the latency, and the time that
        the bytes take.
        """
        return LOCAL_SECONDS, 0.0


class Collective(Move):
    """A change of layout that communicates. Emitted as a start, and a wait before the first use of a result.

    `moved` is what each rank sends, in bytes, with ring algorithms (Thakur, Rabenseifner and Gropp 2005).
    """

    communicates = True
    fusible = False

    @property
    def bucket(self) -> tuple[object, ...]:
        """Collectives of which this is equal can travel together."""
        before, after = self.ends[0]
        return self.over, kind_of(before), kind_of(after)

    @property
    def combines(self) -> bool:
        """Whether it makes its results of parts of sums or maxima."""
        return any(before in (SUM, MAX) for before, _ in self.ends)

    def moved(self, operands: Sequence[Type]) -> float:
        """Bytes that one rank sends."""
        raise NotImplementedError

    def buffer(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """What it sends and what it gets, once more."""
        return sum(type.bytes for type in (*operands, *results))

    def start(self, arguments: Sequence[Argument]) -> str:
        """The call of the context that starts it; waiting for it gives a tuple of the results."""
        raise NotImplementedError

    def together(self, others: Sequence[Collective]) -> Move:
        """All tensors of collectives of this kind (this one among them) in one."""
        return self.between(self.over, self.parts, tuple(end for other in others for end in other.ends))

    def _tensors(self, arguments: Sequence[Argument]) -> str:
        return f"({', '.join(argument.text for argument in arguments)},)"


def _positions(arguments: Sequence[Argument], axes: Sequence[str]) -> str:
    return f"({', '.join(str(a.type.position(axis)) for a, axis in zip(arguments, axes, strict=True))},)"


@op("all_gather")
class AllGather(Collective):
    """Every rank gets the whole of `axes[i]` of tensor i, parts in order of the coordinate."""

    over: str
    parts: int
    axes: tuple[str, ...]
    made = "gathered"

    @classmethod
    def between(cls, over: str, parts: int, ends: Ends) -> Move:
        """Of the axes that are split before."""
        return cls(over, parts, tuple(str(before) for before, _ in ends))

    @property
    def ends(self) -> Ends:
        """From split to whole."""
        return tuple((axis, None) for axis in self.axes)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is `parts` times as long."""
        pairs = zip(types, self.axes, strict=True)
        return tuple(type.resized(axis, type.axis(axis).size * self.parts) for type, axis in pairs)

    def seconds(self, held: float, link: Link) -> tuple[float, float]:
        """To gather as much from every rank."""
        return link.gather(self.parts, held * self.parts)

    def moved(self, operands: Sequence[Type]) -> float:
        """(N−1) parts."""
        return sum(type.bytes for type in operands) * (self.parts - 1)

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.all_gather(mesh axis, tensors, dimensions)`."""
        return f"c.all_gather({self.over!r}, {self._tensors(arguments)}, {_positions(arguments, self.axes)})"


@op("reduce_scatter")
class ReduceScatter(Collective):
    """Every rank gets its part along `axes[i]` of the sum of tensor i."""

    over: str
    parts: int
    axes: tuple[str, ...]
    made = "reduced"

    @classmethod
    def between(cls, over: str, parts: int, ends: Ends) -> Move:
        """Along the axes that are split after."""
        return cls(over, parts, tuple(str(after) for _, after in ends))

    @property
    def ends(self) -> Ends:
        """From parts of a sum to split."""
        return tuple((SUM, axis) for axis in self.axes)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is cut into `parts`."""
        pairs = zip(types, self.axes, strict=True)
        return tuple(type.resized(axis, type.axis(axis).size // self.parts) for type, axis in pairs)

    def seconds(self, held: float, link: Link) -> tuple[float, float]:
        """As to gather it."""
        return link.gather(self.parts, held)

    def moved(self, operands: Sequence[Type]) -> float:
        """K(N−1)/N."""
        return sum(type.bytes for type in operands) * (self.parts - 1) / self.parts

    def buffer(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Where ranks themselves add, the parts that they add too."""
        return super().buffer(operands, results) + sum(type.bytes for type in operands)

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
    def between(cls, over: str, parts: int, ends: Ends) -> Move:
        """Of so many sums or maxima."""
        return cls(over, parts, len(ends), ends[0][0] == MAX)

    @property
    def ends(self) -> Ends:
        """From parts of a sum, or of a maximum, to the whole."""
        return ((MAX if self.maximum else SUM, None),) * self.tensors

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The same."""
        return types

    def seconds(self, held: float, link: Link) -> tuple[float, float]:
        """To sum it for every rank."""
        return link.add(self.parts, held)

    def moved(self, operands: Sequence[Type]) -> float:
        """2K(N−1)/N."""
        return 2 * sum(type.bytes for type in operands) * (self.parts - 1) / self.parts

    def buffer(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Where ranks themselves add, each of two or more the parts that it adds too."""
        return super().buffer(operands, results) + sum(type.bytes for type in results) // 2

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.all_reduce(mesh axis, tensors, maximum)`."""
        return f"c.all_reduce({self.over!r}, {self._tensors(arguments)}, {self.maximum})"


@op("all_to_all")
class AllToAll(Collective):
    """From parts along `source[i]` to parts along `axes[i]`."""

    over: str
    parts: int
    source: tuple[str, ...]
    axes: tuple[str, ...]

    @classmethod
    def between(cls, over: str, parts: int, ends: Ends) -> Move:
        """From axes to axes."""
        return cls(over, parts, tuple(str(before) for before, _ in ends), tuple(str(after) for _, after in ends))

    @property
    def ends(self) -> Ends:
        """From split to split otherwise."""
        return tuple(zip(self.source, self.axes, strict=True))

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """One axis `parts` times as long, the other cut."""
        return tuple(
            type.resized(old, type.axis(old).size * self.parts).resized(new, type.axis(new).size // self.parts)
            for type, old, new in zip(types, self.source, self.axes, strict=True)
        )

    def seconds(self, held: float, link: Link) -> tuple[float, float]:
        """To exchange its parts with every rank."""
        return link.exchange(self.parts, held)

    def moved(self, operands: Sequence[Type]) -> float:
        """All but its own share of what it holds."""
        return sum(type.bytes for type in operands) * (self.parts - 1) / self.parts

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.all_to_all(mesh axis, tensors, gathered dimensions, cut dimensions)`."""
        gathered, cut = _positions(arguments, self.source), _positions(arguments, self.axes)
        return f"c.all_to_all({self.over!r}, {self._tensors(arguments)}, {gathered}, {cut})"


@op("part")
class Part(Move):
    """This rank's part along an axis: a view, without communication."""

    over: str
    parts: int
    axis: str
    is_view = True
    made = "part"

    @classmethod
    def between(cls, over: str, parts: int, ends: Ends) -> Move:
        """Along the axis that is split after."""
        ((_, after),) = ends
        return cls(over, parts, str(after))

    @property
    def ends(self) -> Ends:
        """From whole to split."""
        return ((None, self.axis),)

    @property
    def reads_context(self) -> bool:
        """The rank's place."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is cut into `parts`."""
        return (types[0].resized(self.axis, types[0].axis(self.axis).size // self.parts),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`narrow` at the rank's coordinate."""
        (x,) = arguments
        size = results[0].axis(self.axis).size
        return f"{x.text}.narrow({x.type.position(self.axis)}, c.coordinates[{self.over!r}] * {size}, {size})"


@op("once")
class Once(Move):
    """The first rank's tensor, zeros on the others: a whole value as a partial sum, so that it counts once."""

    over: str
    parts: int

    @classmethod
    def between(cls, over: str, parts: int, ends: Ends) -> Move:
        """Of one tensor."""
        return cls(over, parts)

    @property
    def ends(self) -> Ends:
        """From whole to parts of a sum."""
        return ((None, SUM),)

    @property
    def reads_context(self) -> bool:
        """The rank's place."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The same."""
        return types

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A choice by the rank's coordinate; not a product, since what is dropped may be infinite."""
        (x,) = arguments
        return f"({x.text} if c.coordinates[{self.over!r}] == 0 else torch.zeros_like({x.text}))"


# Every change of layout that is one step: the kind of state before and after, and the operation that leads from the one
# to the other. From or to anything else it takes several.
TRANSITIONS: Mapping[tuple[State, State], type[Move]] = {
    (SPLIT, None): AllGather,
    (SPLIT, SPLIT): AllToAll,
    (SUM, None): AllReduce,
    (SUM, SPLIT): ReduceScatter,
    (MAX, None): AllReduce,
    (None, SPLIT): Part,
    (None, SUM): Once,
}


def transition(over: str, parts: int, before: State, after: State) -> Move | None:
    """The operation that leads from one state to another along a mesh axis; None where no single one does."""
    found = TRANSITIONS.get((kind_of(before), kind_of(after)))
    return None if found is None or before == after else found.between(over, parts, ((before, after),))
