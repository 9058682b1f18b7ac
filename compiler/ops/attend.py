"""Softmax attention as one operation, and its gradient. Scores are never kept for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.attention import TRAINED, Attention
from partita.compiler.ops.attention_memory import forward_bytes, gradient_bytes
from partita.compiler.ops.op import Argument, ShardingRule, accumulation, agree, attributes, op
from partita.compiler.ops.ring import ring_attention, ring_attention_gradient, turns
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@op("attend")
class Attend(Attention):
    """softmax(q·k · scale + bias, masked) · v over axis `over`, with dot products along `along`.

    Operands: q; k and v, which have `over`, `along` and any of q's other axes (they are broadcast along those they
    lack: grouped-query attention); a boolean mask (true: may attend) and a bias, with axes of q and `over`; integers
    along `over`, where only equal ones attend to each other; a sink, a score that joins those of each query, with axes
    of q. Results: the attended values (q's axes, with `values` for `along`) and the logarithm of the softmax's
    denominator, for the gradient.
    """

    results = ("", "denominator")

    @property
    def keeps_zeros(self) -> bool:
        """Means of zeros are."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """q's type, as wide as values; and its axes without `along`."""
        self.check(*types)
        q, _, v = types[:3]
        return self.attended(q, v), q.without([self.along]).with_dtype(accumulation(q.dtype))

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of q but `along`, and that of the values. Along `over`, queries are sharded and each shard reads all
        keys.
        """
        rules = [
            ShardingRule(tuple(name if x.has(name) else None for x in operands), (name, name))
            for name in self.split_axes(operands[0])
        ]
        if self.values:
            rest = [None] * (len(operands) - 3)
            rules.append(ShardingRule((None, None, self.values, *rest), (self.values, None)))
        if operands[0].has(self.over):
            rules.append(ShardingRule((self.over, *[None] * (len(operands) - 1)), (self.over, self.over)))
        return tuple(rules)

    def decompose(self, build: Builder, node: Node, axis: str, parts: int) -> tuple[Value, ...] | None:
        """In turns round a ring, where nothing but causality restricts what is seen."""
        return ring_attention(build, self, node, parts) if turns(self, node, axis, parts) else None

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Two products; half of that if causal."""
        return self.counted(operands, 1, 1)

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """All of them."""
        return self.flops(operands, results)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Repeated and padded keys and values; with a mask or bias, scores and their exponentials."""
        return forward_bytes(self, operands)

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """`attend_gradient`, for all operands at once; the denominator has no cotangent."""
        gradient = AttendGradient(**{each.name: getattr(self, each.name) for each in attributes(Attend)})
        results = dict(zip(self.trained, build.apply_all(gradient, *node.inputs, *node.outputs, d), strict=True))
        return tuple(results.get(position) for position in range(len(node.inputs)))

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with results in q's order."""
        return self.text(arguments, results)


@op("attend_gradient")
class AttendGradient(Attention):
    """Gradients of `attend` for q, k, v and bias, from its operands, its results and the cotangent."""

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """q, k, v, and of the others those that are trained."""
        return ("q", "k", "v", *(name for name in self.extras if name in TRAINED))

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The types of the operands."""
        *inputs, o, denominator, d = types
        self.check(*inputs)
        assert agree(self.attended(types[0], types[2]), o, denominator, d), types
        return tuple(types[position] for position in self.trained)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis of q but `along`, and that of the values; gradients of operands replicated along it are partial.
        Linear in d.
        """
        rules = [ShardingRule((*[None] * (len(operands) - 1), SUM), (SUM,) * len(results))]
        for name in self.split_axes(operands[0]):
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

    def decompose(self, build: Builder, node: Node, axis: str, parts: int) -> tuple[Value, ...] | None:
        """In turns round a ring."""
        return ring_attention_gradient(build, self, node, parts) if turns(self, node, axis, parts) else None

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Five products: the scores, recomputed, and two for each of the two forward ones."""
        return self.counted(operands, 3, 2)

    def product_flops(self, operands: Sequence[Type], results: Sequence[Type]) -> float:
        """Four of the five products: recomputed scores do not count."""
        return self.counted(operands, 2, 2)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Repeated and padded keys and values, their gradients; with a mask or bias, scores, probabilities and their
        gradients.
        """
        return gradient_bytes(self, operands)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with results in their operands' orders."""
        return self.gradient_text(arguments, results)
