"""Gradients of tables by the rows that are looked up, and updates of these rows (`partita.compiler.ops.sparse`).

How many ids there are, and how many of them are distinct, is known to the device alone. On a CPU no work is done for
others. A GPU would have to stop for the host to be told; there entries without an id are gone through as well, and what
they make is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from partita.runtime.kernels.parts import owned
from partita.runtime.kernels.registry import kernel
from partita.runtime.kernels.rows import over_rows


def exact(x: Tensor) -> bool:
    """Whether entries without an id are left out: in the host's memory, where their number is known; not of a tensor
    that is a shape alone.
    """
    return x.is_cpu and type(x) is Tensor


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
    return _summed(keys, _kept(values, inside), head, rows, count)


@kernel
def distinct_ids(
    ids: Tensor, shared: int, rows: int, blocks: int, count: int, sources: int, along: int, back: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The ids of `coalesce`, and for each id [shared…, own…] the number of its entry in blocks × count of its source,
    −1 if it is outside; `back` permutes the latter.
    """
    keys, inside, head = _keys(ids, shared, rows, 0, blocks, sources, along)
    distinct, slots = _slots(keys, head, rows, count)
    places = _spread(slots % (blocks * count), inside, ids.new_full(ids.shape, -1, dtype=torch.int64))
    return distinct, places.permute(back)


@kernel
def look_up_entries(ids: Tensor, table: Tensor, shared: int) -> Tensor:
    """Rows of a table [shared…, rows, rest…] at ids [sources, shared…, blocks, entries], which count from the beginning
    of their block; zeros at −1.
    """
    valid = ids >= 0
    place = _places(valid)
    block = table.shape[shared] // ids.shape[shared + 1]
    rows = ids[place].clamp(min=0) + place[shared + 1] * block
    values = table[(*place[1 : shared + 1], rows)]
    return _spread(values, valid, table.new_zeros(*ids.shape, *table.shape[shared + 1 :]))


