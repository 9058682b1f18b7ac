"""Rotary positions and random numbers: functions of coordinates in the global tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil, floor, log, pi
from typing import Any, TypeAlias

import torch
from torch import Tensor

from partita.compiler.ops.runs import Runs
from partita.compiler.ops.runs import zigzag_runs as runs
from partita.runtime.declared import in_f64
from partita.runtime.kernels.compiling import is_tracing, without_fake_mode
from partita.runtime.kernels.dtypes import DTYPES, widened
from partita.runtime.kernels.registry import kernel

# The first of consecutive positions, or runs of them.
Places: TypeAlias = int | Runs
# Rates of rotation, the base, then the arguments of a scaling → other rates, and a factor of what is rotated.
Scaled: TypeAlias = tuple[Tensor, float]


def _llama3(rate: Tensor, base: float, factor: float, original: int, low: float, high: float) -> Scaled:
    """Llama 3.1: wavelengths that fit fewer than `low` times in `original` positions are stretched by `factor`, those
    that fit more than `high` times are kept, and rates in between are mixed. `apply_scaling` of meta-llama's
    `models/llama3/model.py`.
    """
    fits = original * rate / (2 * torch.pi)
    smooth = ((fits - low) / (high - low)).clamp(0, 1)
    return rate * (smooth + (1 - smooth) / factor), 1.0


def _yarn(
    rate: Tensor,
    base: float,
    factor: float,
    original: int,
    fast: float,
    slow: float,
    attention: float | None,
    truncate: bool,
) -> Scaled:
    """YaRN (Peng et al., arXiv 2309.00071): pairs that turn more than `fast` times in `original` positions are kept,
    those that turn fewer than `slow` times are stretched, with a ramp over the pairs in between; the result is
    multiplied by 0.1 ln(factor) + 1 unless `attention` is given. As in the authors' implementation, the ends of the
    ramp are whole pairs if `truncate`, and lie within the last axis.
    """
    size = 2 * len(rate)
    ends = [size * log(original / (turns * 2 * pi)) / (2 * log(base)) for turns in (fast, slow)]
    first, last = (floor(ends[0]), ceil(ends[1])) if truncate else ends
    first, last = max(first, 0), min(last, size - 1)
    pair = torch.arange(len(rate), dtype=rate.dtype, device=rate.device)
    stretched = ((pair - first) / (last - first if last != first else 0.001)).clamp(0, 1)
    return rate * (1 - stretched + stretched / factor), attention or (0.1 * log(factor) + 1 if factor > 1 else 1.0)


SCALINGS: dict[str, Callable[..., Scaled]] = {"llama3": _llama3, "yarn": _yarn}


def _rates(half: int, base: float, scaling: tuple[Any, ...] | None, device: torch.device) -> Scaled:
    """The angle between two positions, for each pair, in f64."""
    rate = base ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    return (rate, 1.0) if scaling is None else SCALINGS[scaling[0]](rate, base, *scaling[1:])


@lru_cache(maxsize=32)
@without_fake_mode
@in_f64("a table of all positions, made once")
def _angles(
    count: int, half: int, base: float, scaling: tuple[Any, ...] | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    position = torch.arange(count, dtype=torch.float64, device=device)
    rate, factor = _rates(half, base, scaling, device)
    angle = position[:, None] * rate
    return (angle.cos() * factor).to(wide), (angle.sin() * factor).to(wide)


zigzag_runs = kernel(runs)


@kernel
def positions(places: Runs, device: torch.device) -> Tensor:
    """The positions of runs, i64."""
    return torch.cat([torch.arange(start, start + count, device=device) for start, count in places])


@kernel
def take_runs(x: Tensor, dim: int, places: Runs) -> Tensor:
    """What stands at runs of positions along a dimension."""
    return torch.cat([x.narrow(dim, start, count) for start, count in places], dim)


@kernel
def put_runs(x: Tensor, dim: int, places: Runs, size: int) -> Tensor:
    """A tensor with `size` positions along a dimension, x at runs of them, and zeros elsewhere."""
    shape = list(x.shape)
    shape[dim] = size
    result, at = x.new_zeros(shape), 0
    for start, count in places:
        result.narrow(dim, start, count).copy_(x.narrow(dim, at, count))
        at += count
    return result


@kernel
def joined(parts: Sequence[Sequence[Tensor]], dims: Sequence[int]) -> tuple[Tensor, ...]:
    """Results of several parts, each concatenated along its dimension."""
    return tuple(torch.cat(own, dim) for own, dim in zip(zip(*parts, strict=True), dims, strict=True))


@lru_cache(maxsize=32)
@without_fake_mode
def _angles_at(
    places: Runs,
    count: int,
    half: int,
    base: float,
    scaling: tuple[Any, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines at runs of positions."""
    cos, sin = _angles(count, half, base, scaling, dtype, device)
    return take_runs(cos, 0, places), take_runs(sin, 0, places)


