"""Attention in one turn of a ring (`partita.compiler.ops.ring`): of each block of queries to one block of keys."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

from attrs import evolve

from partita.compiler.ops.attend import Attend, AttendGradient
from partita.compiler.ops.attention import Attention
from partita.compiler.ops.op import Argument, Kernel, Op, ShardingRule, fields_of_several, op
from partita.compiler.ops.position import ORDERS, offset_text, zigzag_ranks
from partita.compiler.ops.runs import Runs, seen, zigzag_runs
from partita.dsl.check.layouts import RING
from partita.dsl.types import Axis, Type


@fields_of_several
class OfBlocks(Attention):
    """Attention of each of `blocks` blocks of queries to the keys that stood `turn` blocks before it. All operands have
    `over`; a shard has some of the blocks, of which this is number `at`.
    """

    blocks: int = 1
    turn: int = 0
    at: int = 0
    whole: ClassVar[str]  # the same operation on all blocks

    def exchange(self, rule: ShardingRule) -> str | None:
        """By turns, each shard to those beside it."""
        return RING if rule.operands[0] == self.over else None

    def is_causal(self, axis: str) -> bool:
        """At other shards' keys too."""
        return False

    decompose = Op.decompose

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """As of all attention, with blocks of everything instead of queries alone."""
        others = (rule for rule in super().sharding_rules(operands, results) if rule.operands[0] != self.over)
        return (*others, ShardingRule((self.over,) * len(operands), (self.over,) * len(results)))

    def kernel(self, operands: Sequence[Type], results: Sequence[Type]) -> Kernel:
        """Like attention to as many keys that are all there."""
        kernel = super().kernel(operands, results)
        return kernel._replace(alike=self._all_there(kernel))

    def _all_there(self, kernel: Kernel) -> Kernel:
        alike = kernel.alike and self._all_there(kernel.alike)
        return kernel._replace(name=kernel.name.replace(self.name, self.whole), alike=alike)

    @property
    def _held(self) -> int:
        """How many of the blocks a shard has."""
        return self.blocks // prod(
            parts for name, over, parts in self.shards if name == self.over and over not in ORDERS
        )

    def pairs(self, q: Type, k: Type, slices: int) -> int:
        """Of all blocks of a shard."""
        size, local_blocks = q.axis(self.over).size // self._held, self._held
        length, ranks = size * self.blocks, zigzag_ranks(self.over, self.shards)
        runs: list[Runs] = [
            ((start, size),) if ranks is None else zigzag_runs(start, size, length, ranks)
            for start in range(0, length, size)
        ]
        each = [seen(runs[i], runs[(i - self.turn) % self.blocks], self.causal, None) for i in range(self.blocks)]
        return max(sum(each[i : i + local_blocks]) for i in range(0, self.blocks, local_blocks))

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A call of a kernel for each block, of which a shard has one."""
        local_blocks = self._held
        if local_blocks == 1:
            return super().emit(arguments, results)
        size = arguments[0].type.axis(self.over).size // local_blocks
        types = tuple(type.resized(self.over, size) for type in results)
        texts = []
        for at in range(local_blocks):
            block = [
                Argument(
                    f"{x.text}.narrow({x.type.position(self.over)}, {at * size}, {size})",
                    x.type.resized(self.over, size),
                )
                for x in arguments
            ]
            texts.append(super(OfBlocks, evolve(self, at=at)).emit(block, types))
        dims = tuple(type.position(self.over) for type in results)
        return f"kernels.joined(({', '.join(texts)}), {dims})"

    def _places(self, q: Type) -> str | None:
        """Text of where the queries and keys of a block stand, if that matters."""
        if not self.causal:
            return None
        size = q.axis(self.over).size
        length, ranks = size * self.blocks, zigzag_ranks(self.over, self.shards)
        here = offset_text(Axis(self.over, self._held), self.shards).removesuffix(" * 1")
        here += f" + {self.at}" if self.at else ""
        texts = []
        for index in (f"({here})", f"(({here} - {self.turn}) % {self.blocks})"):
            start = f"{index} * {size}"
            own = f"kernels.zigzag_runs({start}, {size}, {length}, {ranks})"
            texts.append(f"(({start}, {size}),)" if ranks is None else own)
        return f"places=({', '.join(texts)})"


@op("attend_block")
class AttendBlock(OfBlocks, Attend):
    """`attend` in a turn: −∞ is the logarithm of the denominator of what sees none of the keys."""

    whole = Attend.name

    gradient = Op.gradient


@op("attend_block_gradient")
class AttendBlockGradient(OfBlocks, AttendGradient):
    """Gradients of queries, keys and values in a turn. Operands: these, then the results of the whole attention and the
    cotangent.
    """

    whole = AttendGradient.name
