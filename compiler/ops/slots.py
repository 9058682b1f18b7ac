"""Mixtures of experts with capacity: slots of static size, so that tokens travel by one all-to-all.

Each row of the batch has its own slots, an equal number for each expert. First choices have them before second ones,
then positions in order; what finds no slot contributes zero (GShard, arXiv 2006.16668).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.intervals import Interval
from partita.compiler.ops.op import TORCH_DTYPES, Argument, Op, ShardingRule, agree, op, permuted, shape_text
from partita.compiler.ops.pointwise import summed_to
from partita.compiler.ops.position import PLACE, Positioned, Shards, offset_text
from partita.compiler.ops.shape import arranged
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@op("slot_index")
class SlotIndex(Op):
    """The slot of each choice: how many choices of the same expert have precedence.

    `order` are the axes that slots are given out along, the slowest first: choices, then positions.
    """

    order: tuple[str, ...]

    @property
    def reduces(self) -> tuple[str, ...]:
        """`order`."""
        return self.order

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """At most all others come before."""
        return 0, prod(types[0].axis(name).size for name in self.order) - 1

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes of the ids."""
        assert all(types[0].has(name) for name in self.order), (self, types)
        return (types[0].with_dtype("i64"),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis along which no slots are given out."""
        return tuple(ShardingRule((name,), (name,)) for name in results[0].names if name not in self.order)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A sort."""
        return 2 * operands[0].elements * operands[0].elements.bit_length()

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Ids in order, their indices, and where each of them begins."""
        return 6 * results[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, on [others, choices]."""
        (ids,) = arguments
        others = [name for name in ids.type.names if name not in self.order]
        order = [*others, *self.order]
        shape = [ids.type.axis(name).size for name in order]
        flat = [*shape[: len(others)], prod(shape[len(others) :])]
        text = permuted(ids.text, ids.type.names, order)
        if flat != shape:
            return permuted(
                f"kernels.slot_index({text}.reshape{shape_text(flat)}).view{shape_text(shape)}",
                order,
                results[0].names,
            )
        return permuted(f"kernels.slot_index({text})", order, results[0].names)


class Slotted(Positioned):
    """What `dispatch` and `collect` have in common: the source text of their kernels' last arguments."""

    guarded: bool
    shards: Shards
    fusible = False

    def kernel_text(self, name: str, arguments: Sequence[str], shared: int, experts: Axis, slots: Axis) -> str:
        """The call of a kernel on texts in its order."""
        ranges = (f"({offset_text(axis, self.shards)}, {axis.size})" for axis in (experts, slots))
        return f"kernels.{name}({', '.join(arguments)}, {shared}, {', '.join(ranges)})"

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Rows read and written, and the ids."""
        return 2 * results[0].bytes + sum(type.bytes for type in operands[1:])

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The place of each choice, with what it is made of, and the choice of each place; rows in another order."""
        rows, ids, _ = operands
        places = max(type.elements for type in (rows, results[0]))
        return 2 * PLACE * ids.elements + PLACE * places + rows.bytes


@op("dispatch")
class Dispatch(Slotted):
    """Rows of x in the slots of the experts that they chose; empty slots are zeros. Operands: x, ids, slots of the ids.

    `own` are the axes of the ids that the result lacks, the first of which x has; `experts` and `slots` take its place.
    """

    own: tuple[str, ...]
    experts: Axis
    slots: Axis
    guarded: bool = False
    shards: Shards = ()

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The second operand; it indexes the experts."""
        return 1, self.experts

    @property
    def begins(self) -> tuple[str, ...]:
        """The first expert and the first slot of the shard."""
        return self.experts.name, self.slots.name

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """x's axes, with experts and slots in place of its own."""
        x, ids, slots = types
        assert ids.names == slots.names or sorted(ids.names) == sorted(slots.names), (self, types)
        assert all(ids.has(name) for name in self.own), (self, types)
        assert x.has(self.own[0]), (self, types)
        assert all(x.has(name) for name in ids.names if name not in self.own), (self, types)
        assert agree(*types), (self, types)
        axes: list[Axis] = []
        for axis in x.axes:
            if axis.name == self.own[0]:
                axes += [self.experts, self.slots]
            elif axis.name not in self.own:
                axes.append(axis)
        return (Type(x.dtype, tuple(axes)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Other axes; experts and slots, which need all rows; own axes, which makes the result partial; linear in x."""

        def states(name: str) -> tuple[str | None, ...]:
            return tuple(name if each.has(name) else None for each in operands)

        places = (self.experts.name, self.slots.name)
        aligned = tuple(ShardingRule(states(name), (name,)) for name in results[0].names if name not in places)
        cut = tuple(ShardingRule((None, None, None), (name,)) for name in places)
        own = tuple(ShardingRule(states(name), (SUM,)) for name in self.own)
        return (*aligned, *cut, *own, ShardingRule((SUM, None, None), (SUM,)))

    def neutral(self, axis: str) -> float:
        """No slot."""
        return -1.0 if axis in self.own else 0.0

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Each row's from its slots, added up over choices that x lacks."""
        x, ids, slots = node.inputs
        back = Collect(self.experts.name, self.slots.name, self.guarded)
        rows = build.apply(back, d, ids, slots)
        return arranged(build, summed_to(build, rows, x.type), x.type.names), None, None

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, on [others, own, rest]."""
        x, ids, slots = arguments
        (result,) = results
        shared = [name for name in ids.type.names if name not in self.own]
        rest = [name for name in x.type.names if name not in shared and name not in self.own]
        own = [name for name in self.own if x.type.has(name)]
        shape = [ids.type.axis(name).size if x.type.has(name) else 1 for name in (*shared, *self.own)]
        shape.append(prod(x.type.axis(name).size for name in rest))
        view = permuted(x.text, x.type.names, [*shared, *own, *rest]) + f".reshape{shape_text(shape)}"
        texts = [view, *(permuted(each.text, each.type.names, [*shared, *self.own]) for each in (ids, slots))]
        text = self.kernel_text("dispatch", texts, len(shared), self.experts, self.slots)
        order = [*shared, self.experts.name, self.slots.name, *rest]
        return permuted(f"{text}.view{shape_text([result.axis(name).size for name in order])}", order, result.names)


@op("collect")
class Collect(Slotted):
    """For each choice the row of y in its slot; zeros if it found none. Operands: y, ids, slots of the ids.

    The reverse of `dispatch`, and its gradient.
    """

    experts: str
    slots: str
    guarded: bool = False
    shards: Shards = ()

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The second operand; it indexes the experts."""
        return 1, operands[0].axis(self.experts)

    @property
    def begins(self) -> tuple[str, ...]:
        """The first expert and the first slot of the shard."""
        return self.experts, self.slots

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes of the ids, then y's others."""
        y, ids, slots = types
        assert sorted(ids.names) == sorted(slots.names), (self, types)
        assert agree(*types), (self, types)
        rest = [a for a in y.axes if a.name not in (self.experts, self.slots) and not ids.has(a.name)]
        return (Type(y.dtype, (*ids.axes, *rest)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the result; experts and slots, which makes it partial; linear in y."""
        aligned = tuple(
            ShardingRule(tuple(name if each.has(name) else None for each in operands), (name,))
            for name in results[0].names
        )
        parts = tuple(ShardingRule((name, None, None), (SUM,)) for name in (self.experts, self.slots))
        return (*aligned, *parts, ShardingRule((SUM, None, None), (SUM,)))

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """Each choice's in its slot."""
        y, ids, slots = node.inputs
        own = tuple(name for name in ids.type.names if not y.type.has(name))
        experts, places = y.type.axis(self.experts), y.type.axis(self.slots)
        back = build.apply(Dispatch(own, experts, places, self.guarded), d, ids, slots)
        return arranged(build, back, y.type.names), None, None

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, on [others, experts, slots, rest]."""
        y, ids, slots = arguments
        (result,) = results
        shared = [name for name in ids.type.names if y.type.has(name)]
        own = [name for name in ids.type.names if not y.type.has(name)]
        places = (self.experts, self.slots)
        rest = [name for name in y.type.names if name not in shared and name not in places]
        shape = [y.type.axis(name).size for name in (*shared, *places)]
        shape.append(prod(y.type.axis(name).size for name in rest))
        view = permuted(y.text, y.type.names, [*shared, *places, *rest]) + f".reshape{shape_text(shape)}"
        texts = [view, *(permuted(each.text, each.type.names, [*shared, *own]) for each in (ids, slots))]
        text = self.kernel_text("collect", texts, len(shared), *(y.type.axis(name) for name in places))
        order = [*shared, *own, *rest]
        return permuted(f"{text}.view{shape_text([result.axis(name).size for name in order])}", order, result.names)


@op("load")
class Load(Positioned):
    """How many choices each expert has, over the axes `over` of the ids. No gradient."""

    over: tuple[str, ...]
    into: Axis
    dtype: str
    guarded: bool = False
    shards: Shards = ()
    fusible = False

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The operand, which indexes the experts."""
        return 0, self.into

    @property
    def begins(self) -> tuple[str, ...]:
        """The first expert of the shard."""
        return (self.into.name,)

    def in_zigzag(self, axis: str, ranks: int) -> Op | None:
        """Counts do not depend on the order of what is counted."""
        return None if axis == self.into.name else self

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The remaining axes, then the experts."""
        rest = types[0].without(self.over)
        return (Type(self.dtype, (*rest.axes, self.into)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any remaining axis; the experts, which need all ids; counted axes, which makes the result partial."""
        aligned = tuple(ShardingRule((name,), (name,)) for name in operands[0].names if name not in self.over)
        counted = tuple(ShardingRule((name,), (SUM,)) for name in self.over)
        return (*aligned, ShardingRule((None,), (self.into.name,)), *counted)

    def neutral(self, axis: str) -> float:
        """No expert."""
        return -1.0 if axis in self.over else 0.0

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One addition for each id."""
        return operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The place of each id, and the ones that are added."""
        return 2 * PLACE * operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, on [others, counted]."""
        (ids,) = arguments
        rest = [name for name in ids.type.names if name not in self.over]
        view = permuted(ids.text, ids.type.names, [*rest, *self.over])
        into = results[0].axis(self.into.name)
        start = offset_text(into, self.shards)
        end = "" if start == "0" else f", {start}"
        text = f"kernels.load({view}, {len(rest)}, {into.size}, {TORCH_DTYPES[self.dtype]}{end})"
        return permuted(text, [*rest, self.into.name], results[0].names)
