"""Changes of layout along one mesh axis: collectives, and the local steps that need no communication.

Each takes one or more tensors at once (a bucket), with an entry of `axes` for each. Types are those of one rank.
Which layouts they lead from and to is `STEPS`' business in `partita.compiler.sharding.moves`; along the mesh axis
`over` of `parts` ranks:

| op | from | to |
|---|---|---|
| all_gather | split along an axis | whole |
| reduce_scatter | partial sum | split along an axis |
| all_reduce | partial sum or maximum | whole |
| all_to_all | split along one axis | split along another |
| part | whole | split along an axis (local) |
| once | whole | partial sum: the first rank's (local) |
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.ops.op import Argument, Op, Way, op
from partita.dsl.types import Type


class Move(Op):
    """Base of all changes of layout."""

    over: str
    parts: int

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """One for each operand."""
        return ("",) * self.count

    @property
    def count(self) -> int:
        """The number of tensors that travel together."""
        return 1

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """None: layouts are made of these, not the other way round."""
        return ()

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """None worth counting."""
        return 0


class Collective(Move):
    """A change of layout that communicates. Emitted as a start, and a wait before the first use of a result.

    `moved` is what each rank sends, in bytes, with ring algorithms (Thakur, Rabenseifner and Gropp 2005).
    """

    def moved(self, operands: Sequence[Type]) -> float:
        """Bytes that one rank sends."""
        raise NotImplementedError

    def start(self, arguments: Sequence[Argument]) -> str:
        """The call of the context that starts it; waiting for it gives a tuple of the results."""
        raise NotImplementedError

    def together(self, others: Sequence[Collective]) -> Collective:
        """All tensors of collectives of this kind (this one among them) in one."""
        raise NotImplementedError

    def _tensors(self, arguments: Sequence[Argument]) -> str:
        return f"({', '.join(argument.text for argument in arguments)},)"


def _positions(arguments: Sequence[Argument], axes: Sequence[str]) -> str:
    return f"({', '.join(str(a.type.position(axis)) for a, axis in zip(arguments, axes, strict=True))},)"


def _axes(collective: Collective) -> tuple[str, ...]:
    """The axis of each tensor."""
    assert isinstance(collective, (AllGather, ReduceScatter, AllToAll))
    return collective.axes


@op("all_gather")
class AllGather(Collective):
    """Every rank gets the whole of `axes[i]` of tensor i, parts in order of the coordinate."""

    over: str
    parts: int
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """As many as axes."""
        return len(self.axes)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is `parts` times as long."""
        pairs = zip(types, self.axes, strict=True)
        return tuple(type.resized(axis, type.axis(axis).size * self.parts) for type, axis in pairs)

    def moved(self, operands: Sequence[Type]) -> float:
        """(N−1) parts."""
        return sum(type.bytes for type in operands) * (self.parts - 1)

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.all_gather(mesh axis, tensors, dimensions)`."""
        return f"c.all_gather({self.over!r}, {self._tensors(arguments)}, {_positions(arguments, self.axes)})"

    def together(self, others: Sequence[Collective]) -> Collective:
        """With the axes of all."""
        return AllGather(self.over, self.parts, tuple(axis for other in others for axis in _axes(other)))


@op("reduce_scatter")
class ReduceScatter(Collective):
    """Every rank gets its part along `axes[i]` of the sum of tensor i."""

    over: str
    parts: int
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """As many as axes."""
        return len(self.axes)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is cut into `parts`."""
        pairs = zip(types, self.axes, strict=True)
        return tuple(type.resized(axis, type.axis(axis).size // self.parts) for type, axis in pairs)

    def moved(self, operands: Sequence[Type]) -> float:
        """K(N−1)/N."""
        return sum(type.bytes for type in operands) * (self.parts - 1) / self.parts

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.reduce_scatter(mesh axis, tensors, dimensions)`."""
        return f"c.reduce_scatter({self.over!r}, {self._tensors(arguments)}, {_positions(arguments, self.axes)})"

    def together(self, others: Sequence[Collective]) -> Collective:
        """With the axes of all."""
        return ReduceScatter(self.over, self.parts, tuple(axis for other in others for axis in _axes(other)))


@op("all_reduce")
class AllReduce(Collective):
    """Every rank gets the sum (or the maximum) of each tensor."""

    over: str
    parts: int
    tensors: int = 1
    maximum: bool = False

    @property
    def count(self) -> int:
        """As said."""
        return self.tensors

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The same."""
        return types

    def moved(self, operands: Sequence[Type]) -> float:
        """2K(N−1)/N."""
        return 2 * sum(type.bytes for type in operands) * (self.parts - 1) / self.parts

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.all_reduce(mesh axis, tensors, maximum)`."""
        return f"c.all_reduce({self.over!r}, {self._tensors(arguments)}, {self.maximum})"

    def together(self, others: Sequence[Collective]) -> Collective:
        """With the tensors of all."""
        return AllReduce(self.over, self.parts, sum(other.count for other in others), self.maximum)


@op("all_to_all")
class AllToAll(Collective):
    """From parts along `source[i]` to parts along `axes[i]`."""

    over: str
    parts: int
    source: tuple[str, ...]
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """As many as axes."""
        return len(self.axes)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """One axis `parts` times as long, the other cut."""
        return tuple(
            type.resized(old, type.axis(old).size * self.parts).resized(new, type.axis(new).size // self.parts)
            for type, old, new in zip(types, self.source, self.axes, strict=True)
        )

    def moved(self, operands: Sequence[Type]) -> float:
        """All but its own share of what it holds."""
        return sum(type.bytes for type in operands) * (self.parts - 1) / self.parts

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.all_to_all(mesh axis, tensors, gathered dimensions, cut dimensions)`."""
        gathered, cut = _positions(arguments, self.source), _positions(arguments, self.axes)
        return f"c.all_to_all({self.over!r}, {self._tensors(arguments)}, {gathered}, {cut})"

    def together(self, others: Sequence[Collective]) -> Collective:
        """With the axes of all."""
        source = tuple(axis for other in others if isinstance(other, AllToAll) for axis in other.source)
        return AllToAll(self.over, self.parts, source, tuple(axis for other in others for axis in _axes(other)))


@op("part")
class Part(Move):
    """This rank's part along an axis: a view, without communication."""

    over: str
    parts: int
    axis: str
    is_view = True

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
