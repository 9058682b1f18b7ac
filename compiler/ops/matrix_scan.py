"""The recurrence h[t+1] = m[t]·h[t] + b[t] along one axis, where m[t] are matrices, and its gradient.

As in `partita.compiler.ops.linear_scan`, the axis is divided into blocks, one for each shard: a block maps the state
before it, h, to product·h + last, and every rank gets all of these pairs.

A result is the state *before* each position. So the gradient is such a recurrence, too: with the cotangents d and the
matrices' transposes it yields, from the end, the gradients of b; those of m are their products with the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.dot import Dot
from partita.compiler.ops.op import Argument, Op, ShardingRule, agree, op, permuted
from partita.compiler.ops.shape import Rename, arranged
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


class _Recurrence(Op):
    """What the operations share. Operands: m, with axes `over`, `rows` and `columns`; b, with all axes of m but
    `columns`, and any more. `columns` of m meet `rows` of the state.
    """

    over: str
    rows: str
    columns: str
    block: int
    backward: bool
    fusible = False

    def _check(self, m: Type, b: Type) -> None:
        assert m.axis(self.rows).size == m.axis(self.columns).size, (self, m)
        assert {self.over} <= set(m.names) - {self.columns} <= set(b.names) - {self.columns}, (self, m, b)
        assert agree(m, b), (self, m, b)
        assert m.dtype == b.dtype, (self, m, b)

    def _blocks(self, type: Type) -> Type:
        """The type with one entry for each block."""
        size = type.axis(self.over).size
        assert size % self.block == 0, (self, type)
        return type.resized(self.over, size // self.block)

    def _free(self, b: Type) -> list[str]:
        """The axes that may be split: `over` between blocks only."""
        return [name for name in b.names if name != self.rows and (self.block or name != self.over)]

    def _batch(self, m: Type) -> list[str]:
        return [name for name in m.names if name not in (self.over, self.rows, self.columns)]

    def _operands(self, arguments: Sequence[Argument]) -> tuple[list[str], list[str], list[str]]:
        """The source of the operands as the kernels take them, and the orders of their axes: m as [over, batch, rows,
        columns], b and states as [over, batch, rows, others].
        """
        m, b = arguments[0].type, arguments[1].type
        batch = self._batch(m)
        others = [name for name in b.names if not m.has(name)]
        matrix = [self.over, *batch, self.rows, self.columns]
        vector = [self.over, *batch, self.rows, *others]
        orders = [matrix, *[vector] * (len(arguments) - 1)]
        texts = [permuted(each.text, each.type.names, order) for each, order in zip(arguments, orders, strict=True)]
        return texts, matrix, vector

    def _options(self, arguments: Sequence[Argument]) -> str:
        backward = ", backward=True" if self.backward else ""
        return f"batch={len(self._batch(arguments[0].type))}{backward}"

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A product for each column of m and element of b."""
        m, b = operands[:2]
        return 2 * m.axis(self.columns).size * b.elements

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """Products of one position."""
        return ()

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Operands and results with the scanned axis first."""
        return sum(type.bytes for type in (*operands, *results))


@op("matrix_scan")
class MatrixScan(_Recurrence):
    """The state before each position: h[0] is zero, or with `backward` h[n−1], from which h[t−1] = m[t]·h[t] + b[t].

    With a `block`, the third operand is the state before each block of so many positions.
    """

    over: str
    rows: str
    columns: str
    backward: bool = False
    block: int = 0

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of b."""
        m, b, *states = types
        self._check(m, b)
        assert len(states) == bool(self.block), (self, types)
        for state in states:
            assert set(state.names) == set(b.names), (self, b, state)
            assert agree(self._blocks(b), state), (self, b, state)
        return (b,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of b but `rows`; linear in b and the states before blocks."""
        rules = [
            ShardingRule(tuple(name if x.has(name) else None for x in operands), (name,))
            for name in self._free(operands[1])
        ]
        return (*rules, ShardingRule((None, *[SUM] * (len(operands) - 1)), (SUM,)))

    def decompose(self, build: Builder, node: Node, axis: str, parts: int) -> tuple[Value, ...] | None:
        """The blocks' products and last states, the states before the blocks, and the blocks from there."""
        m, b = node.inputs[:2]
        block = b.type.axis(self.over).size // parts
        if axis != self.over or self.block or block == 1:
            return None  # single positions are their own products
        products, lasts = build.apply_all(MatrixScanBlocks(axis, self.rows, self.columns, block, self.backward), m, b)
        before = build.apply(MatrixScan(axis, self.rows, self.columns, self.backward), products, lasts)
        return (build.apply(MatrixScan(axis, self.rows, self.columns, self.backward, block), m, b, before),)

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The recurrence in the other direction, and its products with the states."""
        m, b = node.inputs
        turned = Rename(((self.rows, self.columns), (self.columns, self.rows)))
        back = MatrixScan(self.over, self.rows, self.columns, not self.backward)
        to_b = build.apply(back, build.apply(turned, m), d)
        summed = tuple(name for name in b.type.names if not m.type.has(name))
        states = build.apply(Rename(((self.rows, self.columns),)), node.output)
        to_m = build.apply(Dot(summed), to_b, states)
        return arranged(build, to_m, m.type.names), arranged(build, to_b, b.type.names)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        texts, _, order = self._operands(arguments)
        text = f"kernels.matrix_scan({', '.join(texts)}, {self._options(arguments)})"
        return permuted(text, order, results[0].names)


@op("matrix_scan_blocks")
class MatrixScanBlocks(_Recurrence):
    """For each block of `block` positions: the product of m, and the state after it if that is zero before it."""

    over: str
    rows: str
    columns: str
    block: int
    backward: bool = False
    results = ("", "last")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The types of m and b with one entry for each block."""
        self._check(*types)
        return self._blocks(types[0]), self._blocks(types[1])

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of b but `rows`; the last states are linear in b."""
        m, b = operands
        rules = []
        for name in self._free(b):
            states = (name if m.has(name) else None, name)
            rules.append(ShardingRule(states, states))
        return (*rules, ShardingRule((None, SUM), (None, SUM)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """As the recurrence, and the products."""
        m, b = operands
        return 2 * m.axis(self.columns).size * (b.elements + m.elements)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        texts, matrix, vector = self._operands(arguments)
        orders = f"{_order(matrix, results[0].names)}, {_order(vector, results[1].names)}"
        return f"kernels.matrix_scan_blocks({', '.join(texts)}, {self.block}, {orders}, {self._options(arguments)})"


def _order(have: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    return tuple(have.index(name) for name in wanted)
