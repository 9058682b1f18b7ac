"""Gradients of tables by the rows that a step looks up, and updates of these rows alone.

The gradient of a lookup is a table of zeros with a row added at each id (`scatter_add`). Here it is a pair of tensors,
whose size depends on the number of ids and not on that of the table's rows: the distinct ids in ascending order, and
for each the sum of its rows. Both have the axes that ids and table share, then one of blocks and one of entries. Blocks
are equal parts of the table's rows, as many as ranks have shards of it; ids count from the beginning of their block. A
block has as many entries as there can be: that of none has the id −1 and a row of zeros.

Where ranks that each have a part of the ids have a block of the table as well, each combines its own part, as a
`source`, and then gives every other one what is in its block (`exchange_rows`), which adds up what it gets.

Rows of one id are added in the order in which they are given. Different numbers of blocks hold the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from partita.compiler.layout import SUM
from partita.compiler.ops.buffers import Buffers
from partita.compiler.ops.collective import Collective, Reshard, StatePairs
from partita.compiler.ops.op import Argument, Op, ShardingRule, attributes, make, op, permuted
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.position import Positioned, Shards, offset_text
from partita.compiler.ops.traits import LooksUp
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.costs.links import Link
    from partita.compiler.graph import Builder, Value

KEYS = 8  # tensors like the ids, for keys, their order and places
PLACES = 4  # tensors like the ids of entries, for where their rows are
# A file can have no axes of these names.
BLOCK, ENTRY, SOURCE, MICROBATCH = "~block", "~entry", "~source", "~microbatch"


def entries(count: int, rows: int) -> int:
    """The most distinct ids that a block of so many rows can have, of a `count` of ids."""
    return min(count, rows)


def _ordered(type: Type, shared: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """The names of its axes: shared ones, its own, the rest."""
    return (*shared, *own, *(name for name in type.names if name not in shared and name not in own))


@op("coalesce")
class Coalesce(Positioned):
    """The sums of rows by id. Operands: ids, and a row for each, whose axes are those of the ids and more.

    Of the ids' axes, tables have those that are `shared`. A block has `rows` rows. Ids outside the table are dropped.
    With a `source`, those of equal parts of the ids' axis `along` are combined apart.
    """

    shared: tuple[str, ...]
    rows: int
    block: Axis
    entry: Axis
    source: Axis | None = None
    along: str | None = None
    shards: Shards = ()
    results = ("ids", "")
    fusible = False

    @property
    def by_source(self) -> tuple[Axis, Axis, str] | None:
        """If it combines rows of equal parts of its operands apart: entries, parts, and the axis that has these."""
        return None if self.source is None or self.along is None else (self.entry, self.source, self.along)

    @property
    def begins(self) -> tuple[str, ...]:
        """The blocks."""
        return (BLOCK,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """Ids by table, block and entry, and their rows."""
        ids, rows = types
        own = [name for name in ids.names if name not in self.shared]
        assert all(rows.has(name) and rows.axis(name) == ids.axis(name) for name in ids.names), (self, types)
        sources = () if self.source is None else (self.source,)
        parts = 1 if self.source is None else self.source.size
        assert self.along is None or ids.axis(self.along).size % parts == 0, (self, types)
        count = ids.elements // max(1, _elements(ids, self.shared)) // parts
        assert self.entry.size >= entries(count, self.rows), (self, types)
        head = (*sources, *map(ids.axis, self.shared), self.block, self.entry)
        rest = tuple(axis for axis in rows.axes if axis.name not in self.shared and axis.name not in own)
        return Type("i64", head), Type(rows.dtype, (*head, *rest))

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Tables, columns, blocks, sources; linear in the rows."""
        ids, rows = operands
        sources = () if self.source is None else (ShardingRule((self.along, self.along), (SOURCE, SOURCE)),)
        return (
            *sources,
            *(ShardingRule((name, name), (name, name)) for name in self.shared),
            *(ShardingRule((None, name), (None, name)) for name in rows.names if not ids.has(name)),
            ShardingRule((None, None), (BLOCK, BLOCK)),
            ShardingRule((None, SUM), (None, SUM)),
        )

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One addition for each element of the rows."""
        return operands[1].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Keys, their order and places; and the rows in one piece, or sums, with room for rows of no block."""
        ids, rows = operands
        return KEYS * ids.bytes + max(rows.bytes, results[1].bytes) + _row_bytes(results[1]) * self.entry.size

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        ids, rows = arguments
        own = [name for name in ids.type.names if name not in self.shared]
        index = permuted(ids.text, ids.type.names, _ordered(ids.type, self.shared, own))
        values = permuted(rows.text, rows.type.names, _ordered(rows.type, self.shared, own))
        start = offset_text(self.block, self.shards)
        sizes = f"{self.rows}, {start}, {self.block.size}, {self.entry.size}"
        if self.source is not None and self.along is not None:
            sizes += f", {self.source.size}, {len(self.shared) + own.index(self.along)}"
        return f"kernels.coalesce({index}, {values}, {len(self.shared)}, {sizes})"


