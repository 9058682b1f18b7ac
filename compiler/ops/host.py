"""Copies between a device's memory and the host's, of what `offload` keeps there.

A value lies in the device's memory unless `Value.host` says so. Other operations run where their operands lie. On a CPU
the host's memory is the device's, and copies are none; the account is that of a device with its own.

A copy is either in order with the device's compute (`to_device`, `to_host`), or asynchronous: one operation starts it,
and another waits for it. To the device these are `prefetch` and `arrive`, at which the device's compute waits; to the
host, `copy_out` and `land`, at which the host waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from partita.compiler.layout import SUM
from partita.compiler.ops.op import Argument, Known, Op, ShardingRule, aligned_rules, op
from partita.compiler.ops.traits import Redundant
from partita.dsl.types import Type


class HostCopy(Redundant):
    """Base of all."""

    rearranges = True
    fusible = False

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The operand's type."""
        return types

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear."""
        return (*aligned_rules(operands, results), ShardingRule((SUM,), (SUM,)))

    def elementwise_over(self, rows: Collection[str]) -> bool:
        """Yes."""
        return True

    def simplified(self, known: Known, operands: Sequence[int]) -> tuple[Op | None, tuple[int, ...]] | None:
        """The operand."""
        return None, tuple(operands)

    def flops(self, operands: Sequence[Type], results: Sequence[Type]) -> int:
        """No arithmetic."""
        return 0


@op("to_host")
class ToHost(HostCopy):
    """The operand in the host's memory."""

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.to_host({arguments[0].text})"


@op("to_device")
class ToDevice(HostCopy):
    """The operand in the device's memory."""

    @property
    def reads_context(self) -> bool:
        """For the device."""
        return True

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.to_device({arguments[0].text}, c)"


@op("prefetch")
class Prefetch(ToDevice):
    """The operand in the device's memory, once the copy is complete, which overlaps with compute of the device."""

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.prefetch({arguments[0].text}, c)"


@op("copy_out")
class CopyOut(ToHost):
    """The operand in the host's memory, once the copy is complete, which overlaps with compute of the device."""

    @property
    def reads_context(self) -> bool:
        """For the streams of copies."""
        return True

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.copy_out({arguments[0].text}, c)"


@op("land")
class WaitCopyOut(HostCopy):
    """The result of a `copy_out`, the first operand, which has landed. The second, of which it is a copy, is kept until
    then.
    """

    is_view = True

    @property
    def reads_context(self) -> bool:
        """For what is under way."""
        return True

    def infer(self, *types: Type) -> tuple[Type, ...]:
        """The copy's type."""
        copy, source = types
        assert copy == source, types
        return (copy,)

    def sharding_rules(self, operands: Sequence[Type], results: Sequence[Type]) -> tuple[ShardingRule, ...]:
        """Any axis; linear in both."""
        return (*aligned_rules(operands, results), ShardingRule((SUM, SUM), (SUM,)))

    def simplified(self, known: Known, operands: Sequence[int]) -> tuple[Op | None, tuple[int, ...]] | None:
        """The copy."""
        return None, (operands[0],)

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.land({arguments[0].text}, c)"


@op("arrive")
class WaitPrefetch(HostCopy):
    """The result of a `prefetch`, which has arrived."""

    is_view = True

    @property
    def reads_context(self) -> bool:
        """For what is under way."""
        return True

    def emit(self, arguments: Sequence[Argument], results: Sequence[Type]) -> str:
        """A kernel of the runtime."""
        return f"kernels.arrive({arguments[0].text}, c)"


# Those that start a copy, for which another operation waits.
ASYNC_COPIES = (Prefetch, CopyOut)
