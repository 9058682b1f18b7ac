"""Negative log-likelihood of the target class, the core of cross-entropy, and its primitives for sharded classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.intervals import Interval
from partita.compiler.ops.lookup import OneHot
from partita.compiler.ops.op import (
    Argument,
    Op,
    ShardingRule,
    accumulation,
    agree,
    aligned_rules,
    as_tensor,
    op,
    permuted,
    wide_bytes,
    widening_bytes,
)
from partita.compiler.ops.pointwise import added, cast, pointwise
from partita.compiler.ops.position import PLACE, Positioned, Shards, start_argument
from partita.compiler.ops.reduce import Reduce
from partita.compiler.ops.shape import arranged
from partita.compiler.ops.traits import PartialReduction, TakesLiterals
from partita.dsl.types import Axis, Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@op("nll")
class NegativeLogLikelihood(PartialReduction):
    """log(sum(exp(logits))) − the target's logit, over the classes `over`; and that logarithm, for the gradient.

    Operands: logits, and integer targets with the logits' other axes. Results in f32 at least. With `guarded`, targets
    may be out of range; their logit counts as zero.
    """

    over: str
    guarded: bool = False
    results = ("", "denominator")

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The targets, which index the classes."""
        return 1, operands[0].axis(self.over)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The targets' axes, twice."""
        logits, targets = types
        assert agree(*types), (self, types)
        result = targets.with_dtype(accumulation(logits.dtype))
        return result, result

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis but the classes."""
        return tuple(ShardingRule((name, name), (name, name)) for name in operands[1].names)

    def split(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """Over sharded classes: their maximum, then two sums, next to each other so that they can be bucketed.

        All have the size of the results; logits are not communicated (Megatron-LM, arXiv 1909.08053 §3).
        """
        partial = self.partial_reduce(build, node, axis)
        if partial is None:
            return None
        denominator, picked = partial
        return pointwise(build, "subtract", denominator, picked), denominator

    def partial_reduce(self, build: Builder, node: Node, axis: str) -> tuple[Value, ...] | None:
        """The logarithmic sum of a part, by its own maximum, and the target's logit if it is there.

        So the parts need no common maximum first (Yeung et al., arXiv 2411.05288, algorithm 1).
        """
        if axis != self.over:
            return None
        logits, targets = node.inputs
        peak = build.apply(Reduce("max", (self.over,), accumulation(logits.type.dtype)), logits)
        exponentials = build.apply(ExpSum(self.over), logits, peak)
        picked = build.apply(Pick(self.over, self.guarded), logits, targets)
        logarithm = pointwise(build, "add", pointwise(build, "log", exponentials), peak)
        return arranged(build, logarithm, targets.type.names), picked

    def combine_parts(self, build: Builder, node: Node, parts: Sequence[tuple[Value, ...]]) -> tuple[Value, ...]:
        """The logarithm of the sum of exponentials of the logarithms, by their maximum; the sum of targets' logits."""
        logarithms, logits = zip(*parts, strict=True)
        peak, picked = logarithms[0], logits[0]
        for logarithm, logit in parts[1:]:
            peak = pointwise(build, "maximum", peak, logarithm)
            picked = pointwise(build, "add", picked, logit)
        terms = [pointwise(build, "exp", pointwise(build, "subtract", each, peak)) for each in logarithms]
        denominator = pointwise(build, "add", pointwise(build, "log", added(build, terms)), peak)
        return pointwise(build, "subtract", denominator, picked), denominator

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Exponentials of all logits."""
        return 10 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Log-probabilities, and logits in the accumulation dtype if that is another."""
        return wide_bytes(operands[0]) + widening_bytes(operands[0])

    def gradients(self, build: Builder, node: Node, d: Sequence[Value | None]) -> tuple[Value | None, ...]:
        """From the logits and the denominator, whose own gradient is the probabilities: these are not kept."""
        parts, (logits, targets), (_, denominator) = [], node.inputs, node.outputs
        if d[0] is not None:
            gradient = NegativeLogLikelihoodGradient(self.over, self.guarded)
            parts.append(build.apply(gradient, d[0], logits, targets, denominator))
        if d[1] is not None:
            slope = pointwise(build, "multiply", _probabilities(build, logits, denominator), d[1])
            parts.append(cast(build, slope, logits.type.dtype))
        return added(build, parts), None

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with classes last."""
        logits, targets = arguments
        text = permuted(logits.text, logits.type.names, [*targets.type.names, self.over])
        return f"kernels.nll({text}, {targets.text}{', guarded=True' if self.guarded else ''})"


def _probabilities(build: Builder, logits: Value, denominator: Value) -> Value:
    """exp(logits − denominator), in the dtype of the denominator."""
    wide = cast(build, logits, denominator.type.dtype)
    return pointwise(build, "exp", pointwise(build, "subtract", wide, denominator))


@op("known_targets")
class KnownTargets(Op):
    """The targets, with 0 for those that are no index of `axis`, as `ignore` may be.

    What is computed for targets that are `ignore` does not count. With `guarded`, others may be out of range, too.
    """

    axis: Axis
    ignore: int
    guarded: bool = False

    def ids(self, operands: Sequence[Type]) -> tuple[int, Axis] | None:
        """The targets."""
        return 0, self.axis

    def interval(self, operands: Sequence[Interval], types: Sequence[Type], result: Type) -> Interval:
        """Indices of the axis."""
        return 0, self.axis.size - 1

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The targets' type."""
        return types

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return aligned_rules(operands, results)

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Which are indices."""
        return operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`where`."""
        text = arguments[0].text
        return f"torch.where(({text} >= 0) & ({text} < {self.axis.size}), {text}, 0)"


