"""Cumulative sums along one axis.

Along the axis itself a sum is divided into blocks (`Op.blockwise`), one for each shard: the sums of whole blocks are
small, every rank gets all of them, and adds those of the blocks before its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.decoding import WriteState
from partita.compiler.ops.op import Argument, Op, ShardingRule, accumulation, agree, op, permuted, wide_bytes
from partita.compiler.ops.pointwise import pointwise
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


def _blocks(type: Type, over: str, block: int) -> Type:
    """The type with one entry for each block along `over`, in the dtype of accumulation."""
    size = type.axis(over).size
    assert size % block == 0, (type, over, block)
    dtype = accumulation(type.dtype) if type.is_float else type.dtype
    return type.resized(over, size // block).with_dtype(dtype)


@op("cumsum")
class CumulativeSum(Op):
    """The sum of the elements up to each position along `over`; with `backward`, from each position to the end.

    Floats are accumulated in f32 at least. With `exclusive` a position's own element is left out. With a `block`, sums
    begin anew every so many positions, and the second operand has what is added to those of each block.
    """

    over: str
    backward: bool = False
    exclusive: bool = False
    block: int = 0
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand's type."""
        x, *before = types
        assert x.has(self.over), (self, x)
        assert len(before) == bool(self.block), (self, types)
        assert all(agree(_blocks(x, self.over, self.block), each) for each in before), (self, types)
        return (x,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis, but `over` between blocks only; linear."""
        names = [name for name in results[0].names if self.block or name != self.over]
        rules = [ShardingRule(tuple(name for _ in operands), (name,)) for name in names]
        return (*rules, ShardingRule(tuple(SUM for _ in operands), (SUM,)))

    def decompose(self, build: Builder, node: Node, axis: str, parts: int) -> tuple[Value, ...] | None:
        """The blocks' sums, those of all blocks before each, and the sums in the blocks from there."""
        if axis != self.over or self.exclusive or self.block:
            return None
        (x,) = node.inputs
        block = x.type.axis(axis).size // parts
        sums = build.apply(BlockSums(axis, block), x)
        before = build.apply(CumulativeSum(axis, self.backward, exclusive=True), sums)
        return (build.apply(CumulativeSum(axis, self.backward, block=block), x, before),)

    def decode_step(
        self, build: Builder, operands: Sequence[Value], axis: str, state: Callable[[Type], Value]
    ) -> tuple[Value, ...] | None:
        """The part is a block, and what is kept is added to its sums."""
        if axis != self.over or self.backward or self.exclusive or self.block:
            return None
        (x,) = operands
        block = x.type.axis(axis).size
        sums = build.apply(BlockSums(axis, block), x)
        before = state(sums.type)
        result = build.apply(CumulativeSum(axis, block=block), x, before)
        return (build.apply(WriteState(1), before, pointwise(build, "add", before, sums), result),)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The operand, reversed, and the sums, in the dtype of accumulation."""
        return 2 * wide_bytes(operands[0])

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """An element is in the sums of all positions from its own on."""
        if not node.output.type.is_float:
            return (None,)
        return (build.apply(CumulativeSum(self.over, not self.backward, self.exclusive), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        names = results[0].names
        texts = [permuted(each.text, each.type.names, names) for each in arguments]
        texts.append(f"dim={names.index(self.over)}")
        texts += [f"block={self.block}"] if self.block else []
        texts += [f"{word}=True" for word in ("backward", "exclusive") if getattr(self, word)]
        return f"kernels.cumsum({', '.join(texts)})"


@op("block_sums")
class BlockSums(Op):
    """The sum of each block of `block` positions along `over`, in f32 at least."""

    over: str
    block: int
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """One entry for each block."""
        return (_blocks(types[0], self.over, self.block),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis, `over` between blocks; linear."""
        return (*(ShardingRule((name,), (name,)) for name in operands[0].names), ShardingRule((SUM,), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One for each element read."""
        return operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (x,) = arguments
        return f"kernels.block_sums({x.text}, dim={x.type.position(self.over)}, block={self.block})"
