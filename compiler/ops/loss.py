"""The negative log-likelihood of the right class: the heart of cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.compiler.ops.op import SUM, Argument, Op, Way, accumulation, op, permuted
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@op("nll")
class NegativeLogLikelihood(Op):
    """log(sum(exp(logits))) less the target's logit, over the classes `over`; and that logarithm, for the gradient.

    Operands: logits and integer targets with the logits' other axes. Results in f32 at least.
    """

    over: str
    results = ("", "denominator")

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The targets' axes, twice."""
        logits, targets = types
        result = targets.with_dtype(accumulation(logits.dtype))
        return result, result

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis but the classes."""
        return tuple(Way((name, name), (name, name)) for name in operands[1].names)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Exponentials of all logits."""
        return 10 * operands[0].elements

    def gradient(self, build: Builder, node: Node, *cotangents: Value | None) -> tuple[Value | None, ...]:
        """From the logits and the denominator; probabilities are not kept."""
        d, denominator = cotangents
        assert d is not None
        assert denominator is None
        logits, targets = node.inputs
        gradient = NegativeLogLikelihoodGradient(self.over)
        return build.apply(gradient, d, logits, targets, node.outputs[1]), None

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime; classes last."""
        logits, targets = arguments
        text = permuted(logits.text, logits.type.names, [*targets.type.names, self.over])
        return f"kernels.nll({text}, {targets.text})"


@op("nll_gradient")
class NegativeLogLikelihoodGradient(Op):
    """`d * (softmax(logits) - one_hot(targets))`. Operands: d, logits, targets, denominator."""

    over: str

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The logits'."""
        return (types[1],)

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis but the classes; linear in d."""
        kept = tuple(Way((name, name, name, name), (name,)) for name in operands[2].names)
        return (*kept, Way((SUM, None, None, None), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Exponentials of all logits."""
        return 11 * operands[1].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime; classes last."""
        d, logits, targets, denominator = arguments
        order = [*targets.type.names, self.over]
        views = [
            permuted(d.text, d.type.names, targets.type.names),
            permuted(logits.text, logits.type.names, order),
            targets.text,
            permuted(denominator.text, denominator.type.names, targets.type.names),
        ]
        return permuted(f"kernels.nll_gradient({', '.join(views)})", order, results[0].names)
