"""Products by expert on rows that stand in the order of their experts.

Values whose rows are in this order have one axis, ROWS, in place of the axes of the rows. These operations are made of
the `routed_dot`s of one rank by `partita.compiler.passes.group`, after all has been split, so none can be sharded. What
each computes of rows in their own order is its `plain` form.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from partita.compiler.layout import Layout, layout_of
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.experts import RoutedDot, RoutedWeightGradient, by_row, matrices_text, waits_for_rows
from partita.compiler.ops.op import (
    TORCH_DTYPES,
    Argument,
    Kernel,
    Op,
    ShardingRule,
    agree,
    copied_bytes,
    op,
    permuted,
    shape_text,
    wide_bytes,
)
from partita.compiler.ops.position import Positioned, Shards, start_argument
from partita.compiler.ops.reduce import Reduce
from partita.compiler.ops.traits import Adding, Summing
from partita.dsl.types import Axis, Type

ROWS = "*rows"  # cannot clash with the names of axes
INDEX = 8  # bytes


class Local(Op):
    """Base of operations that exist on single ranks only."""

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """None."""
        return ()


def in_order(type: Type, rows: Sequence[Axis]) -> Type:
    """The type of a value once its rows are in the order of their experts; it may lack some axes of the rows."""
    names = {axis.name for axis in rows}
    rest = (axis for axis in type.axes if axis.name not in names)
    return Type(type.dtype, (Axis(ROWS, prod(axis.size for axis in rows)), *rest))


def layout_in_order(layout: Layout, rows: Sequence[Axis]) -> Layout:
    """The layout of a value once its rows are in the order of their experts."""
    names = {axis.name for axis in rows}
    return layout_of((over, ROWS if state in names else state) for over, state in layout.states)


@op("row_order")
class SortByExpert(Positioned, Local):
    """Of the `ids` of rows: the rows in the order of their experts, those of experts on other ranks last; the place of
    each row in that order; and where those of each expert end.
    """

    rows: tuple[Axis, ...]
    along: Axis
    guarded: bool = False
    shards: Shards = ()
    results = ("", "places", "ends")
    fusible = False

    @property
    def begins(self) -> tuple[str, ...]:
        """The first expert of the shard."""
        return (self.along.name,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """Two permutations, and counts."""
        (ids,) = types
        assert all(axis in self.rows for axis in ids.axes), (self, ids)
        order = in_order(Type("i64"), self.rows)
        return order, order, Type("i32", (self.along,))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Those of a sort."""
        return results[0].elements * results[0].elements.bit_length()

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Sorted indices, and what they are sorted from."""
        return 4 * results[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (ids,) = arguments
        shape = shape_text([axis.size for axis in self.rows])
        start = start_argument(self.along, self.shards, self.guarded)
        return f"kernels.row_order({by_row(ids, self.rows, None)}, {shape}, {self.along.size}{start})"


@op("take_rows")
class Permute(Local):
    """x with its rows in an order, repeated along axes of the rows that it lacks. Operands: x, order."""

    rows: tuple[Axis, ...]

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """ROWS, and what is left of x."""
        x, order = types
        result = in_order(x, self.rows)
        assert order.axes == result.axes[:1], (self, types)
        assert agree(x, Type("i64", self.rows)), (self, types)
        return (result,)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Indices, and x where its axes have another order."""
        x, order = operands
        names = [axis.name for axis in self.rows if x.has(axis.name)]
        moved = list(x.names[: len(names)]) != names
        return 3 * order.bytes + (x.bytes if moved else 0)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        x, order = arguments
        rest = results[0].axes[1:]
        shape = shape_text([axis.size for axis in self.rows])
        text = f"kernels.take_rows({by_row(x, self.rows, rest or None)}, {order.text}, {shape})"
        return f"{text}.view{shape_text(results[0].shape)}" if len(rest) > 1 else text


@op("put_rows")
class Unpermute(Local):
    """The rows of x in their own order again, with the axes `names`. Operands: x, places."""

    rows: tuple[Axis, ...]
    names: tuple[str, ...]

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The rows' axes, and x's others."""
        x, places = types
        assert x.axis(ROWS) == places.axis(ROWS), (self, types)
        axes = {axis.name: axis for axis in (*self.rows, *x.axes)}
        result = Type(x.dtype, tuple(axes[name] for name in self.names))
        assert in_order(result, self.rows).elements == x.elements, (self, types)
        return (result,)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Rows are copied in the order in which they are written, which is far quicker than to write them in any."""
        x, places = arguments
        rest = [axis for axis in x.type.axes if axis.name != ROWS]
        order = [ROWS, *(axis.name for axis in rest)]
        axes = [*self.rows, *rest]
        text = f"{permuted(x.text, x.type.names, order)}.index_select(0, {places.text})"
        text = f"{text}.view{shape_text([axis.size for axis in axes])}"
        return permuted(text, [axis.name for axis in axes], results[0].names)


