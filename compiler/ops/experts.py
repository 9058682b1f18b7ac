"""Mixtures of experts without capacity: the indices of the greatest, and products with the matrix that an index names.

`routed_dot(x, w, ids)` is `dot(x, embedding(ids, w, over = along), over)`, whose second operand is never made: rows are
sorted by expert, and each expert multiplies its own rows (Gale et al., MegaBlocks, arXiv 2211.15841).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.intervals import Interval
from partita.compiler.ops.op import TORCH_DTYPES, Argument, Kernel, Op, ShardingRule, agree, op, permuted, shape_text
from partita.compiler.ops.pointwise import summed_to
from partita.compiler.ops.position import PLACE, Positioned, Shards, start_argument
from partita.compiler.ops.shape import arranged
from partita.compiler.ops.traits import Adding, ReadsWeights
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@op("top_k")
class TopK(Op):
    """The indices along `over` of the greatest elements, greatest first, as many as `into` has; of equal elements the
    first, whatever the layout.
    """

    over: str
    into: Axis

    @property
    def reduces(self) -> tuple[str, ...]:
        """`over`."""
        return (self.over,)

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """Indices of the axis."""
        return 0, types[0].axis(self.over).size - 1

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """i64, with the new axis in place of `over`."""
        (x,) = types
        assert self.into.size <= x.axis(self.over).size, (self, x)
        return (Type("i64", tuple(self.into if a.name == self.over else a for a in x.axes)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis."""
        return tuple(ShardingRule((name,), (name,)) for name in operands[0].names if name != self.over)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A comparison of each element with each of its axis, at most."""
        return operands[0].elements * operands[0].axis(self.over).size.bit_length()

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The sorted elements, and all indices."""
        return operands[0].bytes + operands[0].with_dtype("i64").bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with `over` last."""
        (x,) = arguments
        rest = [name for name in x.type.names if name != self.over]
        text = f"kernels.top_k({permuted(x.text, x.type.names, [*rest, self.over])}, {self.into.size})"
        return permuted(text, [*rest, self.into.name], results[0].names)


ALIGNED = 8  # elements of bf16, in 16 bytes


def waits_for_rows(dtype: str, sizes: Sequence[int]) -> str:
    """Why a product with a matrix for each expert, of such sizes, waits for a GPU; empty if it does not: GPUs have one
    of bf16 alone, whose rows are multiples of 16 bytes.
    """
    grouped = dtype == "bf16" and all(size % ALIGNED == 0 for size in sizes)
    return "" if grouped else "waits for the number of rows of each expert"


class Routed(Positioned):
    """What products with the matrices `w` have in common: x, w and ids as the kernels take them.

    Rows are the axes of x, except `over`, and of the ids; columns those of w that no row has. Axes of both are batch
    axes, as in a `dot`.
    """

    over: tuple[str, ...]
    along: str
    guarded: bool
    shards: Shards
    fusible = False

    @property
    def begins(self) -> tuple[str, ...]:
        """The first expert of the shard."""
        return (self.along,)

    @property
    def share(self) -> int:
        """Into how many parts the experts are split: about as small a part of the rows is multiplied here."""
        return prod(parts for name, _, parts in self.shards if name == self.along)


class Routing:
    """The axes of a product with the matrices that indices name, in the order in which kernels take them."""

    def __init__(self, x: Type, w: Type, ids: Type, over: Sequence[str], along: str) -> None:
        self.w = w
        self.depth = [w.axis(name) for name in over]
        self.along = w.axis(along)
        rows = {axis.name: axis for axis in (*x.axes, *ids.axes) if axis.name not in over}
        self.shared = [axis for axis in w.axes if axis.name in rows]
        self.rows = [*self.shared, *(axis for axis in rows.values() if axis not in self.shared)]
        named = {*over, along, *rows}
        self.columns = [axis for axis in w.axes if axis.name not in named]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, depth and columns."""
        rows, depth, columns = (prod(axis.size for axis in axes) for axes in (self.rows, self.depth, self.columns))
        return rows, depth, columns

    @property
    def matrix_order(self) -> list[str]:
        """The axes of w as kernels take them."""
        return [axis.name for axis in (*self.shared, self.along, *self.depth, *self.columns)]

    def by_row(self, argument: Argument, inner: Sequence[Axis] | None) -> str:
        """An operand as [rows…, inner], of size 1 along rows that it lacks; without `inner` as [rows…]."""
        return by_row(argument, self.rows, inner)

    def matrices(self, w: Argument) -> str:
        """w as [shared…, experts, depth, columns]."""
        return matrices_text(w, (*self.shared, self.along), self.depth, self.columns)


