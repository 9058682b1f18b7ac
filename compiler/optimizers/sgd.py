"""SGD: stochastic gradient descent, with or without momentum."""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.ops.op import Argument, op
from partita.compiler.ops.optimizer import Update
from partita.compiler.optimizers.registry import SPARSE, Optimizer, register
from partita.dsl.config.builtins import BETA, DECAY, LR, WEIGHT_DECAY, Flag, Setting
from partita.dsl.types import Type


@op("sgd")
class Sgd(Update):
    """Stochastic gradient descent with momentum, like torch.optim.SGD (the buffer begins as the first gradient).

    Weight decay is added to the gradient.
    """

    momentum: float
    nesterov: bool
    decay: float
    elementwise = True

    @property
    def states(self) -> tuple[str, ...]:  # type: ignore[override]
        """The momentum buffer, if there is momentum."""
        return ("momentum",) if self.momentum else ()

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """The updated parameter and buffer."""
        return ("", *self.states)

    @property
    def keeps_rows(self) -> bool:
        """With neither momentum nor weight decay."""
        return not self.momentum and not self.decay

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """About 6 operations for each element."""
        return 6 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The gradient with decay, and the direction of Nesterov's momentum."""
        return (bool(self.decay) + (bool(self.momentum) and self.nesterov)) * operands[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        parameter, gradient, *states = (argument.text for argument in arguments)
        buffer = states[0] if states else "None"
        constants = f"{self.momentum}, {self.nesterov}, {self.decay}"
        return f"kernels.sgd({parameter}, {gradient}, {buffer}, {self.learning_rate}, {constants})"


register(
    Optimizer(
        "sgd",
        (LR, Setting("momentum", BETA, 0.0), Setting("nesterov", Flag(), False), WEIGHT_DECAY, DECAY, SPARSE),
        update=lambda given, parameter: Sgd(float(given["momentum"]), bool(given["nesterov"]), parameter.decay),
    )
)
