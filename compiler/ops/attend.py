"""Softmax attention as one operation, and its gradient. Scores are never kept for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from attrs import evolve

from partita.compiler.layout import SUM
from partita.compiler.ops.op import (
    Argument,
    Kernel,
    ShardingRule,
    accumulation,
    agree,
    broadcast,
    op,
    permuted,
    wide_bytes,
)
from partita.compiler.ops.position import Positioned, Shards, offset_text
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


class _Attention(Positioned):
    """What attention and its gradient share. Operands: q, k, v, then mask and bias if present.

    In self-attention, queries may be sharded along `over` with keys and values replicated; causal attention must then
    know the position of its first query.
    """

    over: str
    along: str
    causal: bool
    scale: float
    mask: bool
    bias: bool
    values: str | None
    fusible = False

    @property
    def wide(self) -> str:
        """The axis of the values: `along`, unless they have one of their own."""
        return self.values or self.along

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """Products of other shapes than a single matrix product's."""
        return ()

    @property
    def begins(self) -> tuple[str, ...]:
        """Positions, if causal."""
        return (self.over,) if self.causal else ()

    def _check(self, q: Type, *others: Type) -> None:
        """Sizes must match, except for the queries' own positions."""
        assert agree(q.without([self.over]), *others), (self, q, others)

    def _attended(self, q: Type, v: Type) -> Type:
        """q's axes, with that of the values in the place of `along`."""
        wide = v.axis(self.wide)
        return evolve(q, axes=tuple(wide if axis.name == self.along else axis for axis in q.axes))

    def _orders(self, q: Type, k: Type, v: Type) -> tuple[list[str], list[str], list[str]]:
        """Axes of q in three groups: batch axes that k or v have too; other batch axes; and the query position.

        In self-attention the position is `over`. Otherwise every axis that k and v lack holds queries: the longest is
        taken as the position, and the rest are batch axes along which k and v repeat.
        """
        shared = [n for n in q.names if (k.has(n) or v.has(n)) and n not in (self.over, self.along)]
        own = [n for n in q.names if n not in shared and n not in (self.over, self.along)]
        if q.has(self.over):
            return shared, own, [self.over]
        if not own:
            return shared, [], []
        position = max(own, key=lambda name: q.axis(name).size)
        return shared, [name for name in own if name != position], [position]

    def _split_axes(self, q: Type) -> tuple[str, ...]:
        return tuple(name for name in q.names if name not in (self.over, self.along))

    def _scores(self, types: Sequence[Type]) -> list[str]:
        """Axes of the scores. In self-attention, queries and keys share a name; a mask or bias has it for the keys."""
        shared, own, position = self._orders(*types[:3])
        return [*shared, *own, *("" if name == self.over else name for name in position), self.over]

    def _call(self, arguments: Sequence[Argument]) -> str:
        """Texts of q, k and v as in `_heads`, of mask and bias with the axes of the scores, and of the options."""
        types = [argument.type for argument in arguments]
        shared, own, position = self._orders(*types[:3])
        texts = [self._heads(arguments)]
        rest = list(arguments[3:])
        for present, word in ((self.mask, "mask"), (self.bias, "bias")):
            if present:
                texts.append(f"{word}={broadcast(rest.pop(0), self._scores(types))}")
        groups = (len(shared), len(own), len(position))
        start = "0"
        if self.causal:
            start = offset_text(arguments[0].type.axis(self.over), self.shards)
        text = f"{', '.join(texts)}, groups={groups}, causal={self.causal}, scale={self.scale!r}"
        return text if start == "0" else f"{text}, start={start}"

    def _heads(self, arguments: Sequence[Argument]) -> str:
        """Texts of q as [shared, own, position, along], of k as [shared, over, along], and of v likewise."""
        q, k, v = arguments[:3]
        shared, own, position = self._orders(q.type, k.type, v.type)
        texts = [permuted(q.text, q.type.names, [*shared, *own, *position, self.along])]
        for x, last in ((k, self.along), (v, self.wide)):
            have = [name for name in shared if x.type.has(name)]
            text = permuted(x.text, x.type.names, [*have, self.over, last])
            if have != shared:
                text += f"[{', '.join(':' if name in have else 'None' for name in shared)}]"
            texts.append(text)
        return ", ".join(texts)

    def _usual(self, arguments: Sequence[Argument]) -> bool:
        """Whether q, k and v are [batch, heads, position, along], with no mask or bias and no query offset."""
        if self.mask or self.bias:
            return False
        q, k, v = (argument.type for argument in arguments)
        if v.axis(self.wide).size != q.axis(self.along).size:
            return False
        shared, own, position = self._orders(q, k, v)
        alike = all(x.has(name) for x in (k, v) for name in shared)
        whole = not self.causal or offset_text(q.axis(self.over), self.shards) == "0"
        return (len(shared), len(own), len(position)) == (2, 0, 1) and alike and whole

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By the number of queries, the number of keys that each sees, and the mean size of a key and a value."""
        q, k, v = operands[:3]
        along = q.axis(self.along).size
        name = ".".join([self.name, *["causal"] * self.causal, *["scores"] * bool(self._scores_bytes(operands))])
        sizes = (q.elements / along, float(k.axis(self.over).size), (along + v.axis(self.wide).size) / 2)
        return Kernel(name, sizes, float(self.flops(operands, results)))

    def _scores_bytes(self, operands: Sequence[Type]) -> int:
        """Bytes of all scores, if they are materialized: with a mask or a bias."""
        if not (self.mask or self.bias):
            return 0
        q, k = operands[:2]
        return wide_bytes(q.without([self.along])) * k.axis(self.over).size

    def _repeated_bytes(self, operands: Sequence[Type]) -> int:
        """Bytes of keys and values repeated along the axes that only queries have."""
        q, k, v = operands[:3]
        _, own, _ = self._orders(q, k, v)
        return prod(q.axis(name).size for name in own) * (k.bytes + v.bytes) if own else 0

    def _padded_bytes(self, operands: Sequence[Type]) -> int:
        """Bytes of a query, key or value padded to the larger of their sizes, which fused kernels want equal."""
        q, k, v = operands[:3]
        along, wide = q.axis(self.along).size, v.axis(self.wide).size
        if along == wide or self.mask or self.bias:
            return 0
        _, own, _ = self._orders(q, k, v)
        repeated = prod(q.axis(name).size for name in own)
        larger = max(along, wide)
        return q.bytes // along * larger + repeated * max(k.bytes // along, v.bytes // wide) * larger

    def _flops(self, operands: Sequence[Type], keys: int, values: int) -> int:
        """FLOPs of some products of queries with `along`, and some with the axis of the values; half if causal."""
        q, k, v = operands[:3]
        along = q.axis(self.along).size
        pairs = q.elements // along * k.axis(self.over).size
        full = 2 * pairs * (keys * along + values * v.axis(self.wide).size)
        return full // 2 if self.causal else full

    def _names(self, types: Sequence[Type]) -> list[str]:
        shared, own, position = self._orders(*types[:3])
        return [*shared, *own, *position]


@op("attend")
class Attend(_Attention):
    """softmax(q·k · scale + bias, masked) · v over axis `over`, with dot products along `along`.

    Operands: q; k and v, which have `over`, `along` and any of q's other axes (they are broadcast along those they
    lack: grouped-query attention); a boolean mask (true: may attend) and a bias, with axes of q and `over`. `values`
    is v's axis instead of `along`, if it has one of its own. Results: the attended values (q's axes, with `values`
    for `along`) and the logarithm of the softmax's denominator, for the gradient.
    """

    over: str
    along: str
    causal: bool
    scale: float
    mask: bool = False
    bias: bool = False
    values: str | None = None
    shards: Shards = ()
    results = ("", "denominator")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """q's type, as wide as values; and its axes without `along`."""
        self._check(*types)
        q, _, v = types[:3]
        return self._attended(q, v), q.without([self.along]).with_dtype(accumulation(q.dtype))

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of q but `along`, and that of the values. Along `over`, queries are sharded and each shard reads all
        keys.
        """
        rules = [
            ShardingRule(tuple(name if x.has(name) else None for x in operands), (name, name))
            for name in self._split_axes(operands[0])
        ]
        if self.values:
            rest = [None] * (len(operands) - 3)
            rules.append(ShardingRule((None, None, self.values, *rest), (self.values, None)))
        if operands[0].has(self.over):
            rules.append(ShardingRule((self.over, *[None] * (len(operands) - 1)), (self.over, self.over)))
        return tuple(rules)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two products; half of that if causal."""
        return self._flops(operands, 1, 1)

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Repeated and padded keys and values; with a mask or bias, scores and their exponentials."""
        padded = 2 * self._padded_bytes(operands)
        return 3 * self._scores_bytes(operands) + self._repeated_bytes(operands) + padded

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """`attend_gradient`, for all operands at once; the denominator has no cotangent."""
        gradient = AttendGradient(self.over, self.along, self.causal, self.scale, self.mask, self.bias, self.values)
        results = build.apply_all(gradient, *node.inputs, *node.outputs, d)
        return (*results[:3], *([None] if self.mask else []), *results[3:])

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with results in q's order."""
        names = self._names([argument.type for argument in arguments])
        orders = (results[0].names, results[1].names)
        first = tuple([*names, self.wide].index(name) for name in orders[0])
        second = tuple(names.index(name) for name in orders[1])
        if self._usual(arguments):
            return f"kernels.attend_heads({self._heads(arguments)}, {self.causal}, {self.scale!r}, ({first}, {second}))"
        return f"kernels.attend({self._call(arguments)}, orders=({first}, {second}))"


