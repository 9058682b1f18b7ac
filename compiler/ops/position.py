"""Operations that know the position of their shard in the global tensor: indices, rotary embedding, random numbers.

Operations that look up or count along an axis (`gather`, `pick`, `first_index`, …) are `Positioned` too.

`shards` has an entry (axis, mesh axis, parts) for each cut of an axis, outermost first. A rank's shard begins at its
size times its index, whose digits are the rank's coordinates. Microbatches are the mesh axis `time`, and slices of
their sequence the mesh axis `slice`. Parts that are gone through one after the other are the mesh axis `position`: they
begin at the context's position. Entries of `ORDERS` are no cuts: an axis in zigzag order (`partita.compiler.ops.runs`)
has one of the mesh axis `zigzag`, with the number of ranks that the order is for; one of several batches, each of which
is padded, has two, `real` with the rows of a batch and `padded` with how many it has with its padding.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from hashlib import blake2b
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve

from partita.compiler.layout import SUM
from partita.compiler.ops.intervals import ANY, Interval
from partita.compiler.ops.op import (
    Argument,
    Op,
    ShardingRule,
    agree,
    aligned_rules,
    broadcast,
    make,
    mentions,
    op,
    permuted,
    wide_bytes,
    widening_bytes,
)
from partita.compiler.ops.pointwise import cast, pointwise
from partita.compiler.ops.traits import CachesTable
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value

Shards = tuple[tuple[str, str, int], ...]
TIME = "time"
SLICE = "slice"
POSITION = "position"  # always the outermost cut
ZIGZAG, REAL, PADDED = "zigzag", "real", "padded"
ORDERS = (ZIGZAG, REAL, PADDED)

# Bytes of what says for an id where in a shard it is, or that it is elsewhere.
PLACE = 24


def offset_text(axis: Axis, shards: Shards) -> str:
    """Source text of the global index at which this shard of `axis` begins."""
    over = [(mesh_axis, parts) for name, mesh_axis, parts in shards if name == axis.name and mesh_axis not in ORDERS]
    if not over:
        return "0"
    real, padded = _rows_of_batches(axis.name, shards)
    if padded:
        at = offset_text(axis, tuple((axis.name, *cut) for cut in over))
        return f"({at}) // {padded} * {real} + ({at}) % {padded}"
    text, times = "", {TIME: "c.microbatch", SLICE: "c.slice"}
    if over[0][0] == POSITION:
        inner = offset_text(axis, tuple((axis.name, *cut) for cut in over[1:]))
        return "c.position" if inner == "0" else f"(c.position + {inner})"
    for mesh_axis, parts in over:
        coordinate = times.get(mesh_axis) or f"c.coordinates[{mesh_axis!r}]"
        text = f"({text} * {parts} + {coordinate})" if text else coordinate
    return f"{text} * {axis.size}"


def _rows_of_batches(axis: str, shards: Shards) -> tuple[int, int]:
    """The rows of each of several batches along an axis, and those with padding; zeros if none are padded."""
    found = {over: number for name, over, number in shards if name == axis}
    return found.get(REAL, 0), found.get(PADDED, 0)


def zigzag_ranks(axis: str, shards: Shards) -> int | None:
    """For how many ranks an axis is in zigzag order; None if it is not."""
    return next((ranks for name, mesh_axis, ranks in shards if name == axis and mesh_axis == ZIGZAG), None)


def whole_size(axis: Axis, shards: Shards) -> int:
    """The size of the global axis, of which `axis` is a shard."""
    return axis.size * prod(parts for name, over, parts in shards if name == axis.name and over not in ORDERS)


def positions_code_of(axis: Axis, shards: Shards) -> str:
    """Source text of the positions at which the elements of a shard stand: the first one if they follow each other,
    runs of them in zigzag order.
    """
    start, ranks = offset_text(axis, shards), zigzag_ranks(axis.name, shards)
    if ranks is None:
        return start
    return f"kernels.zigzag_runs({start}, {axis.size}, {whole_size(axis, shards)}, {ranks})"


def start_argument(axis: Axis, shards: Shards, guarded: bool = False) -> str:
    """Source text of a kernel's last argument, the index at which this shard begins. Empty if `axis` is not sharded,
    unless indices may be out of range.
    """
    start = offset_text(axis, shards)
    return "" if start == "0" and not guarded else f", {start}"


def random_bytes(distribution: str, elements: int) -> int:
    """Bytes of the numbers that random ones are made from: coordinates, and words of 64 bits with what is mixed in; of
    normal numbers the first word as well, while the second is made.
    """
    return (32 if distribution == "normal" else 24) * elements


def random_text(
    distribution: str,
    scale: float,
    key: str,
    shape: Sequence[int],
    starts: Sequence[str],
    whole: Sequence[tuple[str, int]],
    dtype: str,
) -> str:
    """Source text of random numbers (docs/random.md): those of a region of the tensor whose axes are `whole`. `starts`
    are the texts of its positions along each (`positions_code_of`).
    """
    number = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1
    begins = ", ".join(starts) + ("," if starts else "")
    region = f"{tuple(shape)}, ({begins}), {tuple(size for _, size in whole)}"
    return f"kernels.random(c, {distribution!r}, {scale!r}, {number}, {region}, {dtype!r})"


class Positioned(Op):
    """Base of operations whose shards depend on their position in the global tensor.

    With `finds_positions`, its source asks for the positions of a shard (`positions_code_of`), in any order.
    """

    shards: Shards
    finds_positions: ClassVar[bool] = False

    @property
    def microbatch_dependent(self) -> bool:
        """Whether an axis is cut into microbatches, or these into slices."""
        return any(mesh_axis in (TIME, SLICE) for _, mesh_axis, _ in self.shards)

    @property
    def slices(self) -> frozenset[int]:
        """The parts of these cuts."""
        return frozenset(parts for _, mesh_axis, parts in self.shards if mesh_axis == SLICE)

    @property
    def begins(self) -> tuple[str, ...]:
        """The axes whose shard offsets its source contains."""
        return ()

    @property
    def reads_context(self) -> bool:
        """Whether such an axis is sharded."""
        return any(axis in self.begins for axis, _, _ in self.shards)

    def sharded(self, axis: str, size: int, mesh_axis: str, parts: int) -> Op:
        """With this cut appended."""
        shards = (*self.shards, (axis, mesh_axis, parts))
        return evolve(self.resized(axis, size), shards=shards)  # type: ignore[misc]

    def unsharded(self, keep: Collection[str | None]) -> Op:
        """Only the cuts along those mesh axes; orders stay."""
        shards = tuple(shard for shard in self.shards if shard[1] in keep or shard[1] in ORDERS)
        return evolve(self, shards=shards)  # type: ignore[misc]

    def of_batches(self, axis: str, real: int, padded: int) -> Op:
        """The operation on several batches, of which each is padded to so many of its real rows."""
        shards = ((axis, REAL, real), (axis, PADDED, padded), *self.shards)
        return evolve(self, shards=shards)  # type: ignore[misc]

    def in_zigzag(self, axis: str, ranks: int) -> Op | None:
        """With the order among its shards."""
        if not self.finds_positions or not mentions(self, axis):
            return super().in_zigzag(axis, ranks)
        return evolve(self, shards=((axis, ZIGZAG, ranks), *self.shards))  # type: ignore[misc]


@op("iota")
class Iota(Positioned):
    """0, 1, 2, … along an axis, i64."""

    axis: Axis
    shards: Shards = ()
    duplicable = True
    finds_positions = True

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """Indices of the axis."""
        return 0, self.axis.size - 1

    @property
    def reads_context(self) -> bool:
        """For the device."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """i64 with the axis."""
        return (Type("i64", (self.axis,)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """The axis."""
        return (ShardingRule((), (self.axis.name,)),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`arange`."""
        start = positions_code_of(self.axis, self.shards)
        if start == "0":
            return f"torch.arange({self.axis.size}, device=c.device)"
        if zigzag_ranks(self.axis.name, self.shards) is not None:
            return f"kernels.positions({start}, c.device)"
        return f"torch.arange({start}, {start} + {self.axis.size}, device=c.device)"


