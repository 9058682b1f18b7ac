"""Softmax attention as a whole, with its gradient: scores are never kept."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.op import Argument, Kernel, Way, accumulation, agree, broadcast, op, permuted, wide_bytes
from partita.compiler.ops.position import Positioned, Shards, offset_text
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


class _Attention(Positioned):
    """What attention and its gradient share. Operands: q, k, v, then mask and bias where present.

    In self attention queries may be split along `over` while keys and values are whole: a causal one must know where
    its queries begin.
    """

    over: str
    along: str
    causal: bool
    scale: float
    mask: bool
    bias: bool
    fusible = False

    def matrices(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[int, ...] | None:
        """Those of all its products."""
        return ()

    @property
    def begins(self) -> tuple[str, ...]:
        """Positions, where only earlier keys are seen."""
        return (self.over,) if self.causal else ()

    def _check(self, q: Type, *others: Type) -> None:
        """Sizes agree, but for queries' own positions."""
        assert agree(q.without([self.over]), *others), (self, q, others)

    def _orders(self, q: Type, k: Type, v: Type) -> tuple[list[str], list[str], list[str]]:
        """Axes of q in three groups: batch axes that k or v have too; further ones; and the query position.

        In self attention the position is `over`. Otherwise queries stand along every axis that k and v lack, of
        which the longest is taken as the position; the rest are batch axes along which k and v repeat.
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
        """Axes of the scores. In self attention queries and keys share a name, and a mask's or bias's is the keys'."""
        shared, own, position = self._orders(*types[:3])
        return [*shared, *own, *("" if name == self.over else name for name in position), self.over]

    def _call(self, arguments: Sequence[Argument]) -> str:
        """Texts of q as [shared, own, position, along], k and v as [shared, over, along], mask and bias as scores,
        and the numbers of those axes."""
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
        """Texts of q as [shared, own, position, along], k and v as [shared, over, along]."""
        q, k, v = arguments[:3]
        shared, own, position = self._orders(q.type, k.type, v.type)
        texts = [permuted(q.text, q.type.names, [*shared, *own, *position, self.along])]
        for x in (k, v):
            have = [name for name in shared if x.type.has(name)]
            text = permuted(x.text, x.type.names, [*have, self.over, self.along])
            if have != shared:
                text += f"[{', '.join(':' if name in have else 'None' for name in shared)}]"
            texts.append(text)
        return ", ".join(texts)

    def _usual(self, arguments: Sequence[Argument]) -> bool:
        """Whether q, k and v are [batch, heads, position, along] alike, with queries from the first key on."""
        if self.mask or self.bias:
            return False
        q, k, v = (argument.type for argument in arguments)
        shared, own, position = self._orders(q, k, v)
        alike = all(x.has(name) for x in (k, v) for name in shared)
        whole = not self.causal or offset_text(q.axis(self.over), self.shards) == "0"
        return (len(shared), len(own), len(position)) == (2, 0, 1) and alike and whole

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """By how many queries there are, how many keys each sees, and the axis of the products."""
        q, k = operands[:2]
        along = q.axis(self.along).size
        name = ".".join([self.name, *["causal"] * self.causal, *["scores"] * bool(self._scores_bytes(operands))])
        sizes = (q.elements / along, float(k.axis(self.over).size), float(along))
        return Kernel(name, sizes, float(self.flops(operands, results)))

    def _scores_bytes(self, operands: Sequence[Type]) -> int:
        """The size of all scores, where they are made: with a mask or a bias."""
        if not (self.mask or self.bias):
            return 0
        q, k = operands[:2]
        return wide_bytes(q.without([self.along])) * k.axis(self.over).size

    def _repeated_bytes(self, operands: Sequence[Type]) -> int:
        """The size of keys and values repeated along the axes that only queries have."""
        q, k, v = operands[:3]
        _, own, _ = self._orders(q, k, v)
        return prod(q.axis(name).size for name in own) * (k.bytes + v.bytes) if own else 0

    def _names(self, types: Sequence[Type]) -> list[str]:
        shared, own, position = self._orders(*types[:3])
        return [*shared, *own, *position]


