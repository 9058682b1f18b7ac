"""The order of items: a new one every epoch, a permutation that depends only on (seed, epoch)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from partita.runtime.philox import stream, words


class Order:
    """An endless sequence of the numbers below `count`: each once per epoch."""

    def __init__(self, seed: int, count: int) -> None:
        self._permutation = lru_cache(maxsize=2)(lambda epoch: permutation(seed, epoch, count))
        self.count = count

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The numbers at these positions of the sequence."""
        epochs, places = np.divmod(positions, self.count)
        chosen = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = self._permutation(int(epoch))[places[here]]
        return chosen


def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch: numbers sorted by random words."""
    return np.argsort(words(stream(seed, "epoch", epoch), 0, count), kind="stable")
