"""Random initial values and data, as `docs/random.md` defines them: whole tensors, from the first element on."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import prod

import numpy as np
import torch
from torch import Tensor

from partita.runtime.interpreter.drawn import uniform


def words(seed: int, purpose: str, step: int, name: str, count: int) -> np.ndarray:
    """The first words of a stream."""
    digest = blake2b(f"{seed}/{purpose}/{step}/{name}".encode(), digest_size=16).digest()
    key = np.array([int.from_bytes(half, "little") for half in (digest[:8], digest[8:])], np.uint64)
    return np.random.Philox(key=key, counter=0).random_raw(count)


def normal(word: np.ndarray) -> np.ndarray:
    """By Box and Muller, of the two halves of each word."""
    u = ((word >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32
    v = (word & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2.0**32
    return np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)


def integers(word: np.ndarray, limit: int) -> np.ndarray:
    """In [0, limit), by the leading 32 bits."""
    return np.array([((int(w) >> 32) * limit) >> 32 for w in word], np.int64)


def initial(name: str, arguments: Sequence[float], seed: int, path: str, shape: Sequence[int], fans) -> Tensor:
    """The initial value of the parameter `path`."""
    count = prod(shape)
    word = words(seed, "initial", 0, path, count)
    fan_in, fan_out = fans
    values = {
        "zeros": lambda: np.zeros(count),
        "ones": lambda: np.ones(count),
        "constant": lambda: np.full(count, arguments[0]),
        "normal": lambda: normal(word) * arguments[0],
        "uniform": lambda: (2 * uniform(word) - 1) * arguments[0],
        "xavier": lambda: (2 * uniform(word) - 1) * (6 / (fan_in + fan_out)) ** 0.5,
        "kaiming": lambda: normal(word) * (2 / fan_in) ** 0.5,
    }[name]()
    return torch.from_numpy(values.astype(np.float64)).reshape(tuple(shape))
