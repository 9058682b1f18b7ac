"""Rotary positions and random numbers: functions of coordinates in the global tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from partita.runtime.kernels.dtypes import DTYPES, widened
from partita.runtime.kernels.registry import kernel


@lru_cache(maxsize=32)
def _angles(count: int, half: int, base: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    position = torch.arange(count, dtype=torch.float64, device=device)
    rate = base ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = position[:, None] * rate
    return angle.cos().to(wide), angle.sin().to(wide)


@kernel
def rope(x: Tensor, start: int, base: float, inverse: bool, order: Sequence[int]) -> Tensor:
    """Rotate the halves of the last axis by the position along the second to last, which begins at `start`."""
    half = x.shape[-1] // 2
    cos, sin = _angles(start + x.shape[-2], half, base, x.dtype, x.device)
    cos, sin = cos[start:], sin[start:]
    if inverse:
        sin = -sin
    a, b = widened(x[..., :half]), widened(x[..., half:])
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype).permute(*order)


# Multipliers of MurmurHash3's 64-bit finalizer (Appleby) and of a Weyl sequence, as signed integers.
_MIX = (-0x00AE502812AA7333, -0x3B314601E57A13AD, -0x61C8864680B583EB)


def _mixed(x: Tensor) -> Tensor:
    """An elementwise bijective hash of 64-bit integers, in place."""
    for multiplier in _MIX[:2]:
        x ^= (x >> 33) & 0x7FFFFFFF
        x *= multiplier
    x ^= (x >> 33) & 0x7FFFFFFF
    return x


def _scalar_mixed(*numbers: int) -> int:
    """One 64-bit key from several integers."""
    key = 0
    for number in numbers:
        key = (key ^ (number & (2**64 - 1))) * 0x9E3779B97F4A7C15 & (2**64 - 1)
        key ^= key >> 29
    return key - 2**64 if key >= 2**63 else key


@kernel
def random(
    c: Any,
    distribution: str,
    scale: float,
    key: int,
    shape: Sequence[int],
    starts: Sequence[int],
    whole: Sequence[int],
    dtype: str,
) -> Tensor:
    """Random numbers by a hash of (seed, step, key, coordinates): the region `shape` at `starts` of `whole`."""
    index = torch.zeros((), dtype=torch.int64, device=c.device)
    for position, (size, start, extent) in enumerate(zip(shape, starts, whole, strict=True)):
        coordinate = torch.arange(start, start + size, device=c.device)
        view = [1] * len(shape)
        view[position] = size
        index = index * extent + coordinate.view(view)
    stream = _scalar_mixed(c.seed, c.step, key)
    bits = _mixed((index.expand(tuple(shape)) * 2 + 1) * _MIX[2] + stream)
    # 53 bits make a double in [0, 1).
    unit = ((bits >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53
    if distribution == "keep":
        return unit >= scale
    if distribution == "uniform":
        return ((unit * 2 - 1) * scale).to(DTYPES[dtype])
    assert distribution == "normal", distribution
    other = _mixed((index.expand(tuple(shape)) * 2 + 2) * _MIX[2] + stream)
    angle = ((other >> 11) & (2**53 - 1)).to(torch.float64) * (2.0**-53 * 2 * torch.pi)
    radius = torch.sqrt(-2 * torch.log1p(-unit))
    return (radius * torch.cos(angle) * scale).to(DTYPES[dtype])