@op("attend_gradient")
class AttendGradient(_Attention):
    """Gradients of `attend` for q, k, v and bias, from its operands, its results and the cotangent."""

    over: str
    along: str
    causal: bool
    scale: float
    mask: bool = False
    bias: bool = False
    values: str | None = None
    shards: Shards = ()

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """q, k, v, and the bias if there is one."""
        return ("q", "k", "v", "bias") if self.bias else ("q", "k", "v")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The types of the operands."""
        *inputs, o, denominator, d = types
        self._check(*inputs)
        assert agree(self._attended(types[0], types[2]), o, denominator, d), types
        bias = (types[3 + self.mask],) if self.bias else ()
        return (*types[:3], *bias)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of q but `along`, and that of the values; gradients of operands replicated along it are partial.
        Linear in d.
        """
        rules = [ShardingRule((*[None] * (len(operands) - 1), SUM), (SUM,) * len(results))]
        for name in self._split_axes(operands[0]):
            rules.append(
                ShardingRule(
                    tuple(name if x.has(name) else None for x in operands),
                    tuple(name if x.has(name) else SUM for x in results),
                )
            )
        if self.values:
            rules.append(
                ShardingRule(
                    tuple(self.values if x.has(self.values) else None for x in operands),
                    tuple(self.values if x.has(self.values) else SUM for x in results),
                )
            )
        if operands[0].has(self.over):
            whole = [None] * (len(operands) - 4)
            sums = [SUM] * (len(results) - 1)
            rules.append(ShardingRule((self.over, *whole, self.over, self.over, self.over), (self.over, *sums)))
        return tuple(rules)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Five products: the scores, recomputed, and two for each of the two forward ones."""
        return self._flops(operands, 3, 2)

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """Four of the five products: recomputed scores do not count."""
        return self._flops(operands, 2, 2)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Repeated and padded keys and values, their gradients; with a mask or bias, scores, probabilities and their
        gradients.
        """
        padded = 4 * self._padded_bytes(operands)
        return 4 * self._scores_bytes(operands) + 2 * self._repeated_bytes(operands) + padded

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with results in their operands' orders."""
        inputs, (o, denominator, d) = arguments[:-3], arguments[-3:]
        types = [argument.type for argument in inputs]
        names = self._names(types)
        views = ", ".join(
            permuted(x.text, x.type.names, order)
            for x, order in ((o, [*names, self.wide]), (denominator, names), (d, [*names, self.wide]))
        )
        shared = self._orders(*types[:3])[0]
        layouts = [[*names, self.along]]
        ends = zip(types[1:3], (self.along, self.wide), strict=True)
        layouts += [[*(n for n in shared if x.has(n)), self.over, last] for x, last in ends]
        if self.bias:
            layouts.append([name for name in self._scores(types) if name and results[3].has(name)])
        shapes = [
            (tuple(type.axis(each).size for each in layout), tuple(map(layout.index, type.names)))
            for layout, type in zip(layouts, results, strict=True)
        ]  # emitted as tuples, which Python stores as constants
        if self._usual(inputs):
            orders = tuple(order for _, order in shapes)
            heads = self._heads(inputs)
            return f"kernels.attend_heads_gradient({heads}, {views}, {self.causal}, {self.scale!r}, {orders})"
        return f"kernels.attend_gradient({self._call(inputs)}, result=({views}), shapes={tuple(shapes)})"