@op("combine_rows")
class CombineRows(Summing, Local):
    """The sums of x's rows over some of the axes of the rows, with weights if there are any: of a `reduce`, or of a
    `dot`. Operands: x, places, and weights, which have the axes of the rows.
    """

    rows: tuple[Axis, ...]
    over: tuple[str, ...]
    names: tuple[str, ...]

    def plain(self, x: Type, *weights: Type) -> Op:
        """What it is of rows in their own order, and of their weights."""
        return Dot(self.over) if weights else Reduce("sum", self.over, x.dtype)

    @property
    def kept(self) -> tuple[Axis, ...]:
        """The axes of the rows that are not summed over."""
        return tuple(axis for axis in self.rows if axis.name not in self.over)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The rows' axes that are not summed over, and x's others."""
        x, places, *weights = types
        assert x.axis(ROWS) == places.axis(ROWS), (self, types)
        assert {*self.over} < {axis.name for axis in self.rows}, (self, types)
        assert all(each.dtype == x.dtype for each in weights), (self, types)
        assert all({*each.axes} == {*self.rows} for each in weights), (self, types)
        axes = {axis.name: axis for axis in (*self.kept, *x.axes)}
        assert len(self.names) == len(self.kept) + len(x.axes) - 1, (self, types)
        return (Type(x.dtype, tuple(axes[name] for name in self.names)),)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """An addition for each element of x, and a multiplication if there are weights."""
        return operands[0].elements * (len(operands) - 1)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Indices, and weights, where their axes have another order; and where sums begin."""
        return 4 * operands[1].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        x, places, *weights = arguments
        rest = [axis for axis in x.type.axes if axis.name != ROWS]
        order = [*(axis.name for axis in self.kept), *self.over]
        sizes = {axis.name: axis.size for axis in self.rows}
        shape = [prod(axis.size for axis in self.kept), prod(sizes[name] for name in self.over)]
        index = places.text
        if order != [axis.name for axis in self.rows]:
            index = permuted(f"{index}.view{shape_text([*sizes.values()])}", [*sizes], order)
        texts = [permuted(x.text, x.type.names, [ROWS, *(axis.name for axis in rest)])]
        texts.append(f"{index}.reshape{shape_text(shape)}")
        texts += [f"{permuted(each.text, each.type.names, order)}.reshape{shape_text(shape)}" for each in weights]
        axes = [*self.kept, *rest]
        text = f"kernels.combine_rows({', '.join(texts)}).view{shape_text([axis.size for axis in axes])}"
        return permuted(text, [axis.name for axis in axes], results[0].names)

    def emit_sum(self, other: Argument, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """In place."""
        return f"{self.emit(arguments, results)}.add_({other.text})"


@op("grouped_dot")
class GroupedDot(Local):
    """`routed_dot` of rows in the order of their experts. Operands: x, w, and where the rows of each expert end.

    With `guarded`, or where experts are one of `share` parts, rows after the last expert's have none, and yield zeros.
    """

    over: tuple[str, ...]
    along: str
    guarded: bool = False
    share: int = 1
    fusible = False

    def plain(self, order: SortByExpert) -> RoutedDot:
        """What it is of rows in their own order, w and their ids."""
        return RoutedDot(self.over, self.along, order.guarded, order.shards)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """ROWS, and w's columns."""
        x, w, ends = types
        assert x.dtype == w.dtype, (self, types)
        assert agree(*types), (self, types)
        assert {*x.names} == {ROWS, *self.over}, (self, types)
        assert ends.names == (self.along,), (self, types)
        assert w.has(self.along), (self, types)
        columns = w.without((*self.over, self.along)).axes
        return (Type(x.dtype, (x.axis(ROWS), *columns)),)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A multiplication and an addition for each product of a row, not of each expert."""
        return 2 * prod(operands[0].axis(name).size for name in self.over) * results[0].elements // self.share

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """One for each expert, of an equal share of the rows."""
        x, w, _ = operands
        count = w.axis(self.along).size
        rows = x.axis(ROWS).size
        return max(1, rows // self.share // count), x.elements // rows, results[0].elements // rows, count

    def capture_blocker(self, operands: Sequence[Type], results: Sequence[Type]) -> str:
        """The host may go through the matrices."""
        return waits_for_rows(operands[0].dtype, (self.matrices(operands, results) or ())[1:3])

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By the number of experts, and rows, depth and columns of each."""
        return _kernel(self, operands, results)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """What oneDNN returns, before it is copied; and operands that are no matrices in memory."""
        x, w, _ = operands
        moved = copied_bytes(x, [(ROWS,), self.over])
        moved += copied_bytes(w, [(self.along,), self.over, results[0].names[1:]])
        return moved + results[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        x, w, ends = arguments
        depth = [w.type.axis(name) for name in self.over]
        columns = results[0].axes[1:]
        texts = [
            by_row(x, (x.type.axis(ROWS),), depth),
            matrices_text(w, (w.type.axis(self.along),), depth, columns),
            ends.text,
        ]
        partial = ", True" if self.guarded or self.share > 1 else ""
        text = f"kernels.grouped_dot({', '.join(texts)}{partial})"
        return text if len(columns) == 1 else f"{text}.view{shape_text(results[0].shape)}"


@op("grouped_outer")
class GroupedWeightGradient(Adding, Local):
    """`routed_outer` of rows in the order of their experts. Operands: x, where the rows of each expert end, d."""

    over: tuple[str, ...]
    along: str
    table: tuple[Axis, ...]
    share: int = 1
    fusible = False

    def plain(self, order: SortByExpert) -> RoutedWeightGradient:
        """What it is of rows in their own order, their ids and d."""
        return RoutedWeightGradient(self.over, self.along, self.table, order.guarded, order.shards)

    @property
    def reads_context(self) -> bool:
        """For the device of the zeros."""
        return True

    @property
    def columns(self) -> list[Axis]:
        """The table's axes other than `over` and `along`."""
        return [axis for axis in self.table if axis.name not in (*self.over, self.along)]

    @property
    def matrix_order(self) -> list[str]:
        """The axes of the table as the kernel takes them."""
        return [self.along, *self.over, *(axis.name for axis in self.columns)]

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The table's axes."""
        x, ends, d = types
        result = Type(x.dtype, self.table)
        assert x.dtype == d.dtype, (self, types)
        assert agree(*types, result), (self, types)
        assert {*x.names} == {ROWS, *self.over}, (self, types)
        assert ends.names == (self.along,), (self, types)
        assert {*d.axes} == {x.axis(ROWS), *self.columns}, (self, types)
        return (result,)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A multiplication and an addition for each product of a row."""
        x, _, d = operands
        return 2 * x.elements * d.elements // x.axis(ROWS).size // self.share

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """One for each expert, over an equal share of the rows."""
        x, ends, d = operands
        rows = x.axis(ROWS).size
        return x.elements // rows, max(1, rows // self.share // ends.elements), d.elements // rows, ends.elements

    def capture_blocker(self, operands: Sequence[Type], results: Sequence[Type]) -> str:
        """The host may go through the matrices."""
        return waits_for_rows(operands[0].dtype, (self.matrices(operands, results) or ())[:3:2])

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By the number of experts, and rows, depth and columns of each."""
        return _kernel(self, operands, results)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Products that are not added as they are made: of one expert; in bf16, on GPUs, of all."""
        return results[0].bytes // (1 if results[0].dtype == "bf16" else operands[1].elements)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Adds into zeros."""
        (table,) = results
        ordered = Type(table.dtype, tuple(table.axis(name) for name in self.matrix_order))
        zeros = f"torch.zeros({shape_text(ordered.shape)}, dtype={TORCH_DTYPES[table.dtype]}, device=c.device)"
        return permuted(self.emit_added(Argument(zeros, ordered), arguments, table), ordered.names, table.names)

    def adds_to(self, target: Type, operands: Sequence[Type], result: Type) -> bool:
        """If the order of axes is that of the kernel; any dtype."""
        return list(target.names) == self.matrix_order

    def moved_to_add(self, results: Sequence[Type]) -> int:
        """A GPU's grouped product is of bf16, and adds nothing: it is read, and the accumulator is read and written."""
        (table,) = results
        return table.bytes + 2 * wide_bytes(table) if table.dtype == "bf16" else 0

    def emit_added(self, target: Argument, arguments: Sequence[Argument], result: Type) -> str:
        """Adds into the accumulator."""
        x, ends, d = arguments
        depth = [target.type.axis(name) for name in self.over]
        rows = (x.type.axis(ROWS),)
        texts = [target.text, by_row(x, rows, depth), by_row(d, rows, self.columns), ends.text]
        return f"kernels.add_grouped({', '.join(texts)})"


def _kernel(product: Op, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
    """Like as large a product for one expert."""
    *sizes, count = product.matrices(operands, results) or ()
    alike = Kernel("dot", tuple(map(float, sizes)), float(product.flops(operands, results)))
    return Kernel(product.name, (float(count), *alike.features), alike.work, alike)
