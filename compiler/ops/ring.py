"""Attention with keys and values that go round a ring: no rank ever has more than two blocks of them.

Liu, Zaharia and Abbeel, arXiv 2310.01889. Queries, keys and values are cut into one block for each rank. In each of so
many turns every rank attends to the keys and values that it has, and gives them to the next one; what it has made is
merged by the logarithms of denominators. In the backward pass, gradients of keys and values go round with them.

As operations on whole tensors, a turn is a `roll` by one block, and attention in a turn is of each block of queries to
the block of the rolled keys that stands beside it (`partita.compiler.ops.attend_block`). A roll of shards is a message
to the next rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.buffers import Buffers, packed
from partita.compiler.ops.collective import Collective, Reshard, StatePairs
from partita.compiler.ops.op import (
    TORCH_DTYPES,
    Argument,
    Op,
    ShardingRule,
    accumulation,
    agree,
    aligned_rules,
    attributes,
    make,
    op,
    permuted,
)
from partita.compiler.ops.pointwise import cast, pointwise
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.costs.links import Link
    from partita.compiler.graph import Builder, Node, Value


def _numbered(count: int) -> tuple[str, ...]:
    return ("", *map(str, range(1, count)))


# ---------------------------------------------------------------- one turn


@op("roll")
class Roll(Op):
    """Each of `count` tensors moved by one of `blocks` blocks along an axis, the last block to the first place."""

    axis: str
    blocks: int
    count: int = 1
    rearranges = True
    fusible = False

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """One for each operand."""
        return _numbered(self.count)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operands' types."""
        assert len(types) == self.count, (self, types)
        return types

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear."""
        names = dict.fromkeys(name for type in operands for name in type.names)
        states = [tuple(name if type.has(name) else None for type in operands) for name in names]
        linear = (SUM,) * self.count
        return (*(ShardingRule(each, each) for each in states), ShardingRule(linear, linear))

    def sharded(self, axis: str, size: int, mesh_axis: str, parts: int) -> Op:
        """Shards that are blocks go to the next rank."""
        return Ppermute(mesh_axis, parts, axis, self.count) if (axis, parts) == (self.axis, self.blocks) else self

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.roll`."""
        each = [(x.text, x.type.position(self.axis), x.type.axis(self.axis).size) for x in arguments]
        texts = [f"torch.roll({text}, {size // self.blocks}, {dim})" for text, dim, size in each]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


@op("turn")
class Ppermute(Collective):
    """Every rank gets the tensors of the one before it, the first those of the last: a roll of shards along `axis`."""

    over: str
    parts: int
    axis: str
    tensors: int = 1
    reshards = False
    made = "turned"

    @classmethod
    def between(cls, over: str, parts: int, ends: StatePairs) -> Reshard:
        """Of shards along one axis."""
        return cls(over, parts, str(ends[0][0]), len(ends))

    @property
    def ends(self) -> StatePairs:
        """Split as before."""
        return ((self.axis, self.axis),) * self.tensors

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """One for each operand."""
        return _numbered(self.tensors)

    @property
    def bucket(self) -> tuple[object, ...]:
        """None: it starts as early as can be."""
        return (self, object())

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operands' types."""
        return types

    def unsharded(self, keep: Collection[str | None]) -> Op:
        """A roll."""
        return Roll(self.axis, self.parts, self.tensors)

    def seconds(self, local_bytes: float, link: Link) -> tuple[float, float]:
        """A message to the next rank."""
        return link.pass_on(self.parts, local_bytes)

    def buffers(self, operands: Sequence[Type], results: Sequence[Type], adds: bool) -> Buffers:
        """What it receives are the results. A tensor alone is sent as it is."""
        row = packed(operands)
        return Buffers(row, row, in_place=True) if self.tensors > 1 else Buffers(0, row, in_place=True, lent=(0,))

    def moved(self, operands: Sequence[Type]) -> float:
        """All that a rank has."""
        return float(sum(type.bytes for type in operands))

    def start(self, arguments: Sequence[Argument]) -> str:
        """`c.turn(mesh axis, tensors)`."""
        return f"c.turn({self.over!r}, {self._tensors(arguments)})"


