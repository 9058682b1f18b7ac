"""Table rows by index, and the reverse: sums of rows into a table; indices as vectors with a one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from partita.compiler.layout import MAX, SUM
from partita.compiler.ops.op import TORCH_DTYPES, Argument, Op, ShardingRule, agree, aligned_rules, op, permuted
from partita.compiler.ops.pointwise import cast, constant, pointwise
from partita.compiler.ops.position import PLACE, Positioned, Shards, start_argument
from partita.compiler.ops.shape import arranged
from partita.compiler.ops.sparse import exchanged
from partita.compiler.ops.traits import Adding, LooksUp
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


def _split(ids: Type, table: Type, over: str) -> tuple[list[str], list[str], list[str]]:
    """Names of the shared axes, those of the ids alone, and those of the table alone except `over`."""
    shared = [name for name in ids.names if table.has(name)]
    own = [name for name in ids.names if not table.has(name)]
    rest = [name for name in table.names if name not in shared and name != over]
    return shared, own, rest


@op("gather")
class Gather(LooksUp, Positioned):
    """`embedding`: for each index in `ids`, the row of `table` along `over`. Axes of both are batch axes.

    If the table is sharded along `over`, each rank looks up the ids of its shard and returns zeros for the others. With
    `guarded`, ids may be out of range and yield zeros.
    """

    over: str
    guarded: bool = False
    shards: Shards = ()
    fusible = False

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The first operand; it indexes `over`."""
        return 0, operands[1].axis(self.over)

    @property
    def begins(self) -> tuple[str, ...]:
        """The table's rows."""
        return (self.over,)

    def to_broadcast(self, operands: Sequence[Type], axis: str) -> tuple[int, ...]:
        """None: ids and the table may have any axes."""
        return ()

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The ids' axes, then the table's others."""
        ids, table = types
        assert not ids.has(self.over), (self, ids)
        assert agree(ids, table), (self, types)
        rest = tuple(a for a in table.axes if a.name != self.over and not ids.has(a.name))
        return (Type(table.dtype, ids.axes + rest),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the result; shards of the table, which make the result partial; linear in the table."""
        ids, table = operands
        aligned = tuple(
            ShardingRule((name if ids.has(name) else None, name if table.has(name) else None), (name,))
            for name in results[0].names
        )
        return (*aligned, ShardingRule((None, self.over), (SUM,)), ShardingRule((None, SUM), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Rows read and written, not the whole table."""
        return operands[0].bytes + 2 * results[0].bytes

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The places of the ids."""
        return PLACE * operands[0].elements

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Adds the rows into the table."""
        ids, table = node.inputs
        if not table.type.is_float:
            return None, None
        return None, build.apply(ScatterAdd(self.over, table.type.axes, self.guarded), ids, d)

    def decompose(self, build: Builder, node: Node, axis: str, parts: int) -> tuple[Value, ...] | None:
        """Along an axis of the ids, in as many parts as the table has shards: the distinct ids of each part are looked
        up where the rows are.
        """
        ids, table = node.inputs
        return exchanged(build, ids, table, self.over, axis, parts)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`embedding` if there are no batch axes, else advanced indexing."""
        ids, table = arguments
        shared, own, rest = _split(ids.type, table.type, self.over)
        rows = permuted(table.text, table.type.names, [*shared, self.over, *rest])
        start = start_argument(table.type.axis(self.over), self.shards, self.guarded)
        if not shared and not start:
            if len(rest) == 1:
                return f"torch.nn.functional.embedding({ids.text}, {rows})"
            return f"{rows}[{ids.text}]"
        index = permuted(ids.text, ids.type.names, [*shared, *own])
        text = f"kernels.lookup({index}, {rows}, {len(shared)}{start})"
        return permuted(text, [*shared, *own, *rest], results[0].names)


@op("one_hot")
class OneHot(Positioned):
    """1 where the position along a new axis is the id, else 0. With `guarded`, ids may be out of range: all zeros."""

    axis: Axis
    dtype: str
    guarded: bool = False
    shards: Shards = ()

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The operand; it indexes the axis."""
        return 0, self.axis

    @property
    def begins(self) -> tuple[str, ...]:
        """The new axis."""
        return (self.axis.name,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The ids' axes, then the new one."""
        (ids,) = types
        assert not ids.has(self.axis.name), (self, ids)
        return (Type(self.dtype, (*ids.axes, self.axis)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return aligned_rules(operands, results)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """What is compared, as booleans, and the positions."""
        return results[0].elements + 8 * self.axis.size

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A comparison with positions."""
        (ids,), (result,) = arguments, results
        text = f"kernels.one_hot({ids.text}, {self.axis.size}, {TORCH_DTYPES[self.dtype]}"
        return permuted(
            f"{text}{start_argument(self.axis, self.shards)})", [*ids.type.names, self.axis.name], result.names
        )


@op("scatter_add")
class ScatterAdd(Adding, Positioned):
    """The gradient of `gather`: a table of zeros with each row of `d` added at its index.

    If the table is sharded along `over`, each rank adds the rows of its shard. With `guarded`, ids may be out of range
    and their rows are dropped.
    """

    over: str
    table: tuple[Axis, ...]
    guarded: bool = False
    shards: Shards = ()
    fusible = False

    @property
    def adds_rows(self) -> str | None:
        """The axis that the ids, its first operand, index, if it adds rows, its second, into zeros by them."""
        return self.over

    @property
    def reads_context(self) -> bool:
        """For the device of the zeros."""
        return True

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The first operand; it indexes `over`."""
        return 0, Type("i64", self.table).axis(self.over)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The table's axes."""
        result = Type(types[1].dtype, self.table)
        assert agree(*types, result), (self, types)
        return (result,)

    def vmapped(self, axis: Axis) -> Op | None:
        """With a table at each position."""
        return evolve(self, table=(axis, *self.table))  # type: ignore[misc]

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Batch axes and the table's own; an axis that is summed, which makes the result partial; linear in d.

        Sharding the table along `over` needs all ids and rows.
        """
        ids = operands[0]
        table = results[0]
        aligned = tuple(
            ShardingRule((name if ids.has(name) else None, name), (name,)) for name in table.names if name != self.over
        )
        parts = ShardingRule((None, None), (self.over,))
        summed = tuple(ShardingRule((name, name), (SUM,)) for name in ids.names if not table.has(name))
        return (*aligned, *summed, parts, ShardingRule((None, SUM), (SUM,)))

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The rows at the indices."""
        ids, rows = node.inputs
        return None, arranged(build, build.apply(Gather(self.over, self.guarded), ids, d), rows.type.names)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One addition for each element of the rows."""
        return operands[1].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The places of the ids, and the rows without those of other shards."""
        return self.workspace_to_add(results[0], operands, results[0])

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Adds into zeros."""
        (table,) = results
        zeros = f"torch.zeros({table.shape}, dtype={TORCH_DTYPES[table.dtype]}, device=c.device)"
        return self._put("add_rows", zeros, table, arguments)

    def adds_to(self, target: Type, operands: Sequence[Type], result: Type) -> bool:
        """Any dtype and order of axes."""
        return True

    def workspace_to_add(self, target: Type, operands: Sequence[Type], result: Type) -> int:
        """The rows also in the dtype of what they are added to."""
        ids, rows = operands
        apart = self.guarded or any(name == self.over for name, *_ in self.shards)
        copied = apart or target.dtype != rows.dtype
        return PLACE * ids.elements + (rows.with_dtype(target.dtype).bytes if copied else 0)

    def emit_added(self, target: Argument, arguments: Sequence[Argument], result: Type) -> str:
        """Adds into the accumulator."""
        return self._put("add_rows", target.text, target.type, arguments)

    def _put(self, kernel: str, target: str, table: Type, arguments: Sequence[Argument]) -> str:
        ids, d = arguments
        shared, own, rest = _split(ids.type, table, self.over)
        rows = permuted(target, table.names, [*shared, self.over, *rest])
        index = permuted(ids.text, ids.type.names, [*shared, *own])
        values = permuted(d.text, d.type.names, [*shared, *own, *rest])
        start = start_argument(table.axis(self.over), self.shards, self.guarded)
        text = f"kernels.{kernel}({rows}, {index}, {values}, {len(shared)}{start})"
        return permuted(text, [*shared, self.over, *rest], table.names)


@op("scatter_max")
class ScatterMax(ScatterAdd):
    """The largest of the rows at each index of a table, −inf where there is none; otherwise as `scatter_add`."""

    adds_rows = None

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Those of `scatter_add`, with partial maxima in place of partial sums."""
        return tuple(
            ShardingRule(
                *(tuple(MAX if state == SUM else state for state in states) for states in (each.operands, each.results))
            )
            for each in super().sharding_rules(operands, results)
        )

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """To the largest rows; several that are equal share it."""
        ids, rows = node.inputs

        def at_rows(table: Value) -> Value:
            return arranged(build, build.apply(Gather(self.over, self.guarded), ids, table), rows.type.names)

        hit = cast(build, pointwise(build, "equal", rows, at_rows(node.output)), d.type.dtype)
        count = build.apply(ScatterAdd(self.over, self.table, self.guarded), ids, hit)
        share = pointwise(build, "divide", d, pointwise(build, "maximum", count, constant(build, 1.0, count)))
        return None, pointwise(build, "multiply", hit, at_rows(share))

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The places of the rows, and those without rows of other shards."""
        ids, rows = operands
        return PLACE * (ids.elements + rows.elements) + rows.bytes

    def adds_to(self, target: Type, operands: Sequence[Type], result: Type) -> bool:
        """No."""
        return False

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (table,) = results
        fill = f"torch.full({table.shape}, -torch.inf, dtype={TORCH_DTYPES[table.dtype]}, device=c.device)"
        return self._put("max_rows", fill, table, arguments)
