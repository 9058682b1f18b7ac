"""Gradients of tables by the rows that are looked up, and updates of these rows (`partita.compiler.ops.sparse`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from partita.runtime.kernels.registry import kernel


@kernel
def coalesce(
    ids: Tensor,
    values: Tensor,
    shared: int,
    rows: int,
    start: int,
    blocks: int,
    count: int,
    sources: int | None = None,
    along: int = 0,
) -> tuple[Tensor, Tensor]:
    """The distinct ids of `blocks` blocks of so many rows, from block `start` on, and the sums of their values.

    From ids [shared…, own…] and values [shared…, own…, rest…]: ids [shared…, blocks, count], from the beginning of
    their block, and values [shared…, blocks, count, rest…]; −1 and zeros for those that there are not. With `sources`,
    for each of so many parts along a dimension of the ids, which are a dimension before the others.
    """
    keys, inside, head = _keys(ids, shared, rows, start, blocks, sources, along)
    return _summed(keys, values[inside], head, rows, count)


@kernel
def distinct_ids(
    ids: Tensor, shared: int, rows: int, blocks: int, count: int, sources: int, along: int, back: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The ids of `coalesce`, and for each id [shared…, own…] the number of its entry in blocks × count of its source,
    −1 if it is outside; `back` permutes the latter.
    """
    keys, inside, head = _keys(ids, shared, rows, 0, blocks, sources, along)
    found, slots = _slots(keys, head, rows, count)
    places = torch.full(ids.shape, -1, device=ids.device)
    places[inside] = slots % (blocks * count)
    return found, places.permute(back)


@kernel
def look_up_entries(ids: Tensor, table: Tensor, shared: int) -> Tensor:
    """Rows of a table [shared…, rows, rest…] at ids [sources, shared…, blocks, entries], which count from the beginning
    of their block; zeros at −1.
    """
    place = (ids >= 0).nonzero(as_tuple=True)
    rows = ids[place] + place[shared + 1] * (table.shape[shared] // ids.shape[shared + 1])
    found = table.new_zeros(*ids.shape, *table.shape[shared + 1 :])
    found[place] = table[(*place[1 : shared + 1], rows)]
    return found


@kernel
def take_entries(rows: Tensor, places: Tensor, shared: int, along: int) -> Tensor:
    """Of rows [sources, shared…, blocks, entries, rest…], those at places [shared…, own…], whose dimension `along` has
    the parts of the sources one after the other; zeros at −1.
    """
    rest = rows.shape[shared + 3 :]
    listed = rows.reshape(*rows.shape[: shared + 1], -1, *rest)
    found = rows.new_zeros(*places.shape, *rest)
    inside = places >= 0
    index = inside.nonzero(as_tuple=True)
    source = torch.div(index[along], places.shape[along] // len(rows), rounding_mode="floor")
    found[inside] = listed[(source, *index[:shared], places[inside])]
    return found


def _keys(
    ids: Tensor, shared: int, rows: int, start: int, blocks: int, sources: int | None, along: int
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """For ids of some blocks: the number of a group, of an entry's source, table and block, times `rows`, and its place
    in the block; which ids these are; and the shape of the groups.
    """
    head, width = tuple(ids.shape[:shared]), rows * blocks
    ids = ids.long() - start * rows
    inside = (ids >= 0) & (ids < width)
    tables = torch.arange(prod(head), device=ids.device).view(*head, *[1] * (ids.dim() - shared))
    if sources is not None:
        shape = [1] * ids.dim()
        shape[along] = -1
        parts = torch.arange(sources, device=ids.device).repeat_interleave(ids.shape[along] // sources)
        tables = tables + parts.view(shape) * prod(head)
        head = (sources, *head)
    return (tables * width + ids)[inside], inside, (*head, blocks)


@kernel
def merge_rows(
    ids: Sequence[Tensor], values: Sequence[Tensor], shared: int, rows: int, count: int, sources: bool
) -> tuple[Tensor, Tensor]:
    """The sum of several gradients by rows: ids [sources…, shared…, blocks, entries] and values with `rest…` as well.

    Rows of one id are added in the order of the gradients, and in each of them in that of its sources.
    """
    keys, found = [], []
    head = ids[0].shape[sources : sources + shared + 1]
    for own, each in zip(ids, values, strict=True):
        inside = own >= 0
        groups = torch.arange(prod(head), device=own.device).view(*head, 1)
        keys.append((groups * rows + own)[inside])
        found.append(each[inside])
    return _summed(torch.cat(keys), torch.cat(found), head, rows, count)


def _slots(keys: Tensor, head: Sequence[int], rows: int, count: int) -> tuple[Tensor, Tensor]:
    """The ids of distinct keys by group, −1 for those that there are not, and the place of each key among all."""
    distinct, places = torch.unique(keys, return_inverse=True)
    groups = torch.div(distinct, rows, rounding_mode="floor")
    sizes = torch.bincount(groups, minlength=prod(head))
    first = sizes.cumsum(0) - sizes
    slots = groups * count + torch.arange(len(distinct), device=keys.device) - first[groups]
    ids = keys.new_full((prod(head) * count,), -1)
    ids[slots] = distinct - groups * rows
    return ids.view(*head, count), slots[places]


def _summed(keys: Tensor, values: Tensor, head: Sequence[int], rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Values by distinct key, which is the number of a group, times `rows`, and an id in it."""
    ids, slots = _slots(keys, head, rows, count)
    sums = values.new_zeros(ids.numel(), *values.shape[1:])
    # On a CPU the one adds in order; on a GPU the other does, as it sorts.
    if sums.is_cpu:
        sums.index_add_(0, slots, values)
    else:
        sums.index_put_((slots,), values, accumulate=True)
    return ids, sums.view(*ids.shape, *values.shape[1:])


@kernel
def update_rows(
    update: Callable[..., Any],
    ids: Tensor,
    tensors: Sequence[Tensor],
    orders: Sequence[tuple[int, ...]],
    count: int,
    shared: int,
) -> Tensor | tuple[Tensor, ...]:
    """Update rows of the first `count` tensors in place, and return these.

    In the order of dimensions given for each, they are [shared…, rows, rest…], and the others, which the update reads
    besides, [shared…, blocks, entries, rest…], as the ids are. `update` works in place on tensors [1…, n, rest…] of the
    n rows that have an id.
    """
    stored = [each.permute(order) for each, order in zip(tensors[:count], orders, strict=False)]
    given = [each.permute(order) for each, order in zip(tensors[count:], orders[count:], strict=True)]
    place = (ids >= 0).nonzero(as_tuple=True)
    rows = ids[place] + place[shared] * (stored[0].shape[shared] // ids.shape[shared])
    index = (*place[:shared], rows)
    own = [each[index] for each in stored]
    update(*(each.view((1,) * shared + each.shape) for each in (*own, *(each[place] for each in given))))
    for each, new in zip(stored, own, strict=True):
        each[index] = new
    return tensors[0] if count == 1 else tuple(tensors[:count])