def where_compared(build: Builder, comparison: str, rows: Axis, columns: Axis, dtype: str) -> Value:
    """The matrix that is one where the indices of its row and its column compare so, and else zero."""
    row, column = (build.apply(Iota(axis)) for axis in (rows, columns))
    return cast(build, pointwise(build, comparison, build.apply(make("expand", (columns,)), row), column), dtype)


class Rotation(Op):
    """Base of rotary embeddings: of x, and what else says where its elements stand."""

    pairs: str
    interleaved: bool
    part: float
    inverse: bool

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of x."""
        return types[:1]

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A complex product for each pair."""
        return 3 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Products of the halves, and the halves that are concatenated; in 16 bits also the halves in 32; and what is
        moved to be turned.
        """
        x = operands[0]
        return 2 * (wide_bytes(x) + widening_bytes(x)) + x.bytes * (2 * self.interleaved + (self.part < 1))

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The inverse rotation."""
        back = evolve(self, inverse=not self.inverse)  # type: ignore[misc]
        return build.apply(back, d, *node.inputs[1:]), *(None for _ in node.inputs[1:])

    def turned(self, x: Type) -> int:
        """How many of `pairs` are rotated."""
        return round(self.part * x.axis(self.pairs).size)

    def options_text(self, x: Type) -> str:
        """Source text of the kernel's arguments that say which of them."""
        text = ", interleaved=True" if self.interleaved else ""
        return f"{text}, turned={self.turned(x)}" if self.part < 1 else text


