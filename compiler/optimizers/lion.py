"""Lion: the sign of an interpolation of momentum and gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.compiler.ops.op import Argument, op
from partita.compiler.ops.optimizer import Update
from partita.compiler.optimizers.registry import SPARSE, Optimizer, Trained, register
from partita.dsl.config.builtins import BETA, DECAY, LR, WEIGHT_DECAY, ListOf, Setting
from partita.dsl.types import Type


@op("lion")
class Lion(Update):
    """Lion with decoupled weight decay (Chen et al., arXiv 2302.06675, algorithm 2)."""

    beta1: float
    beta2: float
    decay: float
    elementwise = True
    states = ("mean",)
    results = ("", "mean")

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """About 8 operations for each element."""
        return 8 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The interpolation."""
        return operands[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        texts = ", ".join(argument.text for argument in arguments)
        return f"kernels.lion({texts}, {self.learning_rate}, {self.beta1}, {self.beta2}, {self.decay})"


def _update(arguments: Mapping[str, Any], parameter: Trained) -> Lion:
    beta1, beta2 = arguments["betas"]
    return Lion(float(beta1), float(beta2), parameter.decay)


register(
    Optimizer(
        "lion",
        (LR, Setting("betas", ListOf(BETA, 2, "[0.9, 0.99]"), (0.9, 0.99)), WEIGHT_DECAY, DECAY, SPARSE),
        update=_update,
        scaled=True,
    )
)
