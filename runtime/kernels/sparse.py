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
    head, width = ids.shape[:shared], rows * blocks
    ids = ids.long() - start * rows
    inside = (ids >= 0) & (ids < width)
    tables = torch.arange(prod(head), device=ids.device).view(*head, *[1] * (ids.dim() - shared))
    if sources is not None:
        shape = [1] * ids.dim()
        shape[along] = -1
        parts = torch.arange(sources, device=ids.device).repeat_interleave(ids.shape[along] // sources)
        tables = tables + parts.view(shape) * prod(head)
        head = torch.Size((sources, *head))
    keys = (tables * width + ids)[inside]
    return _summed(keys, values[inside], (*head, blocks), rows, count)


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


def _summed(keys: Tensor, values: Tensor, head: Sequence[int], rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Values by distinct key, which is the number of a group, times `rows`, and an id in it."""
    distinct, places = torch.unique(keys, return_inverse=True)
    groups = torch.div(distinct, rows, rounding_mode="floor")
    sizes = torch.bincount(groups, minlength=prod(head))
    first = sizes.cumsum(0) - sizes
    slots = groups * count + torch.arange(len(distinct), device=keys.device) - first[groups]
    ids = keys.new_full((prod(head) * count,), -1)
    ids[slots] = distinct - groups * rows
    rest = values.shape[1:]
    sums = values.new_zeros(prod(head) * count, *rest)
    # On a CPU the one adds in order; on a GPU the other does, as it sorts.
    if sums.is_cpu:
        sums.index_add_(0, slots[places], values)
    else:
        sums.index_put_((slots[places],), values, accumulate=True)
    return ids.view(*head, count), sums.view(*head, count, *rest)


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