@op("rope")
class Rope(CachesTable, Rotation, Positioned):
    """Rotary position embedding: the two halves of `pairs` rotated by position(over) / base^(i / half). `interleaved`:
    neighbours instead of halves; and of a `part` of `pairs`, the first ones: all others stay.

    With `inverse` by the negative angle, which is the gradient. Su et al., arXiv 2104.09864. `scaling` is the name of
    how wavelengths are stretched, and its arguments (`partita.runtime.kernels.positions`).
    """

    over: str
    pairs: str
    base: float
    scaling: tuple[Any, ...] | None = None
    interleaved: bool = False
    part: float = 1.0
    inverse: bool = False
    shards: Shards = ()
    finds_positions = True

    def kernel_table(self, operands: Sequence[Type]) -> tuple[Hashable, int] | None:
        """Sines and cosines for all positions of the global axis; on a GPU others turn back, and parts of the axis that
        have another size, as slices and an evaluation without them, have tables of their own.
        """
        (x,) = operands
        size, pairs = x.axis(self.over).size, self.turned(x)
        numbers = self._length(x) * pairs
        if zigzag_ranks(self.over, self.shards) is not None:
            numbers += size * pairs  # those of the shard, in its order
        key = (numbers, size, pairs, self.base, self.scaling, x.dtype, self.inverse)
        return key, numbers * wide_bytes(x) // x.elements

    def _length(self, x: Type) -> int:
        """The size of the global axis."""
        return whole_size(x.axis(self.over), self.shards)

    @property
    def begins(self) -> tuple[str, ...]:
        """Positions."""
        return (self.over,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but `pairs`; linear."""
        return (*aligned_rules(operands, results, whole=[self.pairs]), ShardingRule((SUM,), (SUM,)))

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime on [others, over, pairs]."""
        (x,) = arguments
        rest = [name for name in x.type.names if name not in (self.over, self.pairs)]
        order = [*rest, self.over, self.pairs]
        start = positions_code_of(x.type.axis(self.over), self.shards)
        back = [order.index(name) for name in x.type.names]
        view = permuted(x.text, x.type.names, order)
        more = f", {self.scaling!r}" if self.scaling else ""
        if start != "0":
            more += f", length={self._length(x.type)}"
        return f"kernels.rope({view}, {start}, {self.base!r}, {self.inverse}, {back}{more}{self.options_text(x.type)})"


@op("rope_at")
class RopeAt(Rotation):
    """`Rope` with positions that are given: integers that have some of the axes of x, but not `pairs`. With `sections`
    they have an axis more, of as many: each turns so many pairs, one after the other (M-RoPE, arXiv 2409.12191).
    """

    pairs: str
    base: float
    scaling: tuple[Any, ...] | None = None
    interleaved: bool = False
    part: float = 1.0
    inverse: bool = False
    sections: tuple[int, ...] = ()

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but `pairs`; linear in x."""
        return (*aligned_rules(operands, results, whole=[self.pairs]), ShardingRule((SUM, None), (SUM,)))

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """That of a rotation, and angles with their sines and cosines in f64, then in the dtype of x."""
        x, ids = operands
        return super().workspace(operands, results) + 5 * 8 * (ids.elements * self.turned(x) // 2)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime on [others, pairs]."""
        x, ids = arguments
        order = [*(name for name in x.type.names if name != self.pairs), self.pairs]
        each = [name for name in ids.type.names if not x.type.has(name)]
        at = broadcast(ids, [*order[:-1], *each]) if ids.type.axes else ids.text
        more = f", {self.scaling!r}" if self.scaling else ""
        more += f", sections={self.sections}" if self.sections else ""
        view = permuted(x.text, x.type.names, order)
        turned = f"kernels.rope_at({view}, {at}, {self.base!r}, {self.inverse}{more}{self.options_text(x.type)})"
        return permuted(turned, order, x.type.names)


@op("random")
class Random(Positioned):
    """Random numbers, a function of (seed, step, `key`, coordinates in the global tensor).

    `distribution` is `normal` (times `scale`), `uniform` (in ±`scale`), `gumbel`, `integers` (below `scale`) or `keep`
    (bool, true with probability 1 − `scale`). `whole` lists the axes with their global sizes, in the order in which
    coordinates are counted.
    """

    distribution: str
    scale: float
    key: str
    axes: tuple[Axis, ...]
    whole: tuple[tuple[str, int], ...]
    dtype: str
    shards: Shards = ()
    duplicable = True
    random = True
    fusible = False
    finds_positions = True

    @property
    def structural_key(self) -> Op:
        """Of any key."""
        return Random(self.distribution, self.scale, "", self.axes, self.whole, self.dtype, self.shards)

    @property
    def label(self) -> str:
        """`keep` or `random`."""
        return "keep" if self.distribution == "keep" else "random"

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """Integers are below their limit."""
        return (0, self.scale - 1) if self.distribution == "integers" else ANY

    @property
    def reads_context(self) -> bool:
        """For the seed and the step."""
        return True

    def vmapped(self, axis: Axis) -> Op | None:
        """With numbers of its own at each position."""
        return evolve(self, axes=(axis, *self.axes), whole=((axis.name, axis.size), *self.whole))  # type: ignore[misc]

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """`dtype` and `axes`."""
        return (Type(self.dtype, self.axes),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return tuple(ShardingRule((), (axis.name,)) for axis in self.axes)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """An integer hash for each element."""
        return 20 * results[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Coordinates and words."""
        return random_bytes(self.distribution, results[0].elements)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime: a hash of the coordinates."""
        shape = tuple(axis.size for axis in self.axes)
        starts = [positions_code_of(axis, self.shards) for axis in self.axes]
        return random_text(self.distribution, self.scale, self.key, shape, starts, self.whole, self.dtype)


@op("microbatch")
class Microbatch(Positioned):
    """This microbatch's slice, along an axis, of a value of the whole batch: a view."""

    axis: str
    size: int
    shards: Shards
    is_view = True

    @property
    def begins(self) -> tuple[str, ...]:
        """The batch axis."""
        return (self.axis,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is cut to `size`."""
        return (types[0].resized(self.axis, self.size),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis (ranks shard each microbatch, not the whole batch); linear."""
        return (*aligned_rules(operands, results, whole=[self.axis]), ShardingRule((SUM,), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`narrow` at the microbatch."""
        (x,) = arguments
        start = offset_text(Axis(self.axis, self.size), self.shards)
        return f"{x.text}.narrow({x.type.position(self.axis)}, {start}, {self.size})"


@op("dropout")
class Dropout(Op):
    """x scaled by 1/(1 − rate) where `keep` is true, else 0. Operands: x, keep."""

    rate: float
    random = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of x."""
        assert agree(*types), (self, types)
        return (types[0],)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear in x."""
        return (*aligned_rules(operands, results), ShardingRule((SUM, None), (SUM,)))

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The same mask, applied to the cotangent."""
        return build.apply(Dropout(self.rate), d, node.inputs[1]), None

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A masked product."""
        x, keep = arguments
        return f"({x.text} * {broadcast(keep, x.type.names)}).mul_({1 / (1 - self.rate)!r})"
