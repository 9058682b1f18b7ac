"""Operations of a program that goes through an axis part by part, and keeps what later parts need of earlier ones.

What is kept are *states*: tensors that outlive the step, zero before the first part, and written in place. The part
begins at the context's `position`. A state is read before it is written: what writes it returns values that what
follows reads instead of its operands.
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.layout import SUM
from partita.compiler.ops.op import Argument, Op, ShardingRule, agree, aligned_rules, broadcast, op, permuted
from partita.compiler.ops.position import Positioned, Shards, offset_text
from partita.compiler.ops.traits import WritesState
from partita.dsl.types import Type


@op("keep")
class UpdateCache(WritesState, Positioned):
    """All positions of an axis so far. Operands: a state with the whole axis; this part, which is written into it.

    Positions after this part are zero, or those of an earlier use of the state.
    """

    axis: str
    shards: Shards = ()
    is_view = True
    fusible = False

    @property
    def begins(self) -> tuple[str, ...]:
        """The axis."""
        return (self.axis,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The state."""
        state, part = types
        assert agree(state.without([self.axis]), part.without([self.axis])), (self, types)
        assert set(state.names) == set(part.names), (self, types)
        return (state,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis; linear."""
        return (*aligned_rules(operands, results, whole=[self.axis]), ShardingRule((SUM, SUM), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The part, twice."""
        return 2 * operands[1].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        state, part = arguments
        start = offset_text(part.type.axis(self.axis), self.shards)
        dim = state.type.position(self.axis)
        return f"kernels.keep({state.text}, {broadcast(part, state.type.names)}, {dim}, {start})"


@op("carry")
class WriteState(WritesState):
    """Writes what the next part begins with. Operands: `count` states, as many new values for them, and some `values`,
    which are returned as they are.
    """

    count: int
    values: int = 1
    fusible = False

    @property
    def writes(self) -> int:
        """The states."""
        return self.count

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """Without names of their own."""
        return ("",) * self.values

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The values that are returned."""
        states, new = types[: self.count], types[self.count : 2 * self.count]
        assert all(set(a.names) == set(b.names) and agree(a, b) for a, b in zip(states, new, strict=True)), types
        assert len(types) == 2 * self.count + self.values, (self, types)
        return types[2 * self.count :]

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        names = dict.fromkeys(name for type in operands for name in type.names)
        return tuple(
            ShardingRule(
                tuple(name if x.has(name) else None for x in operands),
                tuple(name if x.has(name) else None for x in results),
            )
            for name in names
        )

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        states, new = arguments[: self.count], arguments[self.count : 2 * self.count]
        news = [broadcast(value, state.type.names) for state, value in zip(states, new, strict=True)]
        values = [each.text for each in arguments[2 * self.count :]]
        groups = [[state.text for state in states], news, values]
        listed = ", ".join(f"({', '.join(group)}{',' if len(group) == 1 else ''})" for group in groups)
        return f"kernels.carry({listed}){'[0]' if len(values) == 1 else ''}"


@op("resume")
class LoadState(Op):
    """What a recurrence begins a part with. Operands: its first value; a state, which it is after the first part."""

    fusible = False

    @property
    def reads_context(self) -> bool:
        """For the position."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The type of the first value."""
        assert agree(*types), types
        assert set(types[0].names) == set(types[1].names), types
        return (types[0],)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis."""
        return aligned_rules(operands, results)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """One of the two."""
        first, state = arguments
        return f"({permuted(state.text, state.type.names, first.type.names)} if c.position else {first.text})"


@op("go_on")
class ConcatHistory(WritesState):
    """A part with what came before it. Operands: a state with the last `by` positions before the part, which becomes
    that of the next one; the part, whose axis `over` then has as many more. Before the first part is `fill`.
    """

    over: str
    by: int
    fill: float = 0.0
    fusible = False

    @property
    def reads_context(self) -> bool:
        """For the position."""
        return self.fill != 0

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The part's type, with the longer axis."""
        state, part = types
        assert agree(state.without([self.over]), part.without([self.over])), (self, types)
        assert set(state.names) == set(part.names), (self, types)
        assert state.axis(self.over).size == self.by > 0, (self, types)
        return (part.resized(self.over, part.axis(self.over).size + self.by),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis; linear if zeros come before the first part."""
        linear = () if self.fill else (ShardingRule((SUM, SUM), (SUM,)),)
        return (*aligned_rules(operands, results, whole=[self.over]), *linear)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        state, part = arguments
        view = permuted(state.text, state.type.names, part.type.names)
        first = f", None if c.position else {self.fill!r}" if self.fill else ""
        return f"kernels.go_on({view}, {part.text}, {part.type.position(self.over)}{first})"