@op("nll_gradient")
class NegativeLogLikelihoodGradient(TakesLiterals, Positioned):
    """`d * (softmax(logits) - one_hot(targets))`. Operands: d, logits, targets, denominator.

    With `guarded`, targets may be out of range.
    """

    over: str
    guarded: bool = False
    shards: Shards = ()

    @property
    def begins(self) -> tuple[str, ...]:
        """The classes."""
        return (self.over,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The logits' type."""
        assert agree(*types), (self, types)
        return (types[1],)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear in d."""
        aligned = tuple(ShardingRule((name, name, name, name), (name,)) for name in operands[2].names)
        return (
            *aligned,
            ShardingRule((None, self.over, None, None), (self.over,)),
            ShardingRule((SUM, None, None, None), (SUM,)),
        )

    def formula(self, build: Builder, node: Node) -> tuple[Value, ...] | None:
        """The difference of two tensors of probabilities, times d."""
        d, logits, targets, denominator = node.inputs
        dtype = denominator.type.dtype
        hot = build.apply(OneHot(logits.type.axis(self.over), dtype, self.guarded), targets)
        hot = arranged(build, hot, logits.type.names)
        difference = pointwise(build, "subtract", _probabilities(build, logits, denominator), hot)
        product = pointwise(build, "multiply", difference, cast(build, d, dtype))
        return (cast(build, product, logits.type.dtype),)

    def neutral(self, axis: str) -> float:
        """Classes of no probability, unless a target may be one of them."""
        return float("-inf") if axis == self.over and not self.guarded else 0.0

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Exponentials of all logits."""
        return 11 * operands[1].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Logits minus the denominator; and of each target its place."""
        return wide_bytes(operands[1]) + PLACE * operands[2].elements

    def legalized_operands(self, arguments: Sequence[Argument], results: Sequence[Type]) -> list[Argument]:
        """d may be a scalar."""
        return [arguments[0], *map(as_tensor, arguments[1:])]

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with classes last; d may be a scalar."""
        d, logits, targets, denominator = arguments
        order = [*targets.type.names, self.over]
        views = [
            d.text if d.literal else permuted(d.text, d.type.names, targets.type.names),
            permuted(logits.text, logits.type.names, order),
            targets.text,
            permuted(denominator.text, denominator.type.names, targets.type.names),
        ]
        start = start_argument(logits.type.axis(self.over), self.shards, self.guarded)
        return permuted(f"kernels.nll_gradient({', '.join(views)}{start})", order, results[0].names)


@op("exp_sum")
class ExpSum(Op):
    """The sum of exp(x − peak) over `over`, in f32 at least. Operands: x, and peak with x's other axes."""

    over: str
    orderless = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The peak's type."""
        x, peak = types
        assert peak.dtype == accumulation(x.dtype), types
        assert agree(x, peak), (self, types)
        return (peak,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any remaining axis; shards of `over`, which make the result partial."""
        aligned = tuple(ShardingRule((name, name), (name,)) for name in results[0].names)
        return (*aligned, ShardingRule((self.over, None), (SUM,)))

    def neutral(self, axis: str) -> float:
        """Classes of no probability."""
        return float("-inf") if axis == self.over else 0.0

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """An exponential and a sum for each element."""
        return 10 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The exponentials."""
        return wide_bytes(operands[0])

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with `over` last."""
        x, peak = arguments
        return f"kernels.exp_sum({permuted(x.text, x.type.names, [*peak.type.names, self.over])}, {peak.text})"


@op("pick")
class Pick(Positioned):
    """The element of x at an index along `over`, in f32 at least; zero if the index is not in this shard of x.

    Operands: x, and integer indices with x's other axes. With `guarded`, indices may be out of range.
    """

    over: str
    guarded: bool = False
    shards: Shards = ()

    @property
    def begins(self) -> tuple[str, ...]:
        """The axis that is indexed."""
        return (self.over,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The indices' axes."""
        x, index = types
        assert agree(x, index), (self, types)
        return (index.with_dtype(accumulation(x.dtype)),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any remaining axis; shards of `over`, which make the result partial; linear in x."""
        aligned = tuple(ShardingRule((name, name), (name,)) for name in results[0].names)
        return (*aligned, ShardingRule((self.over, None), (SUM,)), ShardingRule((SUM, None), (SUM,)))

    def neutral(self, axis: str) -> float:
        """Classes of no probability, unless a target may be one of them."""
        return float("-inf") if axis == self.over and not self.guarded else 0.0

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Elements read and written, not all of x."""
        return operands[1].bytes + 2 * results[0].bytes

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The places of the indices."""
        return PLACE * operands[1].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, with `over` last."""
        x, index = arguments
        view = permuted(x.text, x.type.names, [*index.type.names, self.over])
        start = start_argument(x.type.axis(self.over), self.shards, self.guarded)
        return f"kernels.pick({view}, {index.text}{start})"
