"""Softmax attention and its gradient.

q is [shared…, own…, position?, along]; k is [shared… (1 if missing), over, along], and v likewise, where `along` may
have another size: fused kernels want them equal, and get the smaller padded with zeros. `groups` counts the shared, own
and position axes.

Other operands broadcast to the scores [shared…, own…, position?, over]: a mask, a bias, what dropout keeps, and the ids
of segments (those of the keys; a query's is that of its own position). A sink broadcasts to the queries. With `causal`
each query attends to keys up to its own position, in a `window` to those nearer than that. The first query is at key
position `start`; or `places` are the runs of positions at which queries and keys stand.

Queries that do not begin with the first key are computed in pieces (`partita.runtime.kernels.pieces`), with the keys
that they see; what several pieces make of a query comes together by the logarithms of their denominators (Milakov and
Gimelshein, arXiv 1805.02867), and each makes its part of the gradients when it is given those of all.

torch's fused kernels are used where one applies. Otherwise scores are materialized: with a mask, a bias, a soft cap or
dropout, and on a GPU in f64. A sink is no part of any kernel: its weight is taken off the result and added to the
denominator, and gradients that are given these are then right.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from partita.compiler.ops.runs import Runs
from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.pieces import Merged, Piece, Sums, alone, back, in_order, part, pieces
from partita.runtime.kernels.registry import kernel
from partita.runtime.kernels.scores import Scores, attended, gradients, plain_attended, plain_gradients, rows, unpadded

# `groups` if q, k and v are [batch, heads, position, along].
HEADS = (2, 0, 1)


def _heads(x: Tensor, shared: int, own: Sequence[int], batch: Sequence[int]) -> Tensor:
    """Keys or values as [B, H, over, along]: repeated along the own axes."""
    if not own and x.shape[:shared] == batch:
        return _four(x, shared)
    tail = x.shape[-2:]
    x = x.reshape(*x.shape[:shared], *[1] * len(own), *tail).expand(*batch, *own, *tail)
    return _four(x, len(batch) + len(own))


def _four(x: Tensor, lead: int) -> Tensor:
    """[lead…, T, K] as [B, H, T, K]; a view if possible."""
    if lead == 2:
        return x
    if lead < 2:
        return x.reshape(1, *[1] * (1 - lead), *x.shape)
    return x.reshape(x.shape[0], prod(x.shape[1:lead]), *x.shape[lead:])


def _prepared(q: Tensor, k: Tensor, v: Tensor, groups: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """On [B, H, position, along]; keys and values that heads of a group share have fewer heads where they can."""
    shared, own, position = groups
    if not position:
        q = q.unsqueeze(-2)
    batch, mine = q.shape[:shared], q.shape[shared : shared + own]
    q4 = rows(_four(q, shared + own))
    if own and shared and all(x.shape[:shared] == batch for x in (k, v)):
        k4, v4 = (x.unsqueeze(1) if shared == 1 else _four(x, shared) for x in (k, v))
        return q4, k4, v4
    return q4, _heads(k, shared, mine, batch), _heads(v, shared, mine, batch)


def _repeated(x: Tensor, like: Tensor) -> Tensor:
    """Keys or values with as many heads as the queries have."""
    if x.shape[1] == like.shape[1]:
        return rows(x)
    heads = x.unsqueeze(2).expand(-1, -1, like.shape[1] // x.shape[1], -1, -1)
    return rows(heads.reshape(x.shape[0], like.shape[1], *x.shape[2:]))


def _alike(how: Scores, parts: Sequence[Piece], q4: Tensor, k4: Tensor, v4: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries have, unless FlashAttention reads them for all heads itself."""
    if all(how.of(piece).flash(*_rows_of(piece, q4, k4, v4)) for piece in parts):
        return rows(k4), rows(v4)
    return _repeated(k4, q4), _repeated(v4, q4)


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x.reshape(shape)`, without a call of torch if x has that shape."""
    return x if x.shape == shape else x.reshape(shape)


def _scores_shape(q: Tensor, k: Tensor, groups: tuple[int, int, int]) -> tuple[int, ...]:
    shared, own, position = groups
    places = q.shape[shared + own : shared + own + position] or (1,)
    return (*q.shape[: shared + own], *places, k.shape[-2])


def _extra(x: Tensor | None, q: Tensor, k: Tensor, groups: tuple[int, int, int]) -> Tensor | None:
    """What broadcasts to the scores as [B, H, position, over]."""
    if x is None:
        return None
    if not groups[2] and x.dim() > 1:
        x = x.unsqueeze(-2)
    return _four(x.expand(_scores_shape(q, k, groups)), groups[0] + groups[1])


def _narrow(ids: Tensor | None, q: Tensor, groups: tuple[int, int, int]) -> Tensor | None:
    """The ids of segments as [B, H, 1, over], with 1 for H where they are the same for all heads."""
    if ids is None:
        return None
    lead = groups[0] + groups[1]
    ids = ids.reshape(*[1] * (lead + 2 - ids.dim()), *ids.shape)
    if lead >= 1 and all(size == 1 for size in ids.shape[1:lead]):
        return ids.reshape(ids.shape[0], 1, 1, ids.shape[-1]) if lead > 1 else ids.unsqueeze(0)
    return _four(ids.expand(*q.shape[:lead], 1, ids.shape[-1]), lead)


@kernel
def attend_heads(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, orders: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """`attend` for the common case: q, k and v are [batch, heads, position, along] with equal batch and heads, queries
    begin at the first key, and there is neither mask nor bias.
    """
    if not q.is_cpu:
        return attend(q, k, v, groups=HEADS, causal=causal, scale=scale, orders=orders)
    o, denominator = plain_attended(q, k, v, causal, scale)
    return o.permute(orders[0]), denominator.permute(orders[1])


@kernel
def attend_heads_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    denominator: Tensor,
    d: Tensor,
    causal: bool,
    scale: float,
    orders: tuple[tuple[int, ...], ...],
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v of `attend_heads`, permuted by `orders`; the output's cotangent `d` is in q's order."""
    if not q.is_cpu:
        shapes = [(x.shape, order) for x, order in zip((q, k, v), orders, strict=True)]
        result = (o, denominator, d)
        return attend_gradient(q, k, v, groups=HEADS, causal=causal, scale=scale, result=result, shapes=shapes)
    dq, dk, dv = plain_gradients(d, q, k, v, o, denominator, causal, scale)
    return dq.permute(orders[0]), dk.permute(orders[1]), dv.permute(orders[2])


@kernel
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    groups: tuple[int, int, int],
    orders: tuple[tuple[int, ...], tuple[int, ...]],
    sink: Tensor | None = None,
    places: tuple[Runs, Runs] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax attention, and the logarithm of the softmax's denominator. `orders` permutes both results."""
    q4, k4, v4 = _prepared(q, k, v, groups)
    how = _how(q, k, groups, options)
    queries, keys, parts = _pieces(how, q4, k4, places)
    q4, k4, v4 = (in_order(x, -2, runs) for x, runs in ((q4, queries), (k4, keys), (v4, keys)))
    how = how.at(queries, keys)
    k4, v4 = _alike(how, parts, q4, k4, v4)
    if (piece := alone(parts, q4.shape[-2], k4.shape[-2])) is not None:
        o, denominator = attended(how.of(piece), q4, k4, v4)
    else:
        merged = Merged.of((*q4.shape[:-1], v4.shape[-1]), q4)
        for piece in parts:
            own = attended(how.of(piece), *_rows_of(piece, q4, k4, v4))
            merged.add(piece.queries, unpadded(own[0], v4.shape[-1]), own[1])
        o, denominator = merged.values.to(v4.dtype), merged.denominator
    o, denominator = back(o, -2, queries), back(denominator, -1, queries)
    o = _shaped(unpadded(o, v.shape[-1]), (*q.shape[:-1], v.shape[-1]))
    denominator = _shaped(denominator, q.shape[:-1])
    if sink is not None:
        total = torch.logaddexp(denominator, widened(sink))
        o.mul_(torch.exp(denominator - total).unsqueeze(-1))
        denominator = total
    elif how.materialized:
        # A query that may attend to nothing yields zero, and has no gradient.
        denominator = denominator.masked_fill(denominator == float("-inf"), 0.0)
    return o.permute(orders[0]), denominator.permute(orders[1])


@kernel
def merge_attended(
    o: Tensor,
    denominator: Tensor,
    other: Tensor,
    other_denominator: Tensor,
    order: Sequence[int],
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Attended values and denominators of some keys and of others together; `order` and a new dimension `dim` make
    denominators broadcast to values.
    """
    total = torch.logaddexp(denominator, other_denominator)
    finite = total.masked_fill(total == float("-inf"), 0.0)
    weights = (torch.exp(each - finite).permute(*order).unsqueeze(dim) for each in (denominator, other_denominator))
    first, second = weights
    return (widened(o) * first + widened(other) * second).to(dtype), total


def _how(q: Tensor, k: Tensor, groups: tuple[int, int, int], options: dict[str, Any]) -> Scores:
    """How scores are made, with operands on [B, H, position, over]."""
    for name in ("mask", "bias", "keep"):
        options[name] = _extra(options.get(name), q, k, groups)
    options["segments"] = _narrow(options.get("segments"), q, groups)
    return Scores(**options)


def _pieces(how: Scores, q4: Tensor, k4: Tensor, places: tuple[Runs, Runs] | None) -> tuple[Runs, Runs, list[Piece]]:
    """Where queries and keys stand, and the pieces of both in order."""
    queries, keys = places or (((how.start, q4.shape[-2]),), ((0, k4.shape[-2]),))
    ordered = tuple(sorted(queries)), tuple(sorted(keys))
    return queries, keys, pieces(*ordered, how.causal, how.window, how.plain)


def _rows_of(piece: Piece, q4: Tensor, k4: Tensor, v4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return part(q4, -2, piece.queries), part(k4, -2, piece.keys), part(v4, -2, piece.keys)


@kernel
def attend_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    groups: tuple[int, int, int],
    result: tuple[Tensor, Tensor, Tensor],
    shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    sink: Tensor | None = None,
    places: tuple[Runs, Runs] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, the bias and the sink. `result` is the output, the denominator's logarithm and the output's
    cotangent; `shapes` gives the shape of each gradient as computed and the permutation to its operand's own order.
    """
    q4, k4, v4 = _prepared(q, k, v, groups)
    bias = options.get("bias")
    how = _how(q, k, groups, options)
    o, denominator, d = result
    lead = groups[0] + groups[1]
    grads: list[Tensor] = []
    if sink is not None:
        # The sink has a weight and no value: of its softmax only the second term of the gradient remains.
        weight = torch.exp(widened(sink) - denominator)
        grads = [(-weight * (widened(o) * widened(d)).sum(-1)).sum_to_size(sink.shape).to(sink.dtype)]
    if not groups[2]:
        o, d, denominator = o.unsqueeze(-2), d.unsqueeze(-2), denominator.unsqueeze(-1)
    o4, d4 = rows(_four(o, lead)), rows(_four(d, lead))
    l4 = _shaped(denominator, o4.shape[:-1])
    queries, keys, parts = _pieces(how, q4, k4, places)
    q4, o4, d4 = (in_order(x, -2, queries) for x in (q4, o4, d4))
    k4, v4, l4 = in_order(k4, -2, keys), in_order(v4, -2, keys), in_order(l4, -1, queries)
    how = how.at(queries, keys)
    k4, v4 = _alike(how, parts, q4, k4, v4)
    if (piece := alone(parts, q4.shape[-2], k4.shape[-2])) is not None:
        dq, dk, dv, ds = gradients(how.of(piece), q4, k4, v4, o4, l4, d4)
    else:
        sums = Sums(bias is not None)
        for piece in parts:
            own = piece.queries
            operands = (*_rows_of(piece, q4, k4, v4), part(o4, -2, own), part(l4, -1, own), part(d4, -2, own))
            sums.add(piece, (q4, k4, v4), gradients(how.of(piece), *operands))
        (dq, dk, dv), ds = (x.to(q4.dtype) for x in sums.of(q4, k4, v4)), sums.scores
    dq, dk, dv = back(dq, -2, queries), back(dk, -2, keys), back(dv, -2, keys)
    if bias is not None and ds is not None:
        whole = back(back(ds, -2, queries), -1, keys).reshape(_scores_shape(q, k, groups))
        like = bias if groups[2] or bias.dim() < 2 else bias.unsqueeze(-2)
        grads.insert(0, whole.sum_to_size(like.shape).to(bias.dtype))
    batch, own_axes = q.shape[: groups[0]], q.shape[groups[0] : lead]
    first = [
        _shaped(unpadded(dq, q.shape[-1]), q.shape),
        _summed(unpadded(dk, k.shape[-1]), k, batch, own_axes),
        _summed(unpadded(dv, v.shape[-1]), v, batch, own_axes),
    ]
    del dq, dk, dv
    grads = [*first, *grads]
    first.clear()
    for i, (shape, order) in enumerate(shapes):
        turned = _shaped(grads[i], shape).permute(order)
        # In the operand's own order in memory too: products that read it as a matrix would copy it, each for itself.
        # On a GPU what turns positions back copies it anyway.
        grads[i] = turned.contiguous() if q.is_cpu else turned
    return tuple(grads)


def _summed(gradient: Tensor, like: Tensor, batch: Sequence[int], own: Sequence[int]) -> Tensor:
    """The gradient of keys or values, summed over the axes along which they were repeated."""
    if gradient.numel() == like.numel():
        return _shaped(gradient, like.shape)
    gradient = gradient.reshape(*batch, *own, *like.shape[-2:])
    if own:
        gradient = gradient.sum(tuple(range(len(batch), len(batch) + len(own))))
    return gradient.sum_to_size(like.shape)
