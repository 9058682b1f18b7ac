"""The linear recurrence h[t] = a[t]·h[t−1] + b[t], elementwise along one axis, and its gradient.

Along the axis itself a recurrence is divided into blocks (`Op.blockwise`), one for each shard: a block maps the state
before it, h, to product·h + last. These pairs are small; every rank gets all of them and finds the state before its own
block (Blelloch, "Prefix sums and their applications", 1990; Martin and Cundy, arXiv 1709.04057).

With `backward` the recurrence runs from the end: h[t] = a[t]·h[t+1] + b[t].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.decoding import WriteState
from partita.compiler.ops.op import Argument, Op, ShardingRule, accumulation, agree, broadcast, op, wide_bytes
from partita.compiler.ops.pointwise import cast, pointwise, summed_to
from partita.compiler.ops.shape import Shift, arranged
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


class _Recurrence(Op):
    """What the operations share. Operands: `a` and a tensor with all axes, both with `over`; then, one value for each
    block of `block` positions, the states at the blocks' ends.
    """

    over: str
    block: int
    backward: bool
    fusible = False

    def _blocks(self, type: Type, wide: bool = False) -> Type:
        """The type with one entry for each block."""
        blocked = self._blocked(type, self.block)
        return blocked if wide else blocked.with_dtype(type.dtype)

    def _blocked(self, type: Type, block: int) -> Type:
        """The type with one entry for each block of so many positions, in the dtype of accumulation."""
        size = type.axis(self.over).size
        assert size % block == 0, (self, type)
        return type.resized(self.over, size // block).with_dtype(accumulation(type.dtype))

    def _check(self, a: Type, full: Type, *others: Type) -> None:
        assert a.has(self.over), (self, a)
        assert set(a.names) <= set(full.names), (self, a, full)
        assert agree(a, full, *others), (self, a, full, others)

    def _check_blocks(self, full: Type, *states: Type) -> None:
        for state in states:
            assert agree(self._blocks(full), state), (self, full, state)
            assert set(state.names) == set(full.names), (self, full, state)

    def _splits(self, full: Type) -> list[str]:
        """The axes that may be split: the scanned one between blocks only."""
        return [name for name in full.names if self.block or name != self.over]

    def _options(self, result: Type) -> str:
        words = [str(result.position(self.over)), *([f"block={self.block}"] if self.block else [])]
        return ", ".join([*words, *(["backward=True"] if self.backward else [])])


@op("linear_scan")
class LinearScan(_Recurrence):
    """h[t] = a[t]·h[t−1] + b[t] over axis `over`, where h before the first position is zero.

    Operands: a, whose axes are among those of b; b. With `exclusive` a position has the state before it. With a
    `block`, the third operand is the state before each block of so many positions.
    """

    over: str
    backward: bool = False
    exclusive: bool = False
    block: int = 0

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of b."""
        a, b, *states = types
        self._check(a, b)
        assert len(states) == bool(self.block), (self, types)
        self._check_blocks(b, *states)
        return (b,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but `over`, which blocks may be split along; linear in b and the states before blocks."""
        rules = [
            ShardingRule(tuple(name if x.has(name) else None for x in operands), (name,))
            for name in self._splits(operands[1])
        ]
        return (*rules, ShardingRule((None, *[SUM] * (len(operands) - 1)), (SUM,)))

    def decompose(self, build: Builder, node: Node, axis: str, parts: int) -> tuple[Value, ...] | None:
        """The blocks' products and last states, the states before the blocks, and the blocks from there."""
        if axis != self.over or self.exclusive or self.block:
            return None
        a, b = node.inputs
        block = b.type.axis(axis).size // parts
        before = states_before(build, a, b, axis, block, self.backward)
        return (build.apply(LinearScan(axis, self.backward, block=block), a, b, before),)

    def decode_step(
        self, build: Builder, operands: Sequence[Value], axis: str, state: Callable[[Type], Value]
    ) -> tuple[Value, ...] | None:
        """The part is a block, before which the state is kept."""
        if axis != self.over or self.backward or self.exclusive or self.block:
            return None
        a, b = operands
        block = b.type.axis(axis).size
        before = state(self._blocked(b.type, block))
        result = build.apply(LinearScan(axis, block=block), a, b, before)
        products, lasts = build.apply_all(LinearScanBlocks(axis, block), a, b)
        after = pointwise(build, "add", pointwise(build, "multiply", before, products), lasts)
        return (build.apply(WriteState(1), before, after, result),)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A product and a sum for each element."""
        return 2 * results[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The operands and the result with the scanned axis first, in the dtype of accumulation."""
        return wide_bytes(operands[0]) + 2 * wide_bytes(results[0])

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """A scan in the other direction, and its products with the states before each position."""
        a, _ = node.inputs
        results = build.apply_all(LinearScanGradient(self.over, self.backward), a, node.output, d)
        return tuple(results)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, on operands in the result's order."""
        (result,) = results
        texts = ", ".join(broadcast(each, result.names) for each in arguments)
        exclusive = ", exclusive=True" if self.exclusive else ""
        return f"kernels.linear_scan({texts}, dim={self._options(result)}{exclusive})"


@op("linear_scan_blocks")
class LinearScanBlocks(_Recurrence):
    """For each block of `block` positions: the product of a, and the state after the block if it is zero before."""

    over: str
    block: int
    backward: bool = False
    results = ("", "last")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes of a and of b, with an entry for each block, in the dtype of accumulation."""
        a, b = types
        self._check(a, b)
        return self._blocks(a, wide=True), self._blocks(b, wide=True)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; the last states are linear in b."""
        a, b = operands
        rules = []
        for name in b.names:
            states = (name if a.has(name) else None, name)
            rules.append(ShardingRule(states, states))
        return (*rules, ShardingRule((None, SUM), (None, SUM)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """As the scan, and the products."""
        return operands[0].elements + 2 * operands[1].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The operands with the scanned axis first, in the dtype of accumulation, and states."""
        return sum(map(wide_bytes, operands)) + sum(type.bytes for type in results)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, on operands in the order of b."""
        a, b = arguments
        names = b.type.names
        order = [name for name in names if a.type.has(name)]
        back = tuple(order.index(name) for name in a.type.names)
        dims = tuple(names.index(name) for name in order)
        options = f"dim={self._options(b.type)}, product={dims}, order={back}"
        return f"kernels.linear_scan_blocks({broadcast(a, names)}, {b.text}, {options})"


@op("block_ends")
class BlockEnds(_Recurrence):
    """The last entry of each block of `block` positions along `over`, or with `backward` the first."""

    over: str
    block: int
    backward: bool = False
    rearranges = True
    is_view = True
    fusible = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """An entry for each block."""
        return (self._blocks(types[0]),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear."""
        return (*(ShardingRule((name,), (name,)) for name in operands[0].names), ShardingRule((SUM,), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A slice with a step."""
        (x,) = arguments
        before = ":, " * x.type.position(self.over)
        return f"{x.text}[{before}{0 if self.backward else self.block - 1}::{self.block}]"


@op("linear_scan_gradient")
class LinearScanGradient(_Recurrence):
    """Gradients of a linear scan for a and b. Operands: a, the scan's result, the cotangent d.

    That of b is g[t] = d[t] + a[t+1]·g[t+1], and that of a is g[t]·h[t−1], summed over the axes that a lacks. With a
    `block` two more operands have, for each block of so many positions, h before it, and a·g after it.
    """

    over: str
    backward: bool = False
    block: int = 0
    results = ("a", "b")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The types of a and b."""
        a, h, d, *ends = types
        self._check(a, h, d)
        assert set(h.names) == set(d.names), (self, types)
        if self.block:
            assert len(ends) == 2, (self, types)
            self._check_blocks(h, *ends)
        return a, h

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but `over`, which blocks may be split along; a's gradient is partial along axes that it lacks.
        Linear in d with what follows the blocks; a's gradient also in h with what precedes them.
        """
        rules = [
            ShardingRule(
                tuple(name if x.has(name) else None for x in operands),
                (name if results[0].has(name) else SUM, name),
            )
            for name in self._splits(operands[1])
        ]
        after, before = ((None, SUM), (SUM, None)) if self.block else ((), ())
        rules.append(ShardingRule((None, None, SUM, *after), (SUM, SUM)))
        rules.append(ShardingRule((None, SUM, None, *before), (SUM, None)))
        return tuple(rules)

    def formula(self, build: Builder, node: Node) -> tuple[Value, ...] | None:
        """A scan in the other direction, and products with the states before."""
        a, h, d = node.inputs
        step = -1 if self.backward else 1
        g = build.apply(LinearScan(self.over, not self.backward), build.apply(Shift(self.over, -step), a), d)
        product = pointwise(build, "multiply", g, build.apply(Shift(self.over, step), h))
        return arranged(build, summed_to(build, product, a.type), a.type.names), arranged(build, g, h.type.names)

    def decompose(self, build: Builder, node: Node, axis: str, parts: int) -> tuple[Value, ...] | None:
        """What flows back out of a block, a·g at its first position, is a scan from the end, of a·d."""
        if axis != self.over or self.block:
            return None
        a, h, d = node.inputs
        block = h.type.axis(axis).size // parts
        products = pointwise(build, "multiply", d, a)
        after = states_before(build, a, products, axis, block, not self.backward)
        ends = cast(build, build.apply(BlockEnds(axis, block, self.backward), h), accumulation(h.type.dtype))
        before = build.apply(Shift(axis, -1 if self.backward else 1), ends)
        return build.apply_all(LinearScanGradient(axis, self.backward, block), a, h, d, before, after)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A product and a sum for each element of either gradient."""
        return 4 * results[1].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Operands with the scanned axis first, the gradient of b, and the products, in the dtype of accumulation."""
        return wide_bytes(operands[0]) + 4 * wide_bytes(results[1])

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, on operands in the order of b."""
        a, names = arguments[0], results[1].names
        order = [name for name in names if a.type.has(name)]
        back = tuple(order.index(name) for name in a.type.names)
        summed = tuple(i for i, name in enumerate(names) if not a.type.has(name))
        texts = ", ".join(broadcast(each, names) for each in arguments)
        return f"kernels.linear_scan_gradient({texts}, dim={self._options(results[1])}, summed={summed}, order={back})"


def states_before(build: Builder, a: Value, b: Value, over: str, block: int, backward: bool) -> Value:
    """The states of a linear scan before each block of `block` positions; its operands are one entry for each block."""
    products, lasts = build.apply_all(LinearScanBlocks(over, block, backward), a, b)
    return build.apply(LinearScan(over, backward, exclusive=True), products, lasts)