# ---------------------------------------------------------------- what turns make together


@op("merge_attended")
class MergeAttended(Op):
    """The attended values and denominators of two turns together. Operands: those of the one, then of the other."""

    dtype: str
    results = ("", "denominator")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """Those of either, with values of `dtype`."""
        o, denominator, *others = types
        assert agree(o, denominator, *others), (self, types)
        return o.with_dtype(self.dtype), denominator

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of the denominators, and that of the values, in which it is linear."""
        (wide,) = (name for name in results[0].names if not results[1].has(name))
        own = ShardingRule((wide, None, wide, None), (wide, None))
        return (*aligned_rules(operands, results), own, ShardingRule((SUM, None, SUM, None), (SUM, None)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two products and a sum for each value, and three functions for each denominator."""
        return 3 * results[0].elements + 20 * results[1].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with what is added to values in their order."""
        names, last = results[0].names, [*results[1].names]
        (wide,) = (name for name in names if name not in last)
        first, denominator, second, other = arguments
        texts = [
            first.text,
            denominator.text,
            permuted(second.text, second.type.names, names),
            permuted(other.text, other.type.names, last),
        ]
        back = tuple(last.index(name) for name in names if name != wide)
        options = f"{back}, {names.index(wide)}, {TORCH_DTYPES[self.dtype]}"
        return f"kernels.merge_attended({', '.join(texts)}, {options})"


# ---------------------------------------------------------------- the ring


def turns(op: Attention, node: Node, axis: str, parts: int) -> bool:
    """Whether attention can be computed in so many turns: where nothing but causality restricts what is seen."""
    q = node.inputs[0].type
    plain = not (op.extras or op.materializes or op.window)
    return axis == op.over and q.has(axis) and plain and q.axis(axis).size % parts == 0


def ring_attention(build: Builder, attend: Attention, node: Node, blocks: int) -> tuple[Value, ...]:
    """The results of attention by turns. Keys and values leave for the next turn before this one begins."""
    q, *here = node.inputs
    merged: tuple[Value, ...] = ()
    for turn in range(blocks):
        turned = build.apply_all(Roll(attend.over, blocks, 2), *here) if turn < blocks - 1 else ()
        own = build.apply_all(_block("attend_block", attend, blocks, turn), q, *here)
        dtype = q.type.dtype if turn == blocks - 1 else accumulation(q.type.dtype)
        merged = build.apply_all(MergeAttended(dtype), *merged, *own) if merged else own
        here = list(turned)
    return merged


def ring_attention_gradient(build: Builder, attend: Attention, node: Node, blocks: int) -> tuple[Value, ...]:
    """The gradients by turns, those of the first turn last. Gradients of keys and values follow these from the second
    turn on, and come home after the last.
    """
    q, k, v, *results = node.inputs
    roll, dtype, wide = Roll(attend.over, blocks, 2), q.type.dtype, accumulation(q.type.dtype)
    home: tuple[Value, ...] = (k, v)
    here, gradients = home, home[:0]
    for turn in (*range(1, blocks), 0):
        if turn == 1:
            here = build.apply_all(roll, *home)
        following = build.apply_all(roll, *here) if 0 < turn < blocks - 1 else home
        received = build.apply_all(roll, *gradients[1:]) if gradients else ()
        own = build.apply_all(_block("attend_block_gradient", attend, blocks, turn), q, *here, *results)
        if gradients:
            total = pointwise(build, "add", cast(build, gradients[0], wide), cast(build, own[0], wide))
            keys = (pointwise(build, "add", *pair) for pair in zip(own[1:], received, strict=True))
            own = (total if turn else cast(build, total, dtype), *keys)
        here, gradients = following, own
    return gradients


def _block(name: str, attend: Attention, blocks: int, turn: int) -> Op:
    known = {each.name: getattr(attend, each.name) for each in attributes(Attention)}
    return make(name, **known, blocks=blocks, turn=turn)
