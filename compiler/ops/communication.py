"""Values that cross between stages: a send on one side, a receive on the other, matched by the value's name."""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.instructions import Direction
from partita.compiler.ops.op import Argument, Op, ShardingRule, op
from partita.dsl.types import Type


class Transfer(Op):
    """Base of both ends of a message that carries `value` in a direction of the pipeline."""

    value: str
    direction: Direction

    def stages(self, own: int) -> tuple[int, int]:
        """The sending and the receiving stage, if this end is on stage `own`."""
        raise NotImplementedError

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Not an expression: the runtime sends from frame slots and receives into them."""
        raise AssertionError("messages are the runtime's")


@op("send")
class Send(Transfer):
    """Send the operand, named `value`, to stage `destination`."""

    value: str
    destination: int
    direction: Direction
    results = ()

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """No result."""
        return ()

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return tuple(ShardingRule((name,), ()) for name in operands[0].names)

    @property
    def structural_key(self) -> Op:
        """Of any value, to any stage."""
        return Send("", 0, self.direction)

    def stages(self, own: int) -> tuple[int, int]:
        """From this stage."""
        return own, self.destination


@op("receive")
class Receive(Transfer):
    """Receive `value`, of type `type`, from stage `source`."""

    value: str
    source: int
    direction: Direction
    type: Type
    allocates = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type that was sent."""
        return (self.type,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return tuple(ShardingRule((), (name,)) for name in self.type.names)

    @property
    def structural_key(self) -> Op:
        """Of any value, from any stage."""
        return Receive("", 0, self.direction, self.type)

    def stages(self, own: int) -> tuple[int, int]:
        """To this stage."""
        return self.source, own