@op("merge_rows")
class MergeRows(Op):
    """Several gradients of a table by rows added up, in order. Operands: the ids of each, then the rows of each.

    Where they have an axis `source`, those of all sources are added as well, in order.
    """

    shared: tuple[str, ...]
    rows: int
    entry: Axis
    source: str | None = None
    results = ("ids", "")
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """Those of a single one."""
        ids, rows = types[: len(types) // 2], types[len(types) // 2 :]
        count = sum(each.elements // _elements(each, (*self.shared, BLOCK)) for each in ids)
        assert self.entry.size >= entries(count, self.rows), (self, types)
        head = (*map(ids[0].axis, self.shared), ids[0].axis(BLOCK), self.entry)
        lead = {*self.shared, BLOCK, ENTRY, self.source}
        rest = tuple(axis for axis in rows[0].axes if axis.name not in lead)
        return Type("i64", head), Type(rows[0].dtype, (*head, *rest))

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Tables, columns, blocks; linear in all rows."""
        count = len(operands) // 2
        names = [name for name in results[1].names if name != ENTRY]

        def states(name: str, types: Sequence[Type]) -> tuple[str | None, ...]:
            return tuple(name if type.has(name) else None for type in types)

        linear = ShardingRule((*(None,) * count, *(SUM,) * count), (None, SUM))
        return (*(ShardingRule(states(name, operands), states(name, results)) for name in names), linear)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One addition for each element of the rows."""
        return sum(type.elements for type in operands[len(operands) // 2 :])

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Keys, their order and places; and the rows, also in one piece, or sums, with room for rows of no block."""
        count = len(operands) // 2
        keys, rows = (sum(type.bytes for type in part) for part in (operands[:count], operands[count:]))
        sums = max(rows, results[1].bytes) + _row_bytes(results[1]) * self.entry.size
        return KEYS * keys + max(2 * rows, sums)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        head = [*([] if self.source is None else [self.source]), *self.shared, BLOCK, ENTRY]
        rest = [name for name in results[1].names if name not in head]
        texts = []
        for each in arguments:
            order = [name for name in (*head, *rest) if each.type.has(name)]
            texts.append(permuted(each.text, each.type.names, order))
        count = len(texts) // 2
        ids, rows = (f"({', '.join(part)},)" for part in (texts[:count], texts[count:]))
        sizes = f"{len(self.shared)}, {self.rows}, {self.entry.size}, {self.source is not None}"
        return f"kernels.merge_rows({ids}, {rows}, {sizes})"


@op("distinct_ids")
class DistinctIds(Op):
    """The ids that `coalesce` makes of parts of the operand, and for each id of the operand the place of its entry
    among those of its part, −1 if it is outside the table.
    """

    shared: tuple[str, ...]
    rows: int
    block: Axis
    entry: Axis
    source: Axis
    along: str
    results = ("", "places")
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """Ids by source, table, block and entry; places as the ids."""
        (ids,) = types
        count = ids.elements // _elements(ids, self.shared) // self.source.size
        assert self.entry.size >= entries(count, self.rows), (self, types)
        assert ids.axis(self.along).size % self.source.size == 0, (self, types)
        return Type("i64", (self.source, *map(ids.axis, self.shared), self.block, self.entry)), ids.with_dtype("i64")

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Tables and sources."""
        by_table = (ShardingRule((name,), (name, name)) for name in self.shared)
        return (*by_table, ShardingRule((self.along,), (SOURCE, self.along)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """None."""
        return 0

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Keys, their order and places."""
        return KEYS * operands[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (ids,) = arguments
        own = [name for name in ids.type.names if name not in self.shared]
        order = _ordered(ids.type, self.shared, own)
        back = tuple(order.index(name) for name in ids.type.names)
        sizes = f"{self.rows}, {self.block.size}, {self.entry.size}"
        sources = f"{self.source.size}, {len(self.shared) + own.index(self.along)}, {back}"
        index = permuted(ids.text, ids.type.names, order)
        return f"kernels.distinct_ids({index}, {len(self.shared)}, {sizes}, {sources})"


@op("look_up_entries")
class LookUpEntries(LooksUp):
    """The rows of a table along `over` that entries stand for, zeros for none. Operands: their ids, and the table."""

    over: str
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The ids' axes, then the table's others."""
        ids, table = types
        assert table.axis(self.over).size % ids.axis(BLOCK).size == 0, (self, types)
        rest = tuple(axis for axis in table.axes if axis.name != self.over and not ids.has(axis.name))
        return (Type(table.dtype, ids.axes + rest),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Sources, tables, entries, columns; blocks, where the table's rows are split; linear in the table."""
        ids, table = operands
        names = [name for name in results[0].names if name != BLOCK]
        aligned = (
            ShardingRule((name if ids.has(name) else None, name if table.has(name) else None), (name,))
            for name in names
        )
        return (*aligned, ShardingRule((BLOCK, self.over), (BLOCK,)), ShardingRule((None, SUM), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Rows read and written, not the whole table."""
        return operands[0].bytes + 2 * results[0].bytes

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The places of entries, and their rows once more."""
        return PLACES * operands[0].bytes + results[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        ids, table = arguments
        shared = [name for name in table.type.names if ids.type.has(name)]
        lead = [SOURCE, *shared, BLOCK, ENTRY]
        rows = permuted(table.text, table.type.names, _ordered(table.type, (*shared, self.over), ()))
        text = f"kernels.look_up_entries({permuted(ids.text, ids.type.names, lead)}, {rows}, {len(shared)})"
        return permuted(text, _ordered(results[0], lead, ()), results[0].names)


@op("take_entries")
class TakeEntries(Op):
    """The row that each id stands for. Operands: rows by source, table, block and entry, and `places` among them of
    ids, whose axis `along` sources are equal parts of; zeros where there is none.
    """

    along: str
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes of places, then others of the rows."""
        rows, places = types
        rest = tuple(
            each for each in rows.axes if each.name not in (SOURCE, BLOCK, ENTRY) and not places.has(each.name)
        )
        return (Type(rows.dtype, (*places.axes, *rest)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Tables, columns, sources; linear in the rows."""
        rows, places = operands
        names = [name for name in rows.names if name not in (SOURCE, BLOCK, ENTRY)]
        aligned = (ShardingRule((name, name if places.has(name) else None), (name,)) for name in names)
        return (*aligned, ShardingRule((SOURCE, self.along), (self.along,)), ShardingRule((SUM, None), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The places of ids, their rows once more, and those of the entries in one piece."""
        rows, places = operands
        return PLACES * places.bytes + results[0].bytes + rows.bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        rows, places = arguments
        shared = [name for name in places.type.names if rows.type.has(name)]
        own = [name for name in places.type.names if name not in shared]
        order = _ordered(rows.type, (SOURCE, *shared, BLOCK, ENTRY), ())
        index = permuted(places.text, places.type.names, (*shared, *own))
        along = len(shared) + own.index(self.along)
        text = f"kernels.take_entries({permuted(rows.text, rows.type.names, order)}, {index}, {len(shared)}, {along})"
        return permuted(text, (*shared, *own, *order[len(shared) + 3 :]), results[0].names)


def exchanged(build: Builder, ids: Value, table: Value, over: str, along: str, parts: int) -> tuple[Value, ...] | None:
    """The rows of a lookup by operations that ranks which have equal parts of the table's rows, and of the ids' axis
    `along`, can compute with what they exchange; None if there are none.
    """
    shared = tuple(name for name in table.type.names if ids.type.has(name))
    rows = table.type.axis(over).size
    if along in shared or not ids.type.has(along) or rows % parts or ids.type.axis(along).size % parts:
        return None
    count = ids.type.elements // _elements(ids.type, shared) // parts
    block, entry = Axis(BLOCK, parts), Axis(ENTRY, entries(count, rows // parts))
    op = DistinctIds(shared, rows // parts, block, entry, Axis(SOURCE, parts), along)
    distinct, places = build.apply_all(op, ids)
    looked_up = build.apply(LookUpEntries(over), distinct, table)
    return (build.apply(TakeEntries(along), looked_up, places),)


@op("exchange_rows")
class SparseAllToAll(Collective):
    """Every rank gets what all have for its part of `after`, by parts of `before`. The first tensor has ids, the others
    what belongs to them.

    Of each list of entries, only those that there are travel, after their number.
    """

    over: str
    parts: int
    before: str
    after: str
    tensors: int = 2
    made = "exchanged"

    @classmethod
    def between(cls, over: str, parts: int, ends: StatePairs) -> Reshard:
        """From one axis to another."""
        return cls(over, parts, str(ends[0][0]), str(ends[0][1]), len(ends))

    @property
    def ends(self) -> StatePairs:
        """From split along one axis to split along another."""
        return ((self.before, self.after),) * self.tensors

    @property
    def bucket(self) -> tuple[object, ...]:
        """None: the first tensor says how much of the others there is."""
        return (self, object())

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """One axis is `parts` times as long, the other divided by `parts`."""
        return tuple(
            type.resized(self.before, type.axis(self.before).size * self.parts).resized(
                self.after, type.axis(self.after).size // self.parts
            )
            for type in types
        )

    def seconds(self, local_bytes: float, link: Link) -> tuple[float, float]:
        """An exchange of numbers, and one of entries, if ids are spread evenly over all blocks."""
        latency, time = link.exchange(self.parts, local_bytes / self.parts)
        return 2 * latency, time

    def buffers(self, operands: Sequence[Type], results: Sequence[Type], adds: bool) -> Buffers:
        """As many entries as there is room for. The host makes results in two steps, and marks those that are filled;
        a GPU exchanges all.
        """
        if not adds:
            return super().buffers(operands, results, adds)
        entries = sum(type.bytes for type in operands)
        marks = 2 * operands[0].elements
        return Buffers(entries + marks, entries, adding=marks + max(type.bytes for type in operands))

    def moved(self, operands: Sequence[Type]) -> float:
        """K(N−1)/N², if ids are spread evenly: of the K bytes that there is room for, an Nth is filled."""
        return sum(type.bytes for type in operands) * (self.parts - 1) / self.parts**2

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.exchange_rows(mesh axis, tensors, gathered dimensions, split dimensions)`."""
        dims = (f"({', '.join(str(x.type.position(axis)) for x in arguments)},)" for axis in (self.before, self.after))
        return f"c.exchange_rows({self.over!r}, {self._tensors(arguments)}, {', '.join(dims)})"


@op("update_rows")
class UpdateRows(Update):
    """The update `optimizer`, with its `settings`, of those rows of a table along `over` that have an entry.

    Operands: the table, rows of its gradient, a tensor for each of the states, the ids, and what that update needs.
    Other rows stay as they are, and so does what is kept of them. Weight decay applies to the rows that are updated.
    """

    optimizer: str
    settings: tuple[tuple[str, Any], ...]
    over: str

    @classmethod
    def of(cls, update: Update, over: str) -> UpdateRows:
        """That of an update of all rows."""
        names = [each.name for each in attributes(type(update)) if each.name not in update.rule]
        settings = tuple((name, getattr(update, name)) for name in names)
        return cls(update.name, settings, over, **update.rule)

    @property
    def update(self) -> Update:
        """The update as of all rows."""
        return cast("Update", make(self.optimizer, **dict(self.settings), **self.rule))

    @property
    def table(self) -> str | None:
        """The axis along which rows are told apart."""
        return self.over

    @property
    def states(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the update."""
        return self.update.states

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the update."""
        return self.update.results

    def state_types(self, parameter: Type) -> tuple[Type, ...]:
        """Those of the update: all rows have states."""
        return self.update.state_types(parameter)

    def splits(self, parameter: Type, axis: str, parts: int) -> bool:
        """As the update can."""
        return self.update.splits(parameter, axis, parts)

    def operands(
        self, build: Builder, parameter: Type, part: Value, gradient: Value, states: Sequence[Value]
    ) -> tuple[Value, ...]:
        """What the update needs of each row of the gradient."""
        return self.update.operands(build, parameter, part, gradient, states)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The updated table and states."""
        table, gradient, *others = types
        states, (ids, *_) = others[: len(self.states)], others[len(self.states) :]
        rows, blocks = table.axis(self.over).size, ids.axis(BLOCK).size
        assert rows % blocks == 0, (self, types)
        assert all(gradient.has(name) for name in (*ids.names, *table.without((self.over,)).names)), (self, types)
        return (table, *states)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the table; blocks of entries where its rows are split."""

        def states(name: str, types: Sequence[Type]) -> tuple[str | None, ...]:
            axes = []
            for type in types:
                own = BLOCK if name == self.over and type.has(BLOCK) else name
                axes.append(own if type.has(own) else None)
            return tuple(axes)

        return tuple(ShardingRule(states(name, operands), states(name, results)) for name in results[0].names)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Those of the update, of the rows of the gradient."""
        return self.update.flops([operands[1]], [operands[1]])

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The rows of the gradient, and those of the table and its states read and written."""
        return (3 + 2 * len(self.states)) * operands[1].bytes

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The places of entries and the rows that they have in the table and its states; and what the update is given
        and makes of them, or the rows of one of these once more.
        """
        table, gradient, *others = operands
        states, (ids, *needed) = others[: len(self.states)], others[len(self.states) :]
        by_entry = ids.without((BLOCK, ENTRY))

        def taken(type: Type) -> Type:
            rest = (axis for axis in type.axes if axis.name != self.over and not by_entry.has(axis.name))
            return Type(type.dtype, (*ids.axes, *rest))

        own = [taken(type) for type in (table, *states)]
        inputs = [gradient, *own[1:], *needed]
        making = sum(type.bytes for type in (gradient, *needed)) + self.update.workspace([own[0], *inputs], own)
        return PLACES * ids.bytes + sum(type.bytes for type in own) + max(making, max(type.bytes for type in own))

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, which is given the update of rows in one piece."""
        table, gradient, *others = arguments
        count = len(self.states)
        states, (ids, *needed) = others[:count], others[count:]
        shared = tuple(name for name in ids.type.names if name not in (BLOCK, ENTRY))
        order, texts, inner = [], [], []
        named = [("x", table), *((f"s{i}", each) for i, each in enumerate(states))]
        for name, each in (*named, ("d", gradient), *((f"o{i}", each) for i, each in enumerate(needed))):
            stored = not each.type.has(ENTRY)
            head = (*shared, self.over) if stored else (*shared, BLOCK, ENTRY)
            axes = _ordered(each.type, head, ())
            order.append(tuple(map(each.type.position, axes)))
            texts.append(each.text)
            # In the update, the axis of rows is that of the rows in one piece, in the place that it has in the table.
            piece = (*shared, self.over, *axes[len(head) :])
            meant = [own for own in (each.type if stored else table.type).names if own in piece]
            sizes = {axis.name: axis for axis in (*each.type.axes, *table.type.axes)}
            type = Type(each.type.dtype, tuple(sizes[own] for own in meant))
            inner.append((name, Argument(permuted(name, piece, meant), type)))
        x, *own = (argument for _, argument in inner)
        update = self.update.emit((x, own[count], *own[:count], *own[count + 1 :]), results)
        at = permuted(ids.text, ids.type.names, (*shared, BLOCK, ENTRY))
        names = ", ".join(name for name, _ in inner)
        tensors, orders = (f"({', '.join(map(str, each))},)" for each in (texts, order))
        return f"kernels.update_rows(lambda {names}: {update}, {at}, {tensors}, {orders}, {count + 1}, {len(shared)})"


def _row_bytes(rows: Type) -> int:
    """Of the row of one entry."""
    names = (name for name in rows.names if name in (SOURCE, BLOCK, ENTRY))
    return rows.bytes // max(1, _elements(rows, tuple(names)))


def _elements(type: Type, names: Sequence[str]) -> int:
    """The number of positions along some axes."""
    count = 1
    for name in names:
        count *= type.axis(name).size
    return count