@kernel
def take_entries(rows: Tensor, places: Tensor, shared: int, along: int) -> Tensor:
    """Of rows [sources, shared…, blocks, entries, rest…], those at places [shared…, own…], whose dimension `along` has
    the parts of the sources one after the other; zeros at −1.
    """
    rest = rows.shape[shared + 3 :]
    listed = rows.reshape(*rows.shape[: shared + 1], -1, *rest)
    valid = places >= 0
    index = _places(valid)
    source = torch.div(index[along], places.shape[along] // len(rows), rounding_mode="floor")
    values = listed[(source, *index[:shared], places[index].clamp(min=0))]
    return _spread(values, valid, rows.new_zeros(*places.shape, *rest))


def _places(valid: Tensor) -> tuple[Tensor, ...]:
    """The coordinates of entries that are gone through: on a CPU lists of those that are there, on a GPU of all, which
    broadcast to each other.
    """
    if exact(valid):
        return valid.nonzero(as_tuple=True)
    positions = (torch.arange(size, device=valid.device) for size in valid.shape)
    return tuple(each.view(-1, *[1] * (valid.dim() - 1 - i)) for i, each in enumerate(positions))


def _kept(values: Tensor, inside: Tensor) -> Tensor:
    """Values [entries…, rest…] of the entries that are gone through: [n, rest…]."""
    return values[inside] if exact(inside) else values.flatten(0, inside.dim() - 1)


def _spread(values: Tensor, inside: Tensor, whole: Tensor) -> Tensor:
    """Values [n, rest…] of the entries that are gone through in their places in `whole`, where these are inside."""
    if exact(inside):
        whole[inside] = values
        return whole
    return torch.where(over_rows(inside, whole), values.view(whole.shape), whole)


def _keys(
    ids: Tensor, shared: int, rows: int, start: int, blocks: int, sources: int | None, along: int
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """For ids that are gone through: the number of a group, of an entry's source, table and block, times `rows`, and
    its place in the block; which ids are in some of the blocks; and the shape of the groups. Others are in a group
    behind all.
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
    return _of_groups(tables * width + ids, inside, (*head, blocks), rows), inside, (*head, blocks)


def _of_groups(keys: Tensor, inside: Tensor, head: Sequence[int], rows: int) -> Tensor:
    """The keys of entries that are gone through; those of others are in a group behind all."""
    return keys[inside] if exact(inside) else torch.where(inside, keys, prod(head) * rows).reshape(-1)


@kernel
def merge_rows(
    ids: Sequence[Tensor], values: Sequence[Tensor], shared: int, rows: int, count: int, sources: bool
) -> tuple[Tensor, Tensor]:
    """The sum of several gradients by rows: ids [sources…, shared…, blocks, entries] and values with `rest…` as well.

    Rows of one id are added in the order of the gradients, and in each of them in that of its sources.
    """
    keys, entries = [], []
    head = ids[0].shape[sources : sources + shared + 1]
    for own, each in zip(ids, values, strict=True):
        inside = own >= 0
        groups = torch.arange(prod(head), device=own.device).view(*head, 1)
        keys.append(_of_groups(groups * rows + own, inside, head, rows))
        entries.append(_kept(each, inside))
    return _summed(torch.cat(keys), torch.cat(entries), head, rows, count)


def _slots(keys: Tensor, head: Sequence[int], rows: int, count: int) -> tuple[Tensor, Tensor]:
    """The ids of distinct keys by group, −1 for those that there are not, and the place of each key among all; that of
    keys behind all groups is behind all, where there are any.
    """
    groups = prod(head)
    ordered, order = keys.sort(stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=new[1:])
    number = new.cumsum(0) - 1  # of each key among the distinct ones
    group = torch.div(ordered, rows, rounding_mode="floor")
    # The distinct keys before each group: of the first key that is not before it.
    starts = torch.searchsorted(ordered, torch.arange(groups + 1, device=keys.device) * rows)
    before = torch.cat((number, new.sum().view(1))).index_select(0, starts)
    slots = group * count + number - before.index_select(0, group)
    ids = keys.new_full((groups * count + _behind(keys, count),), -1).scatter_(0, slots, ordered - group * rows)
    places = torch.empty_like(slots).scatter_(0, order, slots)
    return owned(ids[: groups * count], ids).view(*head, count), places


def _behind(keys: Tensor, count: int) -> int:
    """The room for what belongs to no group, if that is gone through."""
    return 0 if exact(keys) else count


def _summed(keys: Tensor, values: Tensor, head: Sequence[int], rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Values by distinct key, which is the number of a group, times `rows`, and an id in it. No caller holds them."""
    ids, slots = _slots(keys, head, rows, count)
    sums = values.new_zeros(ids.numel() + _behind(keys, count), *values.shape[1:])
    # On a CPU the one adds in order; on a GPU the other does, as it sorts.
    if sums.is_cpu:
        sums.index_add_(0, slots, values)
    else:
        sums.index_put_((slots,), values, accumulate=True)
    del slots, values
    return ids, owned(sums[: ids.numel()], sums).view(*ids.shape, *sums.shape[1:])


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
    operands = [each.permute(order) for each, order in zip(tensors[count:], orders[count:], strict=True)]
    valid = ids >= 0
    operands = [_kept(_filled(each, valid), valid) for each in operands]
    place = _places(valid)
    rows = _filled(ids, valid)[place].clamp(min=0) + place[shared] * (stored[0].shape[shared] // ids.shape[shared])
    index, lead = (*place[:shared], rows), (1,) * shared
    own = [each[index].flatten(0, rows.dim() - 1) for each in stored]
    update(*(each.view(lead + each.shape) for each in (*own, *operands)))
    del operands
    for each, new in zip(stored, own, strict=True):
        if not exact(valid):  # what belongs to blocks without ids stays
            any_here = valid[..., :1].expand(valid.shape).reshape(-1)
            torch.where(over_rows(any_here, new), new, each[index].flatten(0, rows.dim() - 1), out=new)
        each[index] = new.view(*rows.shape, *new.shape[1:])
    return tensors[0] if count == 1 else tuple(tensors[:count])


def _filled(x: Tensor, valid: Tensor) -> Tensor:
    """On a GPU, with the first entry of its block where there is none, so that it is updated to the same once more."""
    return x if exact(x) else torch.where(over_rows(valid, x), x, x.narrow(valid.dim() - 1, 0, 1))