@op("attend")
class Attend(_Attention):
    """softmax(q·k · scale + bias, masked) · v over axis `over`, products along `along`.

    Operands: q; k and v, which have `over`, `along` and any of q's other axes (those they lack are broadcast:
    grouped queries); a boolean mask (true: may attend) and a bias, with axes of q and `over`. Results: the
    attended values (q's axes) and the logarithm of the softmax's denominator, for the gradient.
    """

    over: str
    along: str
    causal: bool
    scale: float
    mask: bool = False
    bias: bool = False
    shards: Shards = ()
    results = ("", "denominator")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """q's axes; and those without `along`."""
        self._check(*types)
        q = types[0]
        return q, q.without([self.along]).with_dtype(accumulation(q.dtype))

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis of q but `along`. If it is `over`, queries are split, and each part reads all keys."""
        ways = [
            Way(tuple(name if x.has(name) else None for x in operands), (name, name))
            for name in self._split_axes(operands[0])
        ]
        if operands[0].has(self.over):
            ways.append(Way((self.over, *[None] * (len(operands) - 1)), (self.over, self.over)))
        return tuple(ways)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two products; half of them where causal."""
        full = 4 * operands[0].elements * operands[1].axis(self.over).size
        return full // 2 if self.causal else full

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All."""
        return self.flops(operands, results)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Repeated keys and values; with a mask or bias, scores and their exponentials."""
        return 3 * self._scores_bytes(operands) + self._repeated_bytes(operands)

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """`attend_gradient`, all at once; the denominator has no cotangent."""
        gradient = AttendGradient(self.over, self.along, self.causal, self.scale, self.mask, self.bias)
        results = build.apply_all(gradient, *node.inputs, *node.outputs, d)
        return (*results[:3], *([None] if self.mask else []), *results[3:])

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, and its results in q's order."""
        names = self._names([argument.type for argument in arguments])
        orders = (results[0].names, results[1].names)
        first = tuple([*names, self.along].index(name) for name in orders[0])
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
    shards: Shards = ()

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """q, k, v and the bias if there is one."""
        return ("q", "k", "v", "bias") if self.bias else ("q", "k", "v")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operands' types."""
        *inputs, o, denominator, d = types
        self._check(*inputs)
        assert agree(types[0], o, denominator, d), types
        bias = (types[3 + self.mask],) if self.bias else ()
        return (*types[:3], *bias)

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis of q but `along`, where what lacks the axis or is whole gets a partial sum; linear in d."""
        ways = [Way((*[None] * (len(operands) - 1), SUM), (SUM,) * len(results))]
        for name in self._split_axes(operands[0]):
            ways.append(
                Way(
                    tuple(name if x.has(name) else None for x in operands),
                    tuple(name if x.has(name) else SUM for x in results),
                )
            )
        if operands[0].has(self.over):
            whole = [None] * (len(operands) - 4)
            sums = [SUM] * (len(results) - 1)
            ways.append(Way((self.over, *whole, self.over, self.over, self.over), (self.over, *sums)))
        return tuple(ways)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Five products: the scores again, and two for each of the two forward ones."""
        full = 10 * operands[0].elements * operands[1].axis(self.over).size
        return full // 2 if self.causal else full

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """Those of four products of the five: scores are made again."""
        return self.flops(operands, results) * 4 / 5

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Repeated keys and values, their gradients; with a mask or bias, scores, probabilities and their gradients."""
        return 4 * self._scores_bytes(operands) + 2 * self._repeated_bytes(operands)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, and its results in their operands' orders."""
        inputs, (o, denominator, d) = arguments[:-3], arguments[-3:]
        types = [argument.type for argument in inputs]
        names = self._names(types)
        views = ", ".join(
            permuted(x.text, x.type.names, order)
            for x, order in ((o, [*names, self.along]), (denominator, names), (d, [*names, self.along]))
        )
        shared = self._orders(*types[:3])[0]
        layouts = [[*names, self.along]]
        layouts += [[*(n for n in shared if x.has(n)), self.over, self.along] for x in types[1:3]]
        if self.bias:
            layouts.append([name for name in self._scores(types) if name and results[3].has(name)])
        shapes = [
            (tuple(type.axis(each).size for each in layout), tuple(map(layout.index, type.names)))
            for layout, type in zip(layouts, results, strict=True)
        ]  # written as tuples, which Python makes once
        if self._usual(inputs):
            orders = tuple(order for _, order in shapes)
            heads = self._heads(inputs)
            return f"kernels.attend_heads_gradient({heads}, {views}, {self.causal}, {self.scale!r}, {orders})"
        return f"kernels.attend_gradient({self._call(inputs)}, result=({views}), shapes={tuple(shapes)})"
