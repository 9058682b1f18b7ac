"""The recurrence h[t+1] = a[t]·h[t] − x[t]ᵀ·(y[t]·h[t]) + b[t] along one axis, and its gradient.

It is that of the delta rule's memory, from chunk to chunk (`partita.compiler.ops.delta_rule`): what fades, less what is
read and written again. As in `partita.compiler.ops.linear_scan`, the axis is divided into blocks, one for each shard: a
block maps the state before it, h, to product·h + last, and every rank gets all of these pairs.

A result is the state *before* each position. So the gradient is such a recurrence, too: with the cotangents for b, and
x and y for each other, it yields from the end the gradients of b; the others are products of these with the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Argument, Op, ShardingRule, accumulation, agree, op, permuted, wide_bytes
from partita.compiler.ops.pointwise import cast, constant, pointwise
from partita.compiler.ops.position import where_compared
from partita.compiler.ops.shape import Expand, arranged
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


class _Recurrence(Op):
    """What the operations share. Operands: a, with axes `over` and maybe `key`; x and y, with `over`, `row` and `key`;
    b, with `key`, all axes of the others but `row`, and any more. They are computed in the dtype of accumulation.
    """

    over: str
    row: str
    key: str
    block: int
    backward: bool
    fusible = False

    def _check(self, a: Type, x: Type, y: Type, b: Type) -> None:
        assert agree(a, x, y, b), (self, a, x, y, b)
        assert set(x.names) == set(y.names), (self, x, y)
        assert {self.over} <= set(a.names) <= set(b.names), (self, a, b)
        assert {self.over, self.key} <= set(x.names) - {self.row} <= set(b.names), (self, x, b)

    def _blocks(self, type: Type) -> Type:
        """The type with one entry for each block, in the dtype of accumulation."""
        size = type.axis(self.over).size
        assert size % self.block == 0, (self, type)
        return type.resized(self.over, size // self.block).with_dtype(accumulation(type.dtype))

    def _free(self, b: Type) -> list[str]:
        """The axes that may be split: `over` between blocks only."""
        return [name for name in b.names if name != self.key and (self.block or name != self.over)]

    def _orders(self, arguments: Sequence[Argument]) -> tuple[list[str], list[str], list[str], list[str]]:
        """The axes of a, of x and y, and of states, as the kernels take them; and the batch axes, which come first."""
        a, x, _, b = (each.type for each in arguments[:4])
        matrix = (self.over, self.row, self.key)
        batch = [name for name in b.names if name not in matrix and (x.has(name) or a.has(name))]
        more = [name for name in b.names if name not in matrix and name not in batch]
        keys = [self.key] if a.has(self.key) else []
        return (
            [self.over, *batch, *keys],
            [self.over, *batch, self.row, self.key],
            [self.over, *batch, self.key, *more],
            batch,
        )

    def _call(self, kernel: str, arguments: Sequence[Argument], options: str = "") -> str:
        """A call of a kernel; operands that lack batch axes have views with these."""
        gates, factors, states, batch = self._orders(arguments)
        orders = [gates, factors, factors, *[states] * (len(arguments) - 3)]
        sizes = {axis.name: axis.size for each in arguments for axis in each.type.axes}
        texts = []
        for each, order in zip(arguments, orders, strict=True):
            text = permuted(each.text, each.type.names, [name for name in order if each.type.has(name)])
            if any(name in batch and not each.type.has(name) for name in order):
                places = ", ".join(":" if each.type.has(name) else "None" for name in order)
                shape = ", ".join("-1" if each.type.has(name) else str(sizes[name]) for name in order)
                text = f"{text}[{places}].expand({shape})"
            texts.append(text)
        backward = ", backward=True" if self.backward else ""
        return f"kernels.{kernel}({', '.join(texts)}{options}, batch={len(batch)}{backward})"

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two products with factors, what fades, and a sum, for each element of the states."""
        _, x, _, b = operands[:4]
        return (4 * x.axis(self.row).size + 3) * b.elements

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """The products."""
        return 4 * operands[1].axis(self.row).size * operands[3].elements

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """Products of one position."""
        return ()

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Operands and results with the scanned axis first, in the dtype of accumulation."""
        b = operands[3]
        states = 4 * wide_bytes(b) // b.axis(self.over).size
        return sum(map(wide_bytes, (*operands, *results))) + states


@op("delta_scan")
class DeltaScan(_Recurrence):
    """The state before each position: before the first it is zero. With `backward` the recurrence runs from the end, to
    h[t−1], and begins with zero after the last.

    With a `block`, the fifth operand is the state before each block of so many positions. `between` blocks, of which a
    position is one, it is not divided again.
    """

    over: str
    row: str
    key: str
    backward: bool = False
    block: int = 0
    between: bool = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of b."""
        self._check(*types[:4])
        b, states = types[3], types[4:]
        assert len(states) == bool(self.block), (self, types)
        for state in states:
            assert set(state.names) == set(b.names), (self, b, state)
            assert agree(self._blocks(b), state), (self, b, state)
        return (b,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of b but `key`; linear in b and the states before blocks."""
        rules = [
            ShardingRule(tuple(name if x.has(name) else None for x in operands), (name,))
            for name in self._free(operands[3])
        ]
        return (*rules, ShardingRule((None, None, None, *[SUM] * (len(operands) - 3)), (SUM,)))

    def decompose(self, build: Builder, node: Node, axis: str, parts: int) -> tuple[Value, ...] | None:
        """The blocks' products and last states, the states before the blocks, and the blocks from there."""
        if axis != self.over or self.block or self.between:
            return None
        block = node.inputs[3].type.axis(axis).size // parts
        products, lasts = build.apply_all(DeltaScanBlocks(axis, self.row, self.key, block, self.backward), *node.inputs)
        # A state is multiplied by −(−1)ᵀ·product.
        rows, keys = products.type.axis(self.row), products.type.axis(self.key)
        minus = pointwise(build, "negate", where_compared(build, "equal", rows, keys, products.type.dtype))
        minus = build.apply(Expand(products.type.without([self.row, self.key]).axes), minus)
        nothing = build.apply(Expand((products.type.axis(axis),)), constant(build, 0.0, products))
        over = DeltaScan(axis, self.row, self.key, self.backward, between=True)
        before = build.apply(over, nothing, minus, products, lasts)
        return (build.apply(DeltaScan(axis, self.row, self.key, self.backward, block), *node.inputs, before),)

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The recurrence in the other direction, and its products with the states."""
        a, x, y, b = node.inputs
        back = DeltaScan(self.over, self.row, self.key, not self.backward)
        e, h = build.apply(back, a, y, x, d), node.output
        faded = tuple(name for name in b.type.names if not a.type.has(name))
        more = tuple(name for name in b.type.names if not x.type.has(name))
        read, written = (build.apply(Dot((self.key,)), *pair) for pair in ((y, h), (x, e)))
        to_x, to_y = (build.apply(Dot(more), *pair) for pair in ((read, e), (written, h)))
        to_a = cast(build, build.apply(Dot(faded), e, h), a.type.dtype)
        results = (to_a, pointwise(build, "negate", to_x), pointwise(build, "negate", to_y), e)
        return tuple(arranged(build, each, own.type.names) for each, own in zip(results, node.inputs, strict=True))

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        _, _, states, _ = self._orders(arguments)
        return permuted(self._call("delta_scan", arguments), states, results[0].names)


@op("delta_scan_blocks")
class DeltaScanBlocks(_Recurrence):
    """For each block of `block` positions: the product of the steps, which are matrices of `row` and `key`, and the
    state after it if that is zero before it.
    """

    over: str
    row: str
    key: str
    block: int
    backward: bool = False
    results = ("", "last")

    def _products(self, a: Type, x: Type, b: Type) -> Type:
        rest = [axis for axis in b.axes if axis.name != self.key and (a.has(axis.name) or x.has(axis.name))]
        key = b.axis(self.key)
        return self._blocks(Type(b.dtype, (*rest, Axis(self.row, key.size), key)))

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axes of x and b with one entry for each block, in the dtype of accumulation."""
        self._check(*types)
        a, x, _, b = types
        return self._products(a, x, b), self._blocks(b)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of b but `key`; the last states are linear in b."""
        rules = [
            ShardingRule(
                tuple(name if x.has(name) else None for x in operands),
                (name if results[0].has(name) else None, name),
            )
            for name in self._free(operands[3])
        ]
        return (*rules, ShardingRule((None, None, None, SUM), (None, SUM)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """As the recurrence, of the states and of the products."""
        return super().flops(operands, results) + int(self.product_flops(operands, results))

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        _, factors, states, _ = self._orders(arguments)
        orders = [
            tuple(have.index(name) for name in wanted.names)
            for have, wanted in zip((factors, states), results, strict=True)
        ]
        return self._call(
            "delta_scan_blocks", arguments, f", block={self.block}, product={orders[0]}, last={orders[1]}"
        )
