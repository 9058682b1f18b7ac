"""Into zigzag order (`partita.compiler.ops.runs`) and back: where tensors of a program begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.compiler.layout import SUM
from partita.compiler.ops.op import Argument, ShardingRule, aligned_rules, op
from partita.compiler.ops.position import ZIGZAG, Positioned, Shards, positions_code_of
from partita.dsl.types import Type

if TYPE_CHECKING:
    from partita.compiler.graph import Builder, Node, Value


@op("zigzag")
class Zigzag(Positioned):
    """The operand with the positions of `axis` in zigzag order for so many `ranks`; with `back`, from that order.

    Either way the side in zigzag order may be a shard, of which the other side has the positions: back from it, a
    partial sum, with zeros for all others.
    """

    axis: str
    ranks: int
    back: bool = False
    shards: Shards = ()
    rearranges = True
    fusible = False

    @property
    def label(self) -> str:
        """`zigzag` or `in_order`."""
        return "in_order" if self.back else "zigzag"

    @property
    def begins(self) -> tuple[str, ...]:
        """The axis."""
        return (self.axis,)

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand's type; a shard of it has fewer positions."""
        (x,) = types
        size, parts = x.axis(self.axis).size, self._parts
        return (x.resized(self.axis, size * parts if self.back else size // parts),)

    @property
    def _parts(self) -> int:
        count = 1
        for name, _, parts in self.shards:
            count *= parts if name == self.axis else 1
        return count

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """The side in zigzag order along the axis; any other axis; linear."""
        own = ShardingRule((self.axis,), (SUM,)) if self.back else ShardingRule((None,), (self.axis,))
        return (own, *aligned_rules(operands, results, whole=[self.axis]), ShardingRule((SUM,), (SUM,)))

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0

    def gradient(self, build: Builder, node: Node, d: Value) -> tuple[Value | None, ...]:
        """The other way."""
        return (build.apply(Zigzag(self.axis, self.ranks, not self.back, self.shards), d),)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """Kernels of the runtime: runs of positions taken, or put."""
        (x,) = arguments
        ordered = x.type if self.back else results[0]
        order = (self.axis, ZIGZAG, self.ranks)
        places = positions_code_of(ordered.axis(self.axis), (order, *self.shards))
        dim = x.type.position(self.axis)
        if not self.back:
            return f"kernels.take_runs({x.text}, {dim}, {places})"
        return f"kernels.put_runs({x.text}, {dim}, {places}, {results[0].axis(self.axis).size})"
