"""Intervals of integers: bounds of a tensor's elements, given those of the tensors that it is computed from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeAlias

# Lower and upper bound, both inclusive.
Interval: TypeAlias = tuple[float, float]
Rule: TypeAlias = Callable[[Sequence[Interval]], Interval]
ANY: Interval = (-inf, inf)


def union(operands: Sequence[Interval]) -> Interval:
    """Covers all of the intervals."""
    return min(low for low, _ in operands), max(high for _, high in operands)


def chosen(operands: Sequence[Interval]) -> Interval:
    """An element of any operand but the first, which is the condition."""
    return union(operands[1:])


def product(operands: Sequence[Interval]) -> Interval:
    """Products of an element of each of the two."""
    a, b = operands
    ends = [_times(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def total(operands: Sequence[Interval]) -> Interval:
    """Sums of an element of each of the two."""
    a, b = operands
    return a[0] + b[0], a[1] + b[1]


def remainder(operands: Sequence[Interval]) -> Interval:
    """Remainders of a division by a positive number."""
    low, high = operands[1]
    return (0, high - 1) if low > 0 else ANY


def negative(operands: Sequence[Interval]) -> Interval:
    """Negated elements."""
    (a,) = operands
    return -a[1], -a[0]


def difference(operands: Sequence[Interval]) -> Interval:
    """An element of the first minus one of the second."""
    a, b = operands
    return total((a, negative((b,))))


def absolute(operands: Sequence[Interval]) -> Interval:
    """Absolute values."""
    (a,) = operands
    low, high = sorted((abs(a[0]), abs(a[1])))
    return (0.0 if a[0] <= 0 <= a[1] else low), high


def sign(operands: Sequence[Interval]) -> Interval:
    """The signs of elements."""
    (a,) = operands
    return float(-1 if a[0] < 0 else min(a[0], 1)), float(1 if a[1] > 0 else max(a[1], -1))


def maximum(operands: Sequence[Interval]) -> Interval:
    """The greater of an element of each of the two."""
    a, b = operands
    return max(a[0], b[0]), max(a[1], b[1])


def minimum(operands: Sequence[Interval]) -> Interval:
    """The smaller of an element of each of the two."""
    a, b = operands
    return min(a[0], b[0]), min(a[1], b[1])