def by_row(argument: Argument, rows: Sequence[Axis], inner: Sequence[Axis] | None) -> str:
    """The text of an operand as [rows…, inner], of size 1 along rows that it lacks; without `inner` as [rows…]."""
    own = [axis for axis in rows if argument.type.has(axis.name)]
    order = [axis.name for axis in (*own, *(inner or ()))]
    shape = [axis.size if argument.type.has(axis.name) else 1 for axis in rows]
    if inner is not None:
        shape.append(prod(axis.size for axis in inner))
    return _shaped(permuted(argument.text, argument.type.names, order), _in_order(argument.type, order), shape)


def matrices_text(w: Argument, stack: Sequence[Axis], depth: Sequence[Axis], columns: Sequence[Axis]) -> str:
    """The text of matrices as [stack…, depth, columns]."""
    order = [axis.name for axis in (*stack, *depth, *columns)]
    shape = [*(axis.size for axis in stack), *(prod(axis.size for axis in axes) for axes in (depth, columns))]
    return _shaped(permuted(w.text, w.type.names, order), _in_order(w.type, order), shape)


def _in_order(type: Type, order: Sequence[str]) -> list[int]:
    return [type.axis(name).size for name in order]


def _shaped(text: str, have: Sequence[int], want: Sequence[int]) -> str:
    return text if list(have) == list(want) else f"{text}.reshape{shape_text(want)}"


