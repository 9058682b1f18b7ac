"""Zigzag order: where the positions of an axis stand if its parts are dealt out from both ends.

An axis is cut into 2N equal parts for N ranks. In zigzag order they stand as 0, 2N−1, 1, 2N−2, …: the shard of rank r
are the parts r and 2N−1−r, and queries that look back see as many keys on every rank (Brandon et al., arXiv 2311.09431;
Grattafiori et al., arXiv 2407.21783 §3.3.2). Nothing but operations that ask for positions knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

# Consecutive positions: the first one and their number, for each run.
Runs: TypeAlias = tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def zigzag_runs(start: int, size: int, length: int, ranks: int) -> Runs:
    """The positions of `size` elements from `start` on, of an axis of `length` in zigzag order for so many ranks."""
    half = length // (2 * ranks)
    assert half * 2 * ranks == length, (length, ranks)
    runs: list[tuple[int, int]] = []
    at, end = start, start + size
    while at < end:
        place, inside = divmod(at, half)
        part = 2 * ranks - 1 - place // 2 if place % 2 else place // 2
        count = min(half - inside, end - at)
        runs.append((part * half + inside, count))
        at += count
    return joined(runs)


def joined(runs: Sequence[tuple[int, int]]) -> Runs:
    """The same positions in the same order, in as few runs as can be."""
    merged: list[tuple[int, int]] = []
    for start, count in runs:
        if merged and sum(merged[-1]) == start:
            start, count = merged[-1][0], merged.pop()[1] + count
        merged.append((start, count))
    return tuple(merged)


@lru_cache(maxsize=4096)
def seen(queries: Runs, keys: Runs, causal: bool, window: int | None) -> int:
    """Twice the pairs of a query and a key that see each other: keys up to the query's position if causal, nearer than
    the window. As areas: a position sees half of itself, so that all pairs of an axis are halved exactly.
    """
    total = 0
    for q, count in queries:
        for k, size in keys:
            rows, columns = (q, q + count), (k, k + size)
            if causal:
                total += _below(rows, columns, 0)
            else:
                total += 2 * count * size if window is None else _below(rows, columns, -window)
            total -= 0 if window is None else _below(rows, columns, window)
    return total


def _below(rows: tuple[int, int], columns: tuple[int, int], by: int) -> int:
    """Twice the area of the rectangle in which the column is less than the row minus `by`."""

    def corner(row: int, column: int) -> int:
        return max(0, row - by - column) ** 2

    (a, b), (c, d) = rows, columns
    return corner(b, c) - corner(a, c) - corner(b, d) + corner(a, d)
