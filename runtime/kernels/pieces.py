"""Attention in pieces: where queries and keys stand in runs of positions, each run of queries is computed with those
keys alone that it sees.

Queries and keys are taken in the order of their positions. A piece has consecutive queries and consecutive keys. Keys
before all queries of a run are seen whole, and those beside them causally, so that fused kernels need no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from attrs import frozen
from torch import Tensor

from partita.compiler.ops.runs import Runs, joined
from partita.runtime.kernels.dtypes import widened


@frozen
class Piece:
    """Queries and keys that are computed together, and whether causally; the first query is at key `start`."""

    queries: slice
    keys: slice
    causal: bool
    start: int = 0


def pieces(queries: Runs, keys: Runs, causal: bool, window: int | None, plain: bool) -> list[Piece]:
    """The pieces of attention of queries at runs of positions to keys at such, both in ascending order. `plain`:
    causality alone, if anything, restricts what is seen.
    """
    parts: list[Piece] = []
    row = 0
    for q, count in joined(queries):
        column = 0
        for k, size in joined(keys):
            first, end = k, k + size
            if causal:
                end = min(end, q + count)
            if window is not None:
                first = max(first, q - window + 1)
                end = end if causal else min(end, q + count - 1 + window)
            # Up to here, queries see all keys.
            middle = min(max(first, q), end) if causal and plain else end
            if first < middle:
                own = slice(row, row + count)
                parts.append(Piece(own, _from(column - k, first, middle), causal and not plain, q - first))
            if first < end and middle < end:
                own = slice(row + middle - q, row + count)
                parts.append(Piece(own, _from(column - k, middle, end), True))
            column += size
        row += count
    return parts


def _from(by: int, first: int, end: int) -> slice:
    return slice(first + by, end + by)


@overload
def in_order(x: Tensor, dim: int, runs: Runs) -> Tensor: ...
@overload
def in_order(x: None, dim: int, runs: Runs) -> None: ...
def in_order(x: Tensor | None, dim: int, runs: Runs) -> Tensor | None:
    """What stands at runs of positions along a dimension, in ascending order of these."""
    if x is None or list(runs) == sorted(runs) or x.shape[dim] == 1:
        return x
    return torch.cat([x.narrow(dim, at, count) for _, count, at in sorted(_found(runs))], dim)


def back(x: Tensor, dim: int, runs: Runs) -> Tensor:
    """From ascending order to that of the runs."""
    if list(runs) == sorted(runs):
        return x
    parts, at = {}, 0
    for start, count in sorted(runs):
        parts[start] = x.narrow(dim, at, count)
        at += count
    return torch.cat([parts[start] for start, _ in runs], dim)


def part(x: Tensor, dim: int, places: slice) -> Tensor:
    """What stands at places of a dimension: a view."""
    return x.narrow(dim, places.start, places.stop - places.start)


def _found(runs: Runs) -> list[tuple[int, int, int]]:
    """Runs with the places where they stand."""
    placed, at = [], 0
    for start, count in runs:
        placed.append((start, count, at))
        at += count
    return placed


def alone(parts: Sequence[Piece], queries: int, keys: int) -> Piece | None:
    """The only piece, if it has all of so many queries and keys."""
    if len(parts) != 1 or (parts[0].queries, parts[0].keys) != (slice(0, queries), slice(0, keys)):
        return None
    return parts[0]


@frozen(eq=False)
class Merged:
    """What pieces make of queries: attended values and logarithms of denominators, in the dtype of accumulation."""

    values: Tensor
    denominator: Tensor

    @staticmethod
    def of(shape: Sequence[int], like: Tensor) -> Merged:
        """Before the first piece; `shape` is that of the values."""
        values = widened(like.new_zeros(tuple(shape)))
        return Merged(values, values.new_full(tuple(shape[:-1]), float("-inf")))

    def add(self, rows: slice, values: Tensor, denominator: Tensor) -> None:
        """What a piece makes of some of the queries, which is changed."""
        old = part(self.denominator, -1, rows)
        total = torch.logaddexp(old, denominator)
        finite = total.masked_fill(total == float("-inf"), 0.0)
        own = part(self.values, -2, rows)
        own.mul_(torch.exp(old - finite).unsqueeze(-1))
        own.add_(widened(values).mul_(torch.exp(denominator - finite).unsqueeze(-1)))
        torch.logaddexp(old, denominator, out=old)


class Sums:
    """Gradients of queries, keys and values, of which pieces read some rows, in the dtype of accumulation; with
    `scores`, also those of all scores.
    """

    def __init__(self, scores: bool) -> None:
        self.totals: list[Tensor] = []
        self.scores: Tensor | None = None
        self._scores = scores

    def add(self, piece: Piece, like: Sequence[Tensor], parts: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> None:
        """What a piece of tensors `like` these adds to their gradients."""
        *own, scores = parts
        if not self.totals:
            self.totals = [
                widened(one.new_zeros((*x.shape[:-1], one.shape[-1]))) for x, one in zip(like, own, strict=True)
            ]
        for total, rows, one in zip(self.totals, (piece.queries, piece.keys, piece.keys), own, strict=True):
            part(total, -2, rows).add_(one)
        if self._scores and scores is not None:
            if self.scores is None:
                self.scores = scores.new_zeros((*scores.shape[:2], like[0].shape[-2], like[1].shape[-2]))
            part(part(self.scores, -2, piece.queries), -1, piece.keys).add_(scores)

    def of(self, *like: Tensor) -> list[Tensor]:
        """The totals: zeros where there was no piece."""
        return self.totals or [torch.zeros_like(x) for x in like]
