"""Values that cross between stages: a send on the one side, a receive on the other, joined by the value's name."""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.ops.op import Argument, Op, Way, op
from partita.dsl.types import Type


class Transfer(Op):
    """Base of both ends of a message: of `value`, in a direction of the pipeline."""

    value: str
    direction: str

    def stages(self, own: int) -> tuple[int, int]:
        """The stage that sends and the one that receives, if this end is on stage `own`."""
        raise NotImplementedError

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """None."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Not an expression: the runtime takes what is sent from the frame, and puts what arrives there."""
        raise AssertionError("messages are the runtime's")


@op("send")
class Send(Transfer):
    """Send the operand, called `value`, to stage `destination`, in a direction of the pipeline."""

    value: str
    destination: int
    direction: str
    results = ()
    sends = True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """No result."""
        return ()

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis."""
        return tuple(Way((name,), ()) for name in operands[0].names)

    def stages(self, own: int) -> tuple[int, int]:
        """From here."""
        return own, self.destination


@op("receive")
class Receive(Transfer):
    """Receive `value`, of a known type, from stage `source`."""

    value: str
    source: int
    direction: str
    type: Type
    receives = True
    allocates = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """As it was sent."""
        return (self.type,)

    def ways(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[Way, ...]:
        """Any axis."""
        return tuple(Way((), (name,)) for name in self.type.names)

    def stages(self, own: int) -> tuple[int, int]:
        """To here."""
        return self.source, own
