"""Long sequences of ids: an array in memory or a mapped file, or several of them read as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np


class Joined:
    """One-dimensional arrays of integers as one; only what is asked for is read. A slice of it is another."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = tuple(parts)
        self._ends = tuple(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: slice) -> Joined:
        start, stop, step = place.indices(len(self))
        assert step == 1, "ids are read in order"
        parts = []
        for index in range(bisect_right(self._ends, start), len(self.parts)):
            first = self._ends[index] - len(self.parts[index])
            if first >= stop:
                break
            parts.append(self.parts[index][max(start - first, 0) : stop - first])
        return Joined(parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.concatenate(self.parts) if self.parts else np.empty(0, np.int64)
        return whole if dtype is None else whole.astype(dtype)


Ids: TypeAlias = np.ndarray | Joined


def joined(parts: Sequence[Ids]) -> Ids:
    """The parts as one sequence; a single one as it is."""
    return parts[0] if len(parts) == 1 else Joined([array for part in parts for array in parts_of(part)])


def parts_of(ids: Ids) -> Iterable[np.ndarray]:
    """The arrays that make up a sequence."""
    return ids.parts if isinstance(ids, Joined) else (ids,)
