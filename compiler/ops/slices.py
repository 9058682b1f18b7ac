"""Operations of a microbatch whose sequence is cut into slices, which stages go through one after the other.

Slices are shards over time. What later slices need of earlier ones is gathered, forward, and the gradients of that are
summed and scattered, backward: an all-gather and a reduce-scatter in which each part takes its turn. F runs through the
slices in order, and B and W in the reverse order. So F of a slice finds all positions up to its own; and once B of a
slice has added its terms, the sum for its own positions is complete, if those of earlier slices see none of later ones.

The slices of a microbatch share the tensors in which this is collected, which are zero before the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.layout import SUM
from partita.compiler.ops.op import (
    TORCH_DTYPES,
    Argument,
    Op,
    ShardingRule,
    agree,
    aligned_rules,
    broadcast,
    op,
    permuted,
    shape_text,
)
from partita.compiler.ops.position import SLICE, Positioned, Shards, offset_text
from partita.dsl.types import Axis, Type


@op("of_slices")
class OfSlices(Op):
    """A tensor that the slices of a microbatch share on a stage, zero before the first of them: that of a `key`."""

    key: str
    type: Type
    duplicable = True
    fusible = False

    @property
    def structural_key(self) -> Op:
        """Of any key."""
        return OfSlices("", self.type)

    @property
    def of_slices(self) -> bool:
        """It is one."""
        return True

    @property
    def microbatch_dependent(self) -> bool:
        """Each has its own."""
        return True

    @property
    def reads_context(self) -> bool:
        """The context holds it."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """`type`."""
        return (self.type,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; terms of sums."""
        return tuple(ShardingRule((), (state,)) for state in (*self.type.names, SUM))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """From the context, which makes it when it is first asked for."""
        (type,) = results
        return f"c.of_slices({self.key!r}, {shape_text(type.shape)}, {TORCH_DTYPES[type.dtype]})"


@op("gather_slices")
class GatherSlices(Positioned):
    """All positions of an axis up to those of this slice. Operands: what holds them; this slice, which is added.

    Positions after this slice are zero, or those of later slices, if F of these has run.
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
        """The first operand."""
        whole, part = types
        assert agree(whole.without([self.axis]), part.without([self.axis])), types
        assert set(whole.names) == set(part.names), types
        return (whole,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis."""
        return aligned_rules(operands, results, whole=[self.axis])

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The slice, twice."""
        return 2 * operands[1].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        whole, part = arguments
        start = offset_text(part.type.axis(self.axis), self.shards)
        dim = whole.type.position(self.axis)
        return f"kernels.keep({whole.text}, {broadcast(part, whole.type.names)}, {dim}, {start})"


@op("scatter_slices")
class ScatterSlices(Positioned):
    """The positions of this slice of a sum over this slice and all later ones. Operands: what holds the sum over later
    ones, in the dtype of accumulation; the term of this slice, which is added.
    """

    axis: str
    size: int
    shards: Shards = ()
    fusible = False

    @property
    def begins(self) -> tuple[str, ...]:
        """The axis."""
        return (self.axis,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The second operand, cut to `size`."""
        total, term = types
        assert set(total.axes) == set(term.axes), types
        return (term.resized(self.axis, self.size),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis; linear."""
        return (*aligned_rules(operands, results, whole=[self.axis]), ShardingRule((SUM, SUM), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """One addition for each element of the term."""
        return operands[1].elements

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The sum is read and written."""
        return 2 * operands[0].bytes + operands[1].bytes + 2 * results[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        total, term = arguments
        start = offset_text(Axis(self.axis, self.size), self.shards)
        place = f"{term.type.position(self.axis)}, {start}, {self.size}"
        view = permuted(total.text, total.type.names, term.type.names)
        return f"kernels.scatter_slices({view}, {term.text}, {place})"


@op("place_slice")
class PlaceSlice(Positioned):
    """This slice among zeros at the other positions of an axis of `size`: its term of a sum over all slices."""

    axis: str
    size: int
    shards: Shards = ()
    fusible = False

    @property
    def begins(self) -> tuple[str, ...]:
        """The axis."""
        return (self.axis,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand, with the whole axis."""
        return (types[0].resized(self.axis, self.size),)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any other axis; of a shard of the slice it makes a term of the sum; linear."""
        term = ShardingRule((self.axis,), (SUM,))
        return (*aligned_rules(operands, results, whole=[self.axis]), term, ShardingRule((SUM,), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        (x,) = arguments
        start = offset_text(x.type.axis(self.axis), self.shards)
        return f"kernels.place_slice({x.text}, {x.type.position(self.axis)}, {start}, {self.size})"


@op("first_part")
class KeepInFirstPart(Op):
    """The operand in the first part over time, and zero in all others: what is the same in all of them counts once.

    `over` is the mesh axis `time` or `slice`.
    """

    over: str
    fusible = False

    @property
    def microbatch_dependent(self) -> bool:
        """Whether it is the first."""
        return True

    @property
    def reads_context(self) -> bool:
        """For the index of the part."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand's type."""
        return types

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear."""
        return (*aligned_rules(operands, results), ShardingRule((SUM,), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """One of the two."""
        (x,) = arguments
        index = "c.slice" if self.over == SLICE else "c.microbatch"
        return f"(torch.zeros_like({x.text}) if {index} else {x.text})"
