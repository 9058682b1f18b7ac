"""What joins and ends a step: accumulation over microbatches, and what the optimizers' updates have in common.

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
