"""What a collective holds of memory besides its operands and results, as the runtime's transports do it
(`partita.runtime.transports.groups`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from attrs import frozen

from partita.dsl.types import Type

# Where tensors are packed into a row of bytes, each begins at a multiple of this, to be viewed in its dtype.
ALIGNMENT = 16

Typed = TypeVar("Typed", bound=tuple[Any, ...])


@frozen
class Buffers:
    """Bytes that a collective holds.

    While it is in flight: copies of what is `sent`, operands that are sent as they are (`lent`, their positions), and
    what is `received`. Then its results are made, which takes `adding` more for as long: they are views of what was
    received (`in_place`), or of one tensor of `made` bytes, or each has its own memory (0).
    """

    sent: int = 0
    received: int = 0
    made: int = 0
    adding: int = 0
    in_place: bool = False
    lent: tuple[int, ...] = ()

    def __add__(self, other: Buffers) -> Buffers:
        """Those of both together, which are of one kind."""
        return Buffers(
            self.sent + other.sent,
            self.received + other.received,
            self.made + other.made,
            self.adding + other.adding,
            other.in_place,
            self.lent + other.lent,
        )


def packed(types: Sequence[Type], parts: int = 1) -> int:
    """Bytes of a bucket of tensors, each cut into so many parts; one alone is not filled up."""
    if len(types) == 1:
        return types[0].bytes
    return parts * sum(-(-type.bytes // parts // ALIGNMENT) * ALIGNMENT for type in types)


def by_dtype(each: Iterable[Typed]) -> list[list[Typed]]:
    """Types and what belongs to them, by dtype: those of one dtype are reduced together."""
    groups: dict[str, list[Typed]] = {}
    for own in each:
        groups.setdefault(own[0].dtype, []).append(own)
    return list(groups.values())
