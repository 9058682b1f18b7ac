"""Everything random, as `docs/random.md` defines it: whole tensors, drawn from the first element on."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import prod

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1


# ---------------------------------------------------------------- streams of words: initial values, data


def words(seed: int, purpose: str, step: int, name: str, count: int) -> np.ndarray:
    """The first words of a stream."""
    digest = blake2b(f"{seed}/{purpose}/{step}/{name}".encode(), digest_size=16).digest()
    key = np.array([int.from_bytes(half, "little") for half in (digest[:8], digest[8:])], np.uint64)
    return np.random.Philox(key=key, counter=0).random_raw(count)


def uniform(word: np.ndarray) -> np.ndarray:
    """In [0, 1), by the leading 53 bits."""
    return (word >> np.uint64(11)).astype(np.float64) / 2.0**53


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


# ---------------------------------------------------------------- a hash of coordinates: samples, dropout


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3 of 64-bit words."""
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = x ^ (x >> np.uint64(33))
        x = x * np.uint64(multiplier)
    return x ^ (x >> np.uint64(33))


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
        return tuple(_mixed((index * np.uint64(2) + np.uint64(i)) * golden + np.uint64(key)) for i in (1, 2))


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
