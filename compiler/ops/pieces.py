"""Pieces of a tensor that travel one after another, so that products of some hide the journey of others.

A value is cut along an axis into pieces of one size. Gathered along that same axis, a piece has parts of all ranks, in
their order: of each of the `blocks` that follow one another along the axis, an equal part. These operations are made by
`partita.compiler.passes.chunked_collectives`, after all has been split over ranks, so none can be sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.compiler.ops.op import Argument, Op, ShardingRule, agree, op, shape_text
from partita.dsl.types import Type


def whole_size(type: Type, axis: str, pieces: int) -> int:
    """The size of the axis in what is cut into pieces of a type."""
    return type.axis(axis).size * pieces


@op("piece")
class Piece(Op):
    """The piece `index` of `pieces` along an axis: of each of its `blocks`, an equal part. A `view` if the piece is
    contiguous in memory.
    """

    axis: str
    pieces: int
    index: int
    blocks: int = 1
    view: bool = False
    rearranges = True

    @property
    def is_view(self) -> bool:  # type: ignore[override]
        """If it says so."""
        return self.view

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """None."""
        return ()

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is divided by `pieces`."""
        (x,) = types
        size = x.axis(self.axis).size
        assert 0 <= self.index < self.pieces, self
        assert size % (self.pieces * self.blocks) == 0, (self, x)
        assert self.view == contiguous(x, self.axis, self.blocks), (self, x)
        return (x.resized(self.axis, size // self.pieces),)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def accessed(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """The piece, which is read and written."""
        return 2 * results[0].bytes

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`narrow`, or `select` of the parts of blocks; a copy of what is not contiguous."""
        (x,) = arguments
        dim, size = x.type.position(self.axis), results[0].axis(self.axis).size // self.blocks
        if self.blocks == 1:
            text = f"{x.text}.narrow({dim}, {self.index * size}, {size})"
        else:
            parts = shape_text((self.blocks, self.pieces, size))
            text = f"{x.text}.unflatten({dim}, {parts}).select({dim + 1}, {self.index}).flatten({dim}, {dim + 1})"
        return text if self.view else f"{text}.contiguous()"


@op("join")
class Join(Op):
    """What has been cut into pieces, of all of them in order."""

    axis: str
    blocks: int = 1
    rearranges = True

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """None."""
        return ()

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The axis is as long as those of all pieces."""
        first = types[0]
        assert agree(*types), (self, types)
        assert all(type == first for type in types), (self, types)
        assert first.axis(self.axis).size % self.blocks == 0, (self, types)
        return (first.resized(self.axis, whole_size(first, self.axis, len(types))),)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """`torch.cat`, within each block."""
        dim, size = results[0].position(self.axis), arguments[0].type.axis(self.axis).size // self.blocks
        texts = [each.text for each in arguments]
        if self.blocks == 1:
            return f"torch.cat(({', '.join(texts)},), {dim})"
        parts = shape_text((self.blocks, size))
        joined = ", ".join(f"{text}.unflatten({dim}, {parts})" for text in texts)
        return f"torch.cat(({joined},), {dim + 1}).flatten({dim}, {dim + 1})"


def contiguous(type: Type, axis: str, blocks: int) -> bool:
    """Whether pieces of a tensor are contiguous in memory: nothing lies outside of the axis."""
    return blocks == 1 and all(each.size == 1 for each in type.axes[: type.position(axis)])
