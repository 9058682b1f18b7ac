"""What joins and ends a step: accumulation over microbatches, and the optimizers' updates.

Updates work in place on parameter and state, whose new values are their results; `rate` is the learning rate and
`update` the number of this update, from 1, both known on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from partita.compiler.layout import MAX, SUM
from partita.compiler.ops.op import Argument, Op, Way, agree, aligned_ways, op, permuted
from partita.dsl.types import Type


@op("accumulate")
class Accumulate(Op):
    """Add the operand to the accumulator `target` of the same axes, in ascending order of microbatches.

    `maximum` takes the greater one instead, `keep` the last: for what is the same in every microbatch. The
    accumulator has type `type`, and is zero (or −inf) when the step begins.
    """

    target: str
    type: Type
    maximum: bool = False
    keep: bool = False
    results = ()
    fusible = False

    @property
    def accumulator(self) -> str | None:
        """The target."""
        return self.target

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """No result."""
        assert sorted(types[0].names) == sorted(self.type.names), (self, types)
        return ()

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """The accumulator lies as the operand does."""
        kinds = (SUM, MAX) if self.keep else (MAX,) if self.maximum else (SUM,)
        return tuple(Way((state,), ()) for state in (*operands[0].names, *kinds))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """An addition for each element."""
        return operands[0].elements

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The accumulator too, twice."""
        return operands[0].bytes + 2 * self.type.bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Not an expression: the emitter writes the statement (see `statement`)."""
        raise AssertionError("accumulate is a statement")

    def statement(self, target: str, value: Argument) -> str:
        """`target.add_(value)`; also where the value is of a narrower dtype."""
        view = permuted(value.text, value.type.names, self.type.names)
        if self.keep:
            return f"{target}.copy_({view})"
        if self.maximum:
            return f"torch.maximum({target}, {view}, out={target})"
        return f"{target}.add_({view})"


@op("store")
class Store(Op):
    """Write the second operand over the first, of the same type: a parameter that has come together again."""

    results = ()
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """No result."""
        assert types[0] == types[1], types
        return ()

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis, in both."""
        return tuple(Way((name, name), ()) for name in operands[0].names)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`copy_`."""
        return f"{arguments[0].text}.copy_({arguments[1].text})"


class Update(Op):
    """Base of the optimizers. Operands: parameter, gradient, then one state tensor for each name in `states`."""

    states: ClassVar[tuple[str, ...]]
    fusible = False
    allocates = False  # it works in place

    @property
    def reads_context(self) -> bool:
        """The learning rate and the number of the update."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The new parameter and states."""
        parameter, gradient, *states = types
        assert parameter.axes == gradient.axes, (parameter, gradient)
        assert agree(*types), (self, types)
        return (parameter, *states)

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis."""
        return aligned_ways(operands, results)


@op("adamw")
class AdamW(Update):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    states = ("mean", "square")
    results = ("", "mean", "square")

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """A dozen operations for each element."""
        return 12 * operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        texts = ", ".join(argument.text for argument in arguments)
        return f"kernels.adamw({texts}, c.rate, c.update, {self.beta1}, {self.beta2}, {self.eps}, {self.decay})"


@op("sgd")
class Sgd(Update):
    """Stochastic gradient descent with momentum, as torch.optim.SGD (the first step's buffer is the gradient).

    Weight decay is added to the gradient.
    """

    momentum: float
    nesterov: bool
    decay: float

    @property
    def states(self) -> tuple[str, ...]:  # type: ignore[override]
        """The momentum buffer, if there is momentum."""
        return ("momentum",) if self.momentum else ()

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """The new parameter and buffer."""
        return ("", *self.states)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """Half a dozen operations for each element."""
        return 6 * operands[0].elements

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime, in place."""
        parameter, gradient, *states = (argument.text for argument in arguments)
        buffer = states[0] if states else "None"
        return f"kernels.sgd({parameter}, {gradient}, {buffer}, c.rate, {self.momentum}, {self.nesterov}, {self.decay})"