@kernel
def rope(
    x: Tensor,
    start: Places,
    base: float,
    inverse: bool,
    order: Sequence[int],
    scaling: tuple[Any, ...] | None = None,
    length: int = 0,
    interleaved: bool = False,
    turned: int = 0,
) -> Tensor:
    """Rotate the halves of the last axis by the position along the second to last, which begins at `start` or has runs
    of positions; of the table, the first `length` positions are made at once. `order` permutes the result. If
    `interleaved`, neighbours are pairs; with `turned`, so many are rotated and the others stay.

    What attention reads is in its order in memory, of heads before positions; what is turned back, in that of the
    result, since products read it as a matrix.
    """
    if interleaved or turned:
        first = x[..., :turned] if turned else x
        if interleaved:
            first = first.unflatten(-1, (-1, 2)).mT.flatten(-2)  # type: ignore[no-untyped-call]
        first = rope(first, start, base, inverse, range(x.dim()), scaling, length)
        if interleaved:
            first = _halves(first).mT.flatten(-2)
        whole = torch.cat((first, x[..., turned:]), -1) if turned else first
        return whole.permute(*order).contiguous() if inverse else whole.permute(*order)
    half = x.shape[-1] // 2
    if by_complex(x):
        return _turned(
            x, _turns(start, x.shape[-2], half, base, scaling, length, x.dtype, x.device, inverse), order, inverse
        )
    if isinstance(start, int):
        end = start + x.shape[-2]
        cos, sin = _angles(max(end, length), half, base, scaling, x.dtype, x.device)
        cos, sin = cos[start:end], sin[start:end]
    else:
        cos, sin = _angles_at(start, length, half, base, scaling, x.dtype, x.device)
    a, b = widened(x[..., :half]), widened(x[..., half:])
    halves = (a * cos + b * sin, b * cos - a * sin) if inverse else (a * cos - b * sin, b * cos + a * sin)
    if not inverse:
        return torch.cat(halves, -1).to(x.dtype).permute(*order)
    if is_tracing():  # what is written through a view there keeps the order in memory in which it was made
        return torch.cat(halves, -1).to(x.dtype).permute(*order).contiguous()
    result = halves[0].new_empty([x.shape[i] for i in order])
    torch.cat(halves, -1, out=result.permute(_back(order)))
    return result.to(x.dtype)


@kernel
@in_f64("angles of positions that are given")
def rope_at(
    x: Tensor,
    positions: Tensor,
    base: float,
    inverse: bool,
    scaling: tuple[Any, ...] | None = None,
    interleaved: bool = False,
    turned: int = 0,
    sections: Sequence[int] = (),
) -> Tensor:
    """As `rope`, by positions that are broadcast against all axes of x but the last; with `sections` they have a last
    axis, and each turns so many pairs.
    """
    first = x[..., :turned] if turned else x
    half = first.shape[-1] // 2
    rate, factor = _rates(half, base, scaling, x.device)
    at = (
        torch.cat([positions[..., i : i + 1].expand(*positions.shape[:-1], n) for i, n in enumerate(sections)], -1)
        if (sections)
        else positions.unsqueeze(-1)
    )
    angle = at * rate
    wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    cos, sin = (angle.cos() * factor).to(wide), (angle.sin() * (-factor if inverse else factor)).to(wide)
    pairs = (first[..., 0::2], first[..., 1::2]) if interleaved else (first[..., :half], first[..., half:])
    a, b = map(widened, pairs)
    halves = a * cos - b * sin, b * cos + a * sin
    whole = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat((whole.to(x.dtype), x[..., turned:]), -1) if turned else whole.to(x.dtype)


def _back(order: Sequence[int]) -> list[int]:
    """The order that undoes one."""
    return sorted(range(len(order)), key=order.__getitem__)


def by_complex(x: Tensor) -> bool:
    """Whether pairs are turned as complex numbers: on a GPU, where each pass over memory is a kernel."""
    return x.is_cuda and not is_tracing()


