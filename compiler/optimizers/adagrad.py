"""Adagrad: steps divided by the root of the sum of all squares of the gradient so far."""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.ops.op import Argument, op
from partita.compiler.ops.optimizer import Update
from partita.compiler.optimizers.registry import SPARSE, Optimizer, register, with_larger_eps
from partita.dsl.config.builtins import DECAY, LR, POSITIVE, WEIGHT_DECAY, Setting
from partita.dsl.types import Type


@op("adagrad")
class Adagrad(Update):
    """Adagrad (Duchi et al., JMLR 2011), like torch.optim.Adagrad, with decoupled weight decay."""

    eps: float
    decay: float
    states = ("accumulated",)
    results = ("", "accumulated")

    @property
    def keeps_rows(self) -> bool:
        """Without weight decay."""
        return not self.decay

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """About 5 operations for each element."""
        return 5 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The roots."""
        return operands[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        texts = ", ".join(argument.text for argument in arguments)
        return f"kernels.adagrad({texts}, {self.learning_rate}, {self.eps}, {self.decay})"


register(
    Optimizer(
        "adagrad",
        (LR, Setting("eps", POSITIVE, 1e-10), WEIGHT_DECAY, DECAY, SPARSE),
        update=lambda given, parameter: Adagrad(float(given["eps"]), parameter.decay),
        proxy=with_larger_eps,
        scaled=True,
    )
)
