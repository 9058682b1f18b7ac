"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partita.compiler.ops.op import Argument, op
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.traits import DenseOperands
from partita.compiler.optimizers.registry import SPARSE, Optimizer, Trained, register, with_larger_eps
from partita.dsl.config.builtins import BETA, DECAY, LR, POSITIVE, WEIGHT_DECAY, ListOf, Setting
from partita.dsl.types import Type


@op("adamw")
class AdamW(Update, DenseOperands):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), like torch.optim.AdamW."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    elementwise = True
    multi_tensor = True
    states = ("mean", "square")
    results = ("", "mean", "square")

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """About 12 operations for each element."""
        return 12 * operands[0].elements

    def workspace_strided(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The gradient, made dense; or the denominators, which kernels for flat arrays do not keep."""
        return operands[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        texts = ", ".join(argument.text for argument in arguments)
        return f"kernels.adamw({texts}, {self._numbers})"

    def emit_each(self, arguments: Sequence[Sequence[Argument]], factor: Argument | None) -> str:
        """One call for all parameters."""
        lists = (f"[{', '.join(each.text for each in own)}]" for own in zip(*arguments, strict=True))
        by = "" if factor is None else f", {factor.text}"
        return f"kernels.adamw_of_each({', '.join(lists)}, {self._numbers}{by})"

    @property
    def _numbers(self) -> str:
        return f"{self.learning_rate}, {self.number}, {self.beta1}, {self.beta2}, {self.eps}, {self.decay}"


# What AdamW is told, whatever form its states have.
SETTINGS = (
    LR,
    Setting("betas", ListOf(BETA, 2, "[0.9, 0.95]"), (0.9, 0.999)),
    Setting("eps", POSITIVE, 1e-8),
    WEIGHT_DECAY,
)


def adamw(arguments: Mapping[str, Any], parameter: Trained) -> AdamW:
    """The update of a parameter, from a call's arguments."""
    beta1, beta2 = arguments["betas"]
    return AdamW(float(beta1), float(beta2), float(arguments["eps"]), parameter.decay)


register(
    Optimizer(
        "adamw",
        (*SETTINGS, DECAY, SPARSE),
        others=("adam",),
        example="adamw(lr = 1e-3)",
        update=adamw,
        proxy=with_larger_eps,
        scaled=True,
    )
)
