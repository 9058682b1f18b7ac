"""Samples and dropout, as `docs/random.md` defines them: whole tensors, drawn from the first element on."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import prod

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1


def uniform(word: np.ndarray) -> np.ndarray:
    """In [0, 1), by the leading 53 bits."""
    return np.asarray((word >> np.uint64(11)).astype(np.float64) / 2.0**53)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3 of 64-bit words."""
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = x ^ (x >> np.uint64(33))
        x = x * np.uint64(multiplier)
    return np.asarray(x ^ (x >> np.uint64(33)))


def hashed(seed: int, step: int, path: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Two words for each element of the tensor `path` at a step."""
    name = int.from_bytes(blake2b(path.encode(), digest_size=8).digest(), "little") >> 1
    key = 0
    for number in (seed, step, name):
        key = (key ^ (number & MASK)) * 0x9E3779B97F4A7C15 & MASK
        key ^= key >> 29
    index = np.arange(count, dtype=np.uint64)
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        first, second = (_mixed((index * np.uint64(2) + np.uint64(i)) * golden + np.uint64(key)) for i in (1, 2))
    return first, second


def sample(name: str, argument: float, seed: int, step: int, path: str, shape: Sequence[int]) -> Tensor:
    """The sample `path` at a step."""
    first, second = hashed(seed, step, path, prod(shape))
    if name == "uniform":
        values = (2 * uniform(first) - 1) * argument
    elif name == "integers":
        values = np.floor(uniform(first) * argument).astype(np.int64)
    elif name == "gumbel":
        values = -np.log(-np.log(uniform(first) + 2.0**-54))
    else:
        values = np.sqrt(-2 * np.log1p(-uniform(first))) * np.cos(2 * np.pi * uniform(second)) * argument
    return torch.from_numpy(values).reshape(tuple(shape))


def kept(rate: float, seed: int, step: int, path: str, shape: Sequence[int]) -> Tensor:
    """What the dropout `path` keeps at a step."""
    first, _ = hashed(seed, step, path, prod(shape))
    return torch.from_numpy(uniform(first) >= rate).reshape(tuple(shape))