@lru_cache(maxsize=32)
def _turns(
    start: Places,
    size: int,
    half: int,
    base: float,
    scaling: tuple[Any, ...] | None,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    inverse: bool,
) -> Tensor:
    """Cosines and sines at `size` positions as complex numbers; of those others are kept nowhere."""
    count = length if not isinstance(start, int) else max(start + size, length)
    places = start if not isinstance(start, int) else ((start, size),)
    cos, sin = (take_runs(x, 0, places) for x in _angles.__wrapped__(count, half, base, scaling, dtype, device))
    return torch.complex(cos, -sin if inverse else sin)


def _halves(x: Tensor) -> Tensor:
    """The halves of the last axis as an axis: a view."""
    halves: Tensor = x.unflatten(-1, (2, -1))  # type: ignore[no-untyped-call]
    return halves


def _turned(x: Tensor, turns: Tensor, order: Sequence[int], inverse: bool) -> Tensor:
    """In three passes: pairs side by side in the dtype of accumulation, turned, and back in halves."""
    pairs = x.new_empty((*x.shape[:-1], turns.shape[-1], 2), dtype=turns.real.dtype)
    pairs.copy_(_halves(x).mT)
    torch.view_as_complex(pairs).mul_(turns)
    result = x.new_empty([x.shape[i] for i in order] if inverse else x.shape)
    _halves(result.permute(_back(order)) if inverse else result).copy_(pairs.mT)
    return result if inverse else result.permute(*order)


# Multipliers of MurmurHash3's 64-bit finalizer (Appleby) and of a Weyl sequence, as signed integers.
_MIX = (-0x00AE502812AA7333, -0x3B314601E57A13AD, -0x61C8864680B583EB)


def _fold(x: Tensor) -> None:
    high = x >> 33
    high &= 0x7FFFFFFF
    x ^= high


def _mixed(x: Tensor) -> Tensor:
    """An elementwise bijective hash of 64-bit integers, in place."""
    for multiplier in _MIX[:2]:
        _fold(x)
        x *= multiplier
    _fold(x)
    return x


def _scalar_mixed(*numbers: int) -> int:
    """One 64-bit key from several integers."""
    key = 0
    for number in numbers:
        key = (key ^ (number & (2**64 - 1))) * 0x9E3779B97F4A7C15 & (2**64 - 1)
        key ^= key >> 29
    return key - 2**64 if key >= 2**63 else key


@kernel
@in_f64("53 bits of a hash make a number")
def random(
    c: Any,
    distribution: str,
    scale: float,
    key: int,
    shape: Sequence[int],
    starts: Sequence[Places],
    whole: Sequence[int],
    dtype: str,
) -> Tensor:
    """Random numbers by a hash of (seed, step, key, coordinates): the region `shape` of `whole`, which
    along each axis begins at its place in `starts` or has runs of positions.
    """
    index = _numbered(shape, starts, whole, c.device)
    stream = _scalar_mixed(c.seed, c.step, key)

    def word(number: int) -> Tensor:
        """53 bits of a word of each element. As all that follows in place: `random_bytes` counts what lives at once."""
        bits = index.expand(tuple(shape)) * 2
        bits += number
        bits *= _MIX[2]
        bits += stream
        bits = _mixed(bits)
        bits >>= 11
        bits &= 2**53 - 1
        return bits.to(torch.float64)

    # 53 bits make a double in [0, 1).
    unit = word(1).mul_(2.0**-53)
    if distribution == "keep":
        return unit >= scale
    if distribution == "uniform":
        return unit.mul_(2).sub_(1).mul_(scale).to(DTYPES[dtype])
    if distribution == "integers":
        return unit.mul_(scale).floor_().to(DTYPES[dtype])
    if distribution == "gumbel":
        return unit.add_(2.0**-54).log_().neg_().log_().neg_().to(DTYPES[dtype])
    assert distribution == "normal", distribution
    angle = word(2).mul_(2.0**-53 * 2 * torch.pi)
    radius = unit.neg_().log1p_().mul_(-2).sqrt_()
    return radius.mul_(angle.cos_()).mul_(scale).to(DTYPES[dtype])


def _numbered(shape: Sequence[int], starts: Sequence[Places], whole: Sequence[int], device: torch.device) -> Tensor:
    """The numbers of the elements of a region among those of the whole tensor."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for position, (size, start, extent) in enumerate(zip(shape, starts, whole, strict=True)):
        if isinstance(start, int):
            coordinate = torch.arange(start, start + size, device=device)
        else:
            coordinate = positions(start, device)
        view = [1] * len(shape)
        view[position] = size
        index = index * extent + coordinate.view(view)
    return index
