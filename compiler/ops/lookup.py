"""Rows of a table by index, and the reverse: sums of rows into a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.op import TORCH_DTYPES, Argument, Kernel, Way, agree, op, permuted
from partita.compiler.ops.position import Positioned, Shards, start_argument
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


def _split(ids: Type, table: Type, over: str) -> tuple[list[str], list[str], list[str]]:
    """Names of the axes of both, of the ids alone, and of the table alone (`over` aside)."""
    shared = [name for name in ids.names if table.has(name)]
    own = [name for name in ids.names if not table.has(name)]
    rest = [name for name in table.names if name not in shared and name != over]
    return shared, own, rest


@op("gather")
class Gather(Positioned):
    """`embedding`: for each index in `ids`, the row of `table` along `over`. Axes of both are batch axes.

    Of a table split along `over` each rank looks up what lies in its part, and has zeros for the rest. With `guarded`
    there are zeros for what lies in none; otherwise there is no such id.
    """

    over: str
    guarded: bool = False
    shards: Shards = ()
    reads_weights = True
    fusible = False

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The first operand, along `over`."""
        return 0, operands[1].axis(self.over)

    @property
    def begins(self) -> tuple[str, ...]:
        """The table's rows."""
        return (self.over,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The ids' axes, then the table's others."""
        ids, table = types
        assert not ids.has(self.over), (self, ids)
        assert agree(ids, table), (self, types)
        rest = tuple(a for a in table.axes if a.name != self.over and not ids.has(a.name))
        return (Type(table.dtype, ids.axes + rest),)

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis of the result; parts of the table, which make the result partial; linear in the table."""
        ids, table = operands
        kept = tuple(
            Way((name if ids.has(name) else None, name if table.has(name) else None), (name,))
            for name in results[0].names
        )
        return (*kept, Way((None, self.over), (SUM,)), Way((None, SUM), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """None: it copies."""
        return 0

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """The rows that are read and written, not the table."""
        moved = float(operands[0].bytes + 2 * results[0].bytes)
        return Kernel(self.label, (moved,), moved)

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Rows summed into the table."""
        ids, table = node.inputs
        if not table.type.is_float:
            return None, None
        return None, build.apply(ScatterAdd(self.over, table.type.axes, self.guarded), ids, d)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`embedding` where there are no batch axes, else advanced indexing."""
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


@op("scatter_add")
class ScatterAdd(Positioned):
    """The gradient of `gather`: a table of zeros with each row of `d` added where its index says.

    Into a part of the table along `over` each rank adds the rows that belong there. With `guarded` some may belong
    nowhere.
    """

    over: str
    table: tuple[Axis, ...]
    guarded: bool = False
    shards: Shards = ()
    fusible = False

    @property
    def reads_context(self) -> bool:
        """The device, of zeros."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The table's axes."""
        result = Type(types[1].dtype, self.table)
        assert agree(*types, result), (self, types)
        return (result,)

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Batch axes and the table's own; an axis that is summed, which makes the result partial; linear in d.

        Parts of the table need all ids and rows.
        """
        ids = operands[0]
        table = results[0]
        kept = tuple(Way((name if ids.has(name) else None, name), (name,)) for name in table.names if name != self.over)
        parts = Way((None, None), (self.over,))
        summed = tuple(Way((name, name), (SUM,)) for name in ids.names if not table.has(name))
        return (*kept, *summed, parts, Way((None, SUM), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """An addition for each element of the rows."""
        return operands[1].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Sums into zeros."""
        (table,) = results
        zeros = f"torch.zeros({table.shape}, dtype={TORCH_DTYPES[table.dtype]}, device=c.device)"
        return self._added(zeros, table, arguments)

    def adds_to(self, target: Type, operands: Sequence[Type], result: Type) -> bool:
        """Whatever its dtype and the order of its axes."""
        return True

    def emit_added(self, target: Argument, arguments: Sequence[Argument], result: Type) -> str:
        """Sums into the accumulator."""
        return self._added(target.text, target.type, arguments)

    def _added(self, target: str, table: Type, arguments: Sequence[Argument]) -> str:
        ids, d = arguments
        shared, own, rest = _split(ids.type, table, self.over)
        rows = permuted(target, table.names, [*shared, self.over, *rest])
        index = permuted(ids.text, ids.type.names, [*shared, *own])
        values = permuted(d.text, d.type.names, [*shared, *own, *rest])
        start = start_argument(table.axis(self.over), self.shards, self.guarded)
        text = f"kernels.add_rows({rows}, {index}, {values}, {len(shared)}{start})"
        return permuted(text, [*shared, self.over, *rest], table.names)