@op("routed_dot")
class RoutedDot(ReadsWeights, Routed):
    """For each row the product of x with the matrix of `w` that its index in `ids` names along `along`, summed over
    `over`. Operands: x, w, ids.

    If w is sharded along `along`, each rank multiplies the rows of its experts and returns zeros for the others. With
    `guarded`, ids may be out of range and yield zeros.
    """

    over: tuple[str, ...]
    along: str
    guarded: bool = False
    shards: Shards = ()

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The last operand; it indexes the matrices."""
        return 2, operands[1].axis(self.along)

    def capture_blocker(self, operands: Sequence[Type], results: Sequence[Type]) -> str:
        """The host may go through the matrices."""
        return waits_for_rows(operands[0].dtype, (self.matrices(operands, results) or ())[1:3])

    def fans(self, type: Type) -> tuple[int, int] | None:
        """Those of one matrix."""
        summed = prod(type.axis(name).size for name in self.over)
        count = type.axis(self.along).size if type.has(self.along) else 1
        return summed, max(1, type.elements // summed // count)

    def to_broadcast(self, operands: Sequence[Type], axis: str) -> tuple[int, ...]:
        """None: what has an axis that others lack multiplies each of its positions."""
        return ()

    def matrix(self, operands: Sequence[Type], position: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """x, or a matrix of each expert."""
        if position > 1:
            return None
        operand, other = operands[position], operands[1 - position]
        shared = [name for name in operand.names if other.has(name) and name not in self.over]
        return self.over, (*shared, *(name for name in operand.names if name == self.along))

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """x's remaining axes, those of the ids, then w's."""
        x, w, ids = types
        assert all(x.has(name) and w.has(name) for name in self.over), (self, types)
        assert x.dtype == w.dtype, (self, types)
        assert agree(*types), (self, types)
        routing = Routing(x, w, ids, self.over, self.along)
        rest = [axis for axis in ids.axes if not x.has(axis.name)]
        return (Type(x.dtype, (*x.without(self.over).axes, *rest, *routing.columns)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the result; a summed axis, or the experts, which makes the result partial; linear in x and w."""
        aligned = tuple(
            ShardingRule(tuple(name if each.has(name) else None for each in operands), (name,))
            for name in results[0].names
        )
        summed = tuple(ShardingRule((name, name, None), (SUM,)) for name in self.over)
        linear = (ShardingRule((SUM, None, None), (SUM,)), ShardingRule((None, SUM, None), (SUM,)))
        return (*aligned, *summed, ShardingRule((None, self.along, None), (SUM,)), *linear)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A multiplication and an addition for each product of a row, not of each expert."""
        rows, depth, columns = self._routing(operands).sizes
        return 2 * rows * depth * columns // self.share

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """One for each expert, of an equal share of the rows."""
        return _grouped(self._routing(operands), self.share)

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By the number of experts, and rows, depth and columns of each."""
        return _kernel("routed_dot", self._routing(operands), self.share, self.flops(operands, results))

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Rows in order of their experts, of x and of the result, and their indices; matrices as kernels take them."""
        x, w, _ = operands
        routing = self._routing(operands)
        rows, depth, _ = routing.sizes
        turned = 0 if list(w.names) == routing.matrix_order else w.bytes
        return rows * (depth * x.bytes // x.elements + PLACE) + results[0].bytes + turned

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """A product with the same matrices, summed over rows that x lacks; and products of the rows of each expert."""
        x, w, ids = node.inputs
        routing = self._routing([each.type for each in node.inputs])
        columns = tuple(axis.name for axis in routing.columns)
        back = build.apply(RoutedDot(columns, self.along, self.guarded), d, w, ids)
        outer = RoutedWeightGradient(self.over, self.along, w.type.axes, self.guarded)
        return arranged(build, summed_to(build, back, x.type), x.type.names), build.apply(outer, x, ids, d), None

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        x, w, ids = arguments
        routing = self._routing([each.type for each in arguments])
        texts = [routing.by_row(x, routing.depth), routing.matrices(w), routing.by_row(ids, None)]
        start = start_argument(w.type.axis(self.along), self.shards, self.guarded)
        text = f"kernels.routed_dot({', '.join(texts)}, {len(routing.shared)}{start})"
        shape = [axis.size for axis in (*routing.rows, *routing.columns)]
        have = [*(axis.size for axis in routing.rows), routing.sizes[2]]
        order = [axis.name for axis in (*routing.rows, *routing.columns)]
        return permuted(_shaped(text, have, shape), order, results[0].names)

    def _routing(self, operands: Sequence[Type]) -> Routing:
        x, w, ids = operands
        return Routing(x, w, ids, self.over, self.along)


@op("routed_outer")
class RoutedWeightGradient(Adding, Routed):
    """The gradient of `routed_dot` for its matrices, `table`: for each expert the products of its rows of x with those
    of d, summed over them. Operands: x, ids, d.

    If the table is sharded along `along`, each rank has those of its experts. With `guarded`, ids may be out of range
    and their rows are dropped.
    """

    over: tuple[str, ...]
    along: str
    table: tuple[Axis, ...]
    guarded: bool = False
    shards: Shards = ()

    def vmapped(self, axis: Axis) -> Op | None:
        """It has one matrix of an expert for all positions."""
        return None

    @property
    def reads_context(self) -> bool:
        """For the device of the zeros."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The table's axes."""
        x, _, d = types
        assert x.dtype == d.dtype, (self, types)
        result = Type(x.dtype, self.table)
        assert agree(*types, result), (self, types)
        return (result,)

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """It is linear in both operands: products with the matrices d."""
        x, ids, cotangent = node.inputs
        columns = [name for name in d.type.names if cotangent.type.has(name) and not x.type.has(name)]
        to_x = build.apply(RoutedDot(tuple(columns), self.along, self.guarded), cotangent, d, ids)
        to_d = build.apply(RoutedDot(self.over, self.along, self.guarded), x, d, ids)
        to_x = arranged(build, summed_to(build, to_x, x.type), x.type.names)
        return to_x, None, arranged(build, summed_to(build, to_d, cotangent.type), cotangent.type.names)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """The table's axes, of which the experts need all rows; rows, for a partial result; linear in x and d."""
        table = results[0]

        def states(name: str) -> tuple[str | None, ...]:
            return tuple(name if each.has(name) else None for each in operands)

        aligned = tuple(ShardingRule(states(name), (name,)) for name in table.names if name != self.along)
        rows = tuple(ShardingRule(states(name), (SUM,)) for name in operands[2].names if not table.has(name))
        linear = (ShardingRule((SUM, None, None), (SUM,)), ShardingRule((None, None, SUM), (SUM,)))
        return (*aligned, *rows, ShardingRule((None, None, None), (self.along,)), *linear)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A multiplication and an addition for each product of a row."""
        rows, depth, columns = self._routing(operands, results[0]).sizes
        return 2 * rows * depth * columns // self.share

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """One for each expert, over an equal share of the rows."""
        rows, depth, columns, *count = _grouped(self._routing(operands, results[0]), self.share)
        return depth, rows, columns, *count

    def capture_blocker(self, operands: Sequence[Type], results: Sequence[Type]) -> str:
        """The host may go through the matrices."""
        return waits_for_rows(operands[0].dtype, (self.matrices(operands, results) or ())[:3:2])

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By the number of experts, and rows, depth and columns of each."""
        routing = self._routing(operands, results[0])
        return _kernel("routed_outer", routing, self.share, self.flops(operands, results))

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Rows in order of their experts, of x and of d, and their indices; and products that are not added as they are
        made: of one expert, or in bf16, on GPUs, of all.
        """
        x, _, d = operands
        (table,) = results
        rows, depth, _ = self._routing(operands, table).sizes
        products = table.bytes // (1 if table.dtype == "bf16" else table.axis(self.along).size)
        return rows * (depth * x.bytes // x.elements + PLACE) + d.bytes + products

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Adds into zeros."""
        (table,) = results
        routing = self._routing([each.type for each in arguments], table)
        shape = shape_text([table.axis(name).size for name in routing.matrix_order])
        zeros = f"torch.zeros({shape}, dtype={TORCH_DTYPES[table.dtype]}, device=c.device)"
        ordered = Type(table.dtype, tuple(table.axis(name) for name in routing.matrix_order))
        text = self._added(zeros, ordered, routing, arguments)
        return permuted(text, routing.matrix_order, table.names)

    def adds_to(self, target: Type, operands: Sequence[Type], result: Type) -> bool:
        """If the order of axes is that of the kernel; any dtype."""
        return list(target.names) == self._routing(operands, result).matrix_order

    def emit_added(self, target: Argument, arguments: Sequence[Argument], result: Type) -> str:
        """Adds into the accumulator."""
        routing = self._routing([each.type for each in arguments], result)
        return self._added(target.text, target.type, routing, arguments)

    def _added(self, target: str, type: Type, routing: Routing, arguments: Sequence[Argument]) -> str:
        """Into a tensor of this type, whose axes are in the order of the kernel; the tensor itself."""
        x, ids, d = arguments
        texts = [routing.by_row(x, routing.depth), routing.by_row(ids, None), routing.by_row(d, routing.columns)]
        start = start_argument(type.axis(self.along), self.shards, self.guarded)
        return f"kernels.add_routed({target}, {', '.join(texts)}, {len(routing.shared)}{start})"

    def _routing(self, operands: Sequence[Type], table: Type) -> Routing:
        x, ids, _ = operands
        return Routing(x, table, ids, self.over, self.along)


def _grouped(routing: Routing, share: int) -> tuple[int, ...]:
    """Rows, depth, columns and number of the products, if the rows are spread evenly over all experts."""
    rows, depth, columns = routing.sizes
    count = routing.along.size * prod(axis.size for axis in routing.shared)
    return max(1, rows // share // count), depth, columns, count


def _kernel(name: str, routing: Routing, share: int, flops: int) -> Kernel:
    rows, depth, columns, count = _grouped(routing, share)
    return Kernel(name, tuple(map(float, (count, rows, depth, columns))), float(flops))
