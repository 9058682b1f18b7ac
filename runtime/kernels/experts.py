"""Mixtures of experts: choices, products with the matrix that an index names, and slots of static size.

Shapes never depend on the choices. Results do not depend on the order in which a device adds: each row of a product is
one sum, and no two rows go to one slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from partita.runtime.kernels.compiling import is_tracing
from partita.runtime.kernels.products import add_matmul, matmul, matmul_into
from partita.runtime.kernels.registry import kernel
from partita.runtime.kernels.rows import lookup

_broadcast: Any = torch.broadcast_shapes


@kernel
def top_k(x: Tensor, count: int) -> Tensor:
    """The indices of the `count` greatest elements along the last axis, greatest first; of equal ones the first.

    torch.topk leaves open which of equal elements it takes, and takes others on other devices.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


# ---------------------------------------------------------------- products


def _by_expert(
    rows: torch.Size, ids: Tensor, matrices: tuple[int, ...], shared: int, start: int | None
) -> tuple[Tensor, Tensor]:
    """The rows in the order of their matrices, and where the rows of each matrix end. Rows of no matrix come last."""
    experts, count = matrices[shared], prod(matrices[: shared + 1])
    index = ids.long()
    if start is not None:
        index = index - start
        outside = (index < 0) | (index >= experts)
    if shared:
        first = torch.arange(0, count, experts, device=ids.device)
        index = index + first.view((*matrices[:shared], *[1] * (ids.dim() - shared)))
    if start is not None:
        index = index.masked_fill(outside, count)
    grouped, order = index.expand(rows).reshape(-1).sort(dim=-1, stable=True)
    return order, torch.searchsorted(grouped, torch.arange(count, device=ids.device), right=True)


