"""Mixtures of experts: choices, products with the matrix that an index names, and slots of static size.

Shapes never depend on the choices. Results do not depend on the order in which a device adds: each row of a product is
one sum, and no two rows go to one slot.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from partita.runtime.declared import waits
from partita.runtime.kernels.compiling import is_tracing
from partita.runtime.kernels.products import add_matmul, by_onednn, matmul, matmul_into
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


@kernel
def row_order(
    ids: Tensor, rows: tuple[int, ...], experts: int, start: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows in the order of their experts, the place of each in that order, and where those of each expert end.

    ids [rows…] have size 1 along rows that they lack. `start` is given if ids may be outside: the first expert; rows of
    others come last.
    """
    return _order(_index(ids, experts, start), rows, experts)


def _index(ids: Tensor, experts: int, start: int | None, none: int | None = None) -> Tensor:
    """Numbers of experts, from `start` on; `none`, or the number of experts, for those outside."""
    index = ids.long()
    if start is None:
        return index
    index = index - start
    return index.masked_fill_((index < 0) | (index >= experts), experts if none is None else none)


def _order(index: Tensor, rows: tuple[int, ...], count: int) -> tuple[Tensor, Tensor, Tensor]:
    # A GPU sorts eight bits at a time.
    narrow = torch.int16 if count <= torch.iinfo(torch.int16).max else torch.int64
    grouped, order = index.expand(rows).reshape(-1).to(narrow).sort(dim=-1, stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(count, dtype=narrow, device=order.device)
    return order, places, torch.searchsorted(grouped, numbers, right=True, out_int32=True)


@kernel
def take_rows(x: Tensor, order: Tensor, rows: tuple[int, ...]) -> Tensor:
    """[rows…, rest…] with the rows in an order, one after the other; x has size 1 along rows that it lacks."""
    own, rest = x.shape[: len(rows)], x.shape[len(rows) :]
    flat = x.reshape(prod(own), *rest)
    inner = prod(rows) // max(1, len(flat))
    if own == rows:
        return flat.index_select(0, order)
    if prod(rows[next(i for i in range(len(rows)) if own[i] < rows[i]) :]) == inner:
        own_rows = torch.div(order, inner, rounding_mode="trunc")  # a row is repeated along the innermost axes
        return flat.index_select(0, own_rows)
    sources = torch.arange(len(flat), device=x.device).view(own).expand(rows).reshape(-1)
    return flat.index_select(0, sources.index_select(0, order))


@kernel
def combine_rows(x: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """For each row of `places` [rows, several] the sum of x's rows there, times `weights` [rows, several] if given."""
    flat = x.reshape(len(x), -1)
    if is_tracing():
        gathered = flat.index_select(0, places.reshape(-1)).view(*places.shape, -1)
        total = (gathered if weights is None else gathered * weights.unsqueeze(-1)).sum(1)
    else:
        total = torch.nn.functional.embedding_bag(places, flat, mode="sum", per_sample_weights=weights)
    return total.view(len(places), *x.shape[1:])


def _by_grouped_product(x: Tensor, w: Tensor) -> bool:
    """Whether torch's grouped product is the fastest that applies: of its own dtypes, with rows of 16 bytes.

    On a GPU it is one kernel; on a CPU a loop over the matrices, as ours is, in C++.
    """
    aligned = all(size * w.element_size() % 16 == 0 for size in w.shape[-2:])
    return aligned and (x.dtype == torch.bfloat16 or (x.is_cpu and x.dtype == torch.float32 and not by_onednn(x)))


@waits("a GPU has a grouped product of bf16 alone: for others the host goes through the matrices")
def _counts(ends: Tensor) -> tuple[list[int], int]:
    """How many rows each matrix has, and all."""
    bounds = ends.tolist()
    return [end - begin for begin, end in pairwise([0, *bounds])], bounds[-1]


def _grouped_dot(x: Tensor, w: Tensor, ends: Tensor, partial: bool) -> Tensor:
    if _by_grouped_product(x, w):
        result = torch.nn.functional.grouped_mm(x, w, offs=ends)
        if partial:
            nobody = torch.arange(len(x), device=x.device) >= ends[-1]
            result.masked_fill_(nobody.unsqueeze(-1), 0)
        return result
    counts, row_count = _counts(ends)
    result = x.new_empty(len(x), w.shape[-1])
    result[row_count:] = 0
    parts = (each[:row_count].split_with_sizes(counts) for each in (x, result))
    for rows, out, matrix in zip(*parts, w.unbind(), strict=True):
        if len(rows):
            matmul_into(out, rows, matrix)
    return result


def _add_grouped(total: Tensor, x: Tensor, d: Tensor, ends: Tensor) -> Tensor:
    stacked = total.view(len(total), x.shape[-1], d.shape[-1])
    if x.is_cuda and _by_grouped_product(x, stacked):
        stacked.add_(torch.nn.functional.grouped_mm(x.t(), d, offs=ends))
        return total
    counts, row_count = _counts(ends)
    lefts, rights = x[:row_count].t().split_with_sizes(counts, 1), d[:row_count].split_with_sizes(counts)
    for matrix, left, right in zip(stacked.unbind(), lefts, rights, strict=True):
        if not len(right):
            continue
        if matrix.dtype == left.dtype:
            add_matmul(matrix, left, right)
        else:
            matrix.add_(matmul(left, right))
    return total


# What Inductor sees of them: shapes, not the loop over the experts, whose bounds are data.
_make_library: Any = torch.library.Library
_library = _make_library("partita", "FRAGMENT")
_library.define("grouped_dot(Tensor x, Tensor w, Tensor ends, bool partial) -> Tensor")
_library.define("grouped_outer(Tensor x, Tensor d, Tensor ends) -> Tensor")
_library.impl("grouped_dot", _grouped_dot, "CompositeExplicitAutograd")
_library.impl(
    "grouped_outer",
    lambda x, d, ends: _add_grouped(x.new_zeros(len(ends), x.shape[-1], d.shape[-1]), x, d, ends),
    "CompositeExplicitAutograd",
)
_library._register_fake("grouped_dot", lambda x, w, ends, partial: x.new_empty(len(x), w.shape[-1]))
_library._register_fake("grouped_outer", lambda x, d, ends: x.new_empty(len(ends), x.shape[-1], d.shape[-1]))


@kernel
def grouped_dot(x: Tensor, w: Tensor, ends: Tensor, partial: bool = False) -> Tensor:
    """[rows, depth] in the order of their experts times these' matrices [experts, depth, columns]: [rows, columns].

    `ends` [experts] has where the rows of each expert end. With `partial` rows may follow, which yield zeros.
    """
    if is_tracing():
        return cast(Tensor, torch.ops.partita.grouped_dot(x, w, ends, partial))
    return _grouped_dot(x, w, ends, partial)


@kernel
def add_grouped(total: Tensor, x: Tensor, d: Tensor, ends: Tensor) -> Tensor:
    """Add products of the rows of x [rows, depth] and d [rows, columns] of each expert to its matrix in `total`
    [experts, depth…, columns…], in place. Otherwise as `grouped_dot`.
    """
    if is_tracing():
        return total.add_(torch.ops.partita.grouped_outer(x, d, ends).view(total.shape))
    return _add_grouped(total, x, d, ends)


def _by_expert(
    rows: tuple[int, ...], ids: Tensor, matrices: tuple[int, ...], shared: int, start: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `row_order`, of the matrices of all shared axes."""
    experts, count = matrices[shared], prod(matrices[: shared + 1])
    index = _index(ids, experts, start, count)
    if shared:
        first = torch.arange(0, count, experts, device=ids.device)
        index = index + first.view((*matrices[:shared], *[1] * (ids.dim() - shared)))
    return _order(index if start is None else index.clamp(max=count), rows, count)


@kernel
def routed_dot(x: Tensor, w: Tensor, ids: Tensor, shared: int, start: int | None = None) -> Tensor:
    """[rows…, depth] times the matrices of [shared…, experts, depth, columns] that ids [rows…] name: [rows…, columns].

    The shared axes are the first of the rows. x and ids have size 1 along rows that they lack. `start` is given if `w`
    is a shard: the index of its first expert; rows of other shards are zeros.
    """
    rows = _broadcast(x.shape[:-1], ids.shape)
    order, places, ends = _by_expert(rows, ids, tuple(w.shape), shared, start)
    result = grouped_dot(take_rows(x, order, rows), w.reshape(-1, *w.shape[-2:]), ends, start is not None)
    return result.index_select(0, places).view(*rows, w.shape[-1])


@kernel
def add_routed(total: Tensor, x: Tensor, ids: Tensor, d: Tensor, shared: int, start: int | None = None) -> Tensor:
    """Add products of the rows of x [rows…, depth] and d [rows…, columns] of each expert to its matrix in `total`
    [shared…, experts, depth…, columns…], in place. Otherwise as `routed_dot`.
    """
    rows = _broadcast(x.shape[:-1], ids.shape, d.shape[:-1])
    order, _, ends = _by_expert(rows, ids, (*total.shape[: shared + 1],), shared, start)
    left, right = (take_rows(each, order, rows) for each in (x, d))
    add_grouped(total.view(len(ends), left.shape[-1], right.shape[-1]), left, right, ends)
    return total


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
    rows = lookup(filled[:, :-1], x.reshape(count, -1, x.shape[-1]), 1, 0)
    return rows.view(*ids.shape[:shared], experts[1], places[1], x.shape[-1])


@kernel
def collect(
    y: Tensor, ids: Tensor, slots: Tensor, shared: int, experts: tuple[int, int], places: tuple[int, int]
) -> Tensor:
    """For each id the row of [shared…, experts, places, rest] in its slot, or zeros: [shared…, own…, rest]."""
    count = prod(ids.shape[:shared])
    place = _places(ids, slots, experts, places).reshape(count, -1)
    rows = lookup(place, y.reshape(count, -1, y.shape[-1]), 1, 0)
    return rows.view(*ids.shape, y.shape[-1])


@kernel
def load(ids: Tensor, shared: int, experts: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """How often each expert from `start` on occurs in [shared…, own…]: [shared…, experts]."""
    index = ids.long().reshape(*ids.shape[:shared], -1) - start
    index = torch.where((index < 0) | (index >= experts), experts, index)
    counts = torch.zeros((*ids.shape[:shared], experts + 1), dtype=dtype, device=ids.device)
    return counts.scatter_add_(-1, index, torch.ones_like(index, dtype=dtype))[..., :-1].clone()
