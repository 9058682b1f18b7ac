"""Attention by the library, on [B, H, position, along], of few keys: torch's kernel, which goes over keys in blocks, is
made for many.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int64
from functools import lru_cache

import torch
from attrs import frozen
from torch import Tensor

from partita.runtime.kernels.compiling import is_tracing
from partita.runtime.kernels.native.library import library

MAX_KEYS = 1024
_Shape = c_int64 * (6 + 9 * 3)  # `struct Shape`


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    """Attended values, with the heads of a position next to each other in memory, and the logarithms of the
    denominators; None if the library does not apply.
    """
    call = _call_of((q, k, v), causal)
    if call is None:
        return None
    o, denominator = q.new_empty_strided(q.shape, call.queries), q.new_empty(q.shape[:3])
    library().attend(o.data_ptr(), denominator.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), call.shape, scale)
    return o, denominator


def gradients(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, denominator: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of queries, keys and values, which lie as attended values do; None if the library does not apply."""
    call = _call_of((q, k, v, o, denominator, d), causal)
    if call is None:
        return None
    dq = q.new_empty_strided(q.shape, call.queries)
    dk, dv = q.new_empty_strided(k.shape, call.keys), q.new_empty_strided(k.shape, call.keys)
    library().attend_gradient(
        dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(),
        denominator.data_ptr(), d.data_ptr(), call.shape, scale,
    )  # fmt: skip
    return dq, dk, dv


def _call_of(tensors: tuple[Tensor, ...], causal: bool) -> _Call | None:
    """A call for queries, keys, values and, for gradients, results; None if the library does not apply to them."""
    one = tensors[0]  # they are of one dtype, and lie in one memory
    if type(one) is not Tensor or one.dtype != torch.float32 or not one.is_cpu or is_tracing():
        return None
    q, k, v = (x.shape for x in tensors[:3])
    # However few heads there are for the threads, which take whole ones: layouts split heads, and are to change no bit.
    if k[2] > MAX_KEYS or library() is None:
        return None
    return _call(q, k, v, causal, *[x.stride() for x in tensors])


@frozen
class _Call:
    """The shapes that a call is given, and the strides of results that have queries' and keys' positions."""

    shape: Array[c_int64]
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@lru_cache(maxsize=1024)
def _call(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], causal: bool, *strides: tuple[int, ...]
) -> _Call | None:
    """A call for operands of these shapes and strides, for gradients with the results'; None if rows differ in length,
    or heads in number, or if a row's elements are apart.
    """
    batch, heads, queries, size = q
    keys = k[2]
    if k != v or k != (batch, heads, keys, size) or any(len(each) == 4 and each[3] != 1 for each in strides):
        return None
    of_queries, of_keys = (_across(count, heads, size) for count in (queries, keys))
    listed = list(strides)
    if len(strides) == 3:  # the attended values, and the denominators of contiguous rows
        listed += [of_queries, (heads * queries, queries, 1)]
    else:
        listed += [of_queries, of_keys, of_keys]
    return _Call(_Shape(batch, heads, queries, keys, size, causal, *_flat(listed)), of_queries, of_keys)


def _flat(strides: Sequence[tuple[int, ...]]) -> list[int]:
    """Those of batch, head and position."""
    return [each for own in strides for each in own[:3]]


def _across(positions: int, heads: int, size: int) -> tuple[int, ...]:
    """Strides of [B, H, position, along] in the order of [B, position, H, along]."""
    return positions * heads * size, size, heads * size, 1