def _sources(x: Tensor, rows: torch.Size, order: Tensor) -> Tensor:
    """Which row of x, flattened, each of [rows…] in an order is; x has size 1 along axes of the rows that it lacks."""
    own = x.shape[:-1]
    if own == rows:
        return order
    return torch.arange(prod(own), device=x.device).view(own).expand(rows).reshape(-1).index_select(0, order)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _segments(stacked: Tensor, ends: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Each matrix that has rows, and which these are."""
    begin = 0
    for matrix, end in zip(stacked, ends.tolist(), strict=True):
        if end > begin:
            yield matrix, slice(begin, end)
            begin = end


def _by_grouped_product(x: Tensor, w: Tensor) -> bool:
    """Whether torch's grouped product applies, whose rows of 16 bytes are aligned."""
    return x.is_cuda and x.dtype == torch.bfloat16 and w.shape[-1] % 8 == 0 and w.shape[-2] % 8 == 0


def _routed_dot(x: Tensor, w: Tensor, ids: Tensor, shared: int, start: int | None) -> Tensor:
    rows = _broadcast(x.shape[:-1], ids.shape)
    order, ends = _by_expert(rows, ids, tuple(w.shape), shared, start)
    stacked, flat, sources = w.reshape(-1, *w.shape[-2:]), _flat(x), _sources(x, rows, order)
    if _by_grouped_product(flat, stacked):
        made = torch.nn.functional.grouped_mm(flat.index_select(0, sources), stacked, offs=ends.int())
        if start is not None:
            nobody = torch.arange(len(order), device=x.device) >= ends[-1]
            made = made.masked_fill(nobody.unsqueeze(-1), 0)
    else:
        # Only the rows of one expert are taken at a time: these stay in cache until they are multiplied.
        made, done = x.new_empty(len(order), w.shape[-1]), 0
        for matrix, own in _segments(stacked, ends):
            matmul_into(made[own], flat.index_select(0, sources[own]), matrix)
            done = own.stop
        made[done:] = 0
    # Rows are copied in the order in which they are written, which is far quicker than to write them in any order.
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return made.index_select(0, places).view(*rows, w.shape[-1])


def _add_routed(total: Tensor, x: Tensor, ids: Tensor, d: Tensor, shared: int, start: int | None) -> Tensor:
    rows = _broadcast(x.shape[:-1], ids.shape, d.shape[:-1])
    order, ends = _by_expert(rows, ids, (*total.shape[: shared + 1],), shared, start)
    (left, lefts), (right, rights) = ((_flat(each), _sources(each, rows, order)) for each in (x, d))
    stacked = total.view(-1, left.shape[-1], right.shape[-1])
    if _by_grouped_product(left, stacked):
        a, b = left.index_select(0, lefts), right.index_select(0, rights)
        stacked.add_(torch.nn.functional.grouped_mm(a.t(), b, offs=ends.int()))
        return total
    for matrix, own in _segments(stacked, ends):
        a, b = left.index_select(0, lefts[own]).t(), right.index_select(0, rights[own])
        if matrix.dtype == a.dtype:
            add_matmul(matrix, a, b)
        else:
            matrix.add_(matmul(a, b))
    return total


# What Inductor sees of them: shapes, not the loop over the experts, whose bounds are data.
_make_library: Any = torch.library.Library
_library = _make_library("partita", "FRAGMENT")
_library.define("routed_dot(Tensor x, Tensor w, Tensor ids, int shared, int? start) -> Tensor")
_library.define("routed_outer(Tensor x, Tensor ids, Tensor d, int[] shape, int shared, int? start) -> Tensor")
_library.impl("routed_dot", _routed_dot, "CompositeExplicitAutograd")
_library.impl(
    "routed_outer",
    lambda x, ids, d, shape, shared, start: _add_routed(x.new_zeros(shape), x, ids, d, shared, start),
    "CompositeExplicitAutograd",
)
_library._register_fake(
    "routed_dot",
    lambda x, w, ids, shared, start: x.new_empty(*_broadcast(x.shape[:-1], ids.shape), w.shape[-1]),
)
_library._register_fake("routed_outer", lambda x, ids, d, shape, shared, start: x.new_empty(shape))


@kernel
def routed_dot(x: Tensor, w: Tensor, ids: Tensor, shared: int, start: int | None = None) -> Tensor:
    """[rows…, depth] times the matrices of [shared…, experts, depth, columns] that ids [rows…] name: [rows…, columns].

    The shared axes are the first of the rows. x and ids have size 1 along rows that they lack. `start` is given if `w`
    is a shard: the index of its first expert; rows of other shards are zeros.
    """
    if is_tracing():
        return cast(Tensor, torch.ops.partita.routed_dot(x, w, ids, shared, start))
    return _routed_dot(x, w, ids, shared, start)


@kernel
def add_routed(total: Tensor, x: Tensor, ids: Tensor, d: Tensor, shared: int, start: int | None = None) -> Tensor:
    """Add products of the rows of x [rows…, depth] and d [rows…, columns] of each expert to its matrix in `total`
    [shared…, experts, depth…, columns…], in place. Otherwise as `routed_dot`.
    """
    if is_tracing():
        return total.add_(torch.ops.partita.routed_outer(x, ids, d, total.shape, shared, start))
    return _add_routed(total, x, ids, d, shared, start)


# ---------------------------------------------------------------- slots


@kernel
def slot_index(ids: Tensor) -> Tensor:
    """For each id along the last axis how many equal ones come before it."""
    ordered, order = ids.long().contiguous().sort(dim=-1, stable=True)
    here = torch.arange(ids.shape[-1], device=ids.device)
    return torch.empty_like(order).scatter_(-1, order, here - torch.searchsorted(ordered, ordered))


def _places(ids: Tensor, slots: Tensor, experts: tuple[int, int], places: tuple[int, int]) -> Tensor:
    """The place expert · places + slot in a shard; −1 for what has none. Both give the shard's first index and size."""
    expert, slot = ids.long() - experts[0], slots - places[0]
    inside = (expert >= 0) & (expert < experts[1]) & (slot >= 0) & (slot < places[1])
    return torch.where(inside, expert * places[1] + slot, -1)


@kernel
def dispatch(
    x: Tensor, ids: Tensor, slots: Tensor, shared: int, experts: tuple[int, int], places: tuple[int, int]
) -> Tensor:
    """Rows of [shared…, own…, rest] in the slots that they have, zeros in empty ones: [shared…, experts, places, rest].

    x has size 1 along own axes that it lacks. `experts` and `places` are the first index and the size of a shard.
    """
    own = ids.shape[shared:]
    count, slot_count = prod(ids.shape[:shared]), experts[1] * places[1]
    place = _places(ids, slots, experts, places).reshape(count, -1)
    place = torch.where(place < 0, slot_count, place)
    source = torch.arange(prod(x.shape[shared:-1]), device=x.device).view(x.shape[shared:-1]).expand(own)
    filled = place.new_full((count, slot_count + 1), -1)
    filled.scatter_(1, place, source.reshape(-1).expand(count, -1))
    found = lookup(filled[:, :-1], x.reshape(count, -1, x.shape[-1]), 1, 0)
    return found.view(*ids.shape[:shared], experts[1], places[1], x.shape[-1])


@kernel
def collect(
    y: Tensor, ids: Tensor, slots: Tensor, shared: int, experts: tuple[int, int], places: tuple[int, int]
) -> Tensor:
    """For each id the row of [shared…, experts, places, rest] in its slot, or zeros: [shared…, own…, rest]."""
    count = prod(ids.shape[:shared])
    place = _places(ids, slots, experts, places).reshape(count, -1)
    found = lookup(place, y.reshape(count, -1, y.shape[-1]), 1, 0)
    return found.view(*ids.shape, y.shape[-1])


@kernel
def load(ids: Tensor, shared: int, experts: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """How often each expert from `start` on occurs in [shared…, own…]: [shared…, experts]."""
    index = ids.long().reshape(*ids.shape[:shared], -1) - start
    index = torch.where((index < 0) | (index >= experts), experts, index)
    counts = torch.zeros((*ids.shape[:shared], experts + 1), dtype=dtype, device=ids.device)
    return counts.scatter_add_(-1, index, torch.ones_like(index, dtype=dtype))[..., :-1]
