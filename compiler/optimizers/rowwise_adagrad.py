"""Row-wise Adagrad: one accumulated square for each row of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from partita.compiler.ops.op import Argument, op
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.pointwise import pointwise
from partita.compiler.ops.reduce import Reduce
from partita.compiler.optimizers.registry import SPARSE, Optimizer, Trained, register, with_larger_eps
from partita.dsl.config.builtins import DECAY, LR, POSITIVE, WEIGHT_DECAY, Setting
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Value


@op("rowwise_adagrad")
class RowwiseAdagrad(Update):
    """Adagrad with the mean of a row's squares in place of each square (Duchi et al., JMLR 2011; per row as in FBGEMM's
    EXACT_ROWWISE_ADAGRAD). The last operand is the sum of each row's squares; a row has `count` elements.
    """

    rows: tuple[str, ...]
    count: int
    eps: float
    decay: float
    states = ("accumulated",)
    results = ("", "accumulated")

    @property
    def keeps_rows(self) -> bool:
        """Without weight decay."""
        return not self.decay

    def by_rows(self, axis: str) -> bool:
        """Of an axis that it has a number for each position of."""
        return axis in self.rows

    def state_types(self, parameter: Type) -> tuple[Type, ...]:
        """One number for each row."""
        return (parameter.without(name for name in parameter.names if name not in self.rows),)

    def operands(
        self, build: Builder, parameter: Type, part: Value, gradient: Value, states: Sequence[Value]
    ) -> tuple[Value, ...]:
        """The sum of each row's squares."""
        others = tuple(name for name in parameter.names if name not in self.rows)
        squares = pointwise(build, "multiply", gradient, gradient)
        return (build.apply(Reduce("sum", others, parameter.dtype), squares) if others else squares,)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """About 4 operations for each element."""
        return 4 * operands[0].elements

    def workspace(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The root of each row."""
        return operands[2].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        parameter, gradient, accumulated, squares = arguments
        names = parameter.type.names
        index = tuple(i for i, name in enumerate(names) if name not in self.rows)
        texts = ", ".join(each.text for each in (parameter, gradient, accumulated, squares))
        constants = f"{index}, {self.count}, {self.eps}, {self.decay}"
        return f"kernels.rowwise_adagrad({texts}, {self.learning_rate}, {constants})"


def _update(arguments: Mapping[str, Any], parameter: Trained) -> RowwiseAdagrad:
    type = parameter.type
    rows = parameter.rows or type.names[:1]
    count = type.without(rows).elements
    return RowwiseAdagrad(rows, count, float(arguments["eps"]), parameter.decay)


register(
    Optimizer(
        "rowwise_adagrad",
        (LR, Setting("eps", POSITIVE, 1e-8), WEIGHT_DECAY, DECAY, SPARSE),
        update=_update,
        proxy=with_larger_eps,
        scaled=True,
    )
)
