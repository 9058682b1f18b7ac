"""Softmax attention and its gradient.

q is [shared…, own…, position?, along]; k is [shared… (1 if missing), over, along], and v likewise, where `along` may
have another size: fused kernels want them equal, and get the smaller padded with zeros. Mask and bias broadcast to the
scores [shared…, own…, position?, over]. `groups` counts the shared, own and position axes. With `causal`, the first
query is at key position `start`, and each query attends to keys up to its own position.

torch's fused kernels are used where one applies. Otherwise scores are materialized: with a mask or a bias, and on a GPU
also in f32, where the compiler's memory bound does not include them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.registry import kernel

aten = torch.ops.aten
flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

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
    shared, own, position = groups
    if not position:
        q = q.unsqueeze(-2)
    batch, mine = q.shape[:shared], q.shape[shared : shared + own]
    q4 = _four(q, shared + own)
    return _rows(q4), _rows(_heads(k, shared, mine, batch)), _rows(_heads(v, shared, mine, batch))


def _widened_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors with rows of one length, the shorter padded with zeros: products with them stay what they are."""
    longest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == longest else pad(x, (0, longest - x.shape[-1])) for x in tensors]


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x.reshape(shape)`, without a call of torch if x has that shape."""
    return x if x.shape == shape else x.reshape(shape)


def _rows(x: Tensor) -> Tensor:
    """The tensor with rows that are dense in memory and do not overlap: torch's kernel assumes that, and passes their
    stride to BLAS, which computes nothing if it is shorter than a row (one key for all positions).
    """
    if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _scores_shape(q: Tensor, k: Tensor, groups: tuple[int, int, int]) -> tuple[int, ...]:
    shared, own, position = groups
    places = q.shape[shared + own : shared + own + position] or (1,)
    return (*q.shape[: shared + own], *places, k.shape[-2])


def _extra(x: Tensor, q: Tensor, k: Tensor, groups: tuple[int, int, int]) -> Tensor:
    """A mask or bias as [B, H, position, over]."""
    if not groups[2] and x.dim() > 1:
        x = x.unsqueeze(-2)
    return _four(x.expand(_scores_shape(q, k, groups)), groups[0] + groups[1])


def _allowed(q4: Tensor, k4: Tensor, causal: bool, start: int, mask: Tensor | None) -> Tensor | None:
    """The attention mask: a boolean tensor that broadcasts to the scores, or None if everything is allowed."""
    if causal:
        below = torch.ones(q4.shape[-2], k4.shape[-2], dtype=torch.bool, device=q4.device).tril(start)
        mask = below if mask is None else mask & below
    return mask


def _causality(q4: Tensor, k4: Tensor, causal: bool, start: int) -> tuple[bool, Tensor | None]:
    """Arguments for torch's own kernel: causal, if queries begin at the first key; otherwise a mask to add."""
    if not (causal and start):
        return causal, None
    return False, q4.new_full((q4.shape[-2], k4.shape[-2]), float("-inf")).triu(start + 1)


def _fused(q: Tensor, mask: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's own kernel with its gradient applies: on a CPU, without mask or bias."""
    return mask is None and bias is None and q.is_cpu


def _flash(
    q4: Tensor, k4: Tensor, v4: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool, start: int
) -> bool:
    """Whether FlashAttention applies: on a GPU, in half precision, with supported head sizes. If causal, it aligns the
    last query with the last key, and we the first with the first: the same only with as many keys as queries.
    """
    if mask is not None or bias is not None or not q4.is_cuda:
        return False
    size = max(q4.shape[-1], v4.shape[-1])
    fits = q4.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256
    return fits and (not causal or (start == 0 and q4.shape[-2] == k4.shape[-2]))


@kernel
def attend_heads(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, orders: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    """`attend` for the common case: q, k and v are [batch, heads, position, along] with equal batch and heads, queries
    begin at the first key, and there is neither mask nor bias.
    """
    if not q.is_cpu:
        return attend(q, k, v, groups=HEADS, causal=causal, scale=scale, orders=orders)
    o, denominator = torch._scaled_dot_product_flash_attention_for_cpu(
        _rows(q), _rows(k), _rows(v), 0.0, causal, scale=scale
    )
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
    dq, dk, dv = flash_backward(_rows(d), _rows(q), _rows(k), _rows(v), _rows(o), denominator, 0.0, causal, scale=scale)
    return dq.permute(orders[0]), dk.permute(orders[1]), dv.permute(orders[2])


@kernel
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    groups: tuple[int, int, int],
    causal: bool,
    scale: float,
    start: int = 0,
    orders: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[Tensor, Tensor]:
    """Softmax attention, and the logarithm of the softmax's denominator. `orders` permutes both results."""
    q4, k4, v4 = _prepared(q, k, v, groups)
    wide = v.shape[-1]
    if _fused(q, mask, bias):
        alone, added = _causality(q4, k4, causal, start)
        o, denominator = aten._scaled_dot_product_flash_attention_for_cpu(
            *_widened_rows(q4, k4, v4), 0.0, alone, attn_mask=added, scale=scale
        )
        o = o[..., :wide]
    elif _flash(q4, k4, v4, mask, bias, causal, start):
        o, denominator, *_ = aten._scaled_dot_product_flash_attention(
            *_widened_rows(q4, k4, v4), 0.0, causal, scale=scale
        )
        o = o[..., :wide]
    else:
        scores = _scores(q, k, q4, k4, mask, bias, groups, causal, start, scale)
        denominator = torch.logsumexp(scores, -1)
        # A query that may attend to nothing yields zero, and has no gradient.
        denominator = denominator.masked_fill(denominator == float("-inf"), 0.0)
        o = torch.exp(scores - denominator.unsqueeze(-1)).to(v4.dtype) @ v4
    return _shaped(o, (*q.shape[:-1], wide)).permute(orders[0]), _shaped(denominator, q.shape[:-1]).permute(orders[1])


def _scores(
    q: Tensor,
    k: Tensor,
    q4: Tensor,
    k4: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    groups: tuple[int, int, int],
    causal: bool,
    start: int,
    scale: float,
) -> Tensor:
    scores = widened(q4 @ k4.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + _extra(bias, q, k, groups)
    allowed = _allowed(q4, k4, causal, start, None if mask is None else _extra(mask, q, k, groups))
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


@kernel
def attend_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    groups: tuple[int, int, int],
    causal: bool,
    scale: float,
    start: int = 0,
    result: tuple[Tensor, Tensor, Tensor],
    shapes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and the bias. `result` is the output, the denominator's logarithm and the output's
    cotangent; `shapes` gives the shape of each gradient as computed and the permutation to its operand's own order.
    """
    q4, k4, v4 = _prepared(q, k, v, groups)
    o, denominator, d = result
    lead = groups[0] + groups[1]
    if not groups[2]:
        o, d, denominator = o.unsqueeze(-2), d.unsqueeze(-2), denominator.unsqueeze(-1)
    o4, d4 = _rows(_four(o, lead)), _rows(_four(d, lead))
    l4 = _shaped(denominator, o4.shape[:-1])
    bias_gradient = None
    if _fused(q, mask, bias):
        alone, added = _causality(q4, k4, causal, start)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_widened_rows(d4, q4, k4, v4, o4), l4, 0.0, alone, attn_mask=added, scale=scale
        )
    elif _flash(q4, k4, v4, mask, bias, causal, start):
        # Without dropout the random state is not read; sequences of one length have no list of lengths.
        state, offset = q4.new_empty(2, dtype=torch.uint64), q4.new_empty((), dtype=torch.uint64)
        lengths = None, None, q4.shape[-2], k4.shape[-2]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            *_widened_rows(d4, q4, k4, v4, o4), l4, *lengths, 0.0, causal, state, offset, scale=scale
        )
    else:
        scores = _scores(q, k, q4, k4, mask, bias, groups, causal, start, scale)
        p = torch.exp(scores - l4.unsqueeze(-1))
        dv = p.to(d4.dtype).transpose(-1, -2) @ d4
        dp = widened(d4 @ v4.transpose(-1, -2))
        ds = p * (dp - (widened(o4) * widened(d4)).sum(-1, keepdim=True))
        if bias is not None:
            whole = ds.reshape(_scores_shape(q, k, groups))
            like = bias if groups[2] or bias.dim() < 2 else bias.unsqueeze(-2)
            bias_gradient = whole.sum_to_size(like.shape).to(bias.dtype)
        ds = (ds * scale).to(q4.dtype)
        dq = ds @ k4
        dk = ds.transpose(-1, -2) @ q4
    batch, own = q.shape[: groups[0]], q.shape[groups[0] : lead]
    found = [
        _shaped(dq[..., : q.shape[-1]], q.shape),
        _summed(dk[..., : k.shape[-1]], k, batch, own),
        _summed(dv[..., : v.shape[-1]], v, batch, own),
        *([] if bias_gradient is None else [bias_gradient]),
    ]
    return tuple(_shaped(tensor, shape).permute(order) for tensor, (shape, order) in zip(found, shapes, strict=True))


def _summed(gradient: Tensor, like: Tensor, batch: Sequence[int], own: Sequence[int]) -> Tensor:
    """The gradient of keys or values, summed over the axes along which they were repeated."""
    if not own and gradient.shape == like.shape:
        return gradient
    gradient = gradient.reshape(*batch, *own, *like.shape[-2:])
    if own:
        gradient = gradient.sum(tuple(range(len(batch), len(batch) + len(own))))
    return gradient.sum_to_size(like.shape)
