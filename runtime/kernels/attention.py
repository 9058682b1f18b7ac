"""Softmax attention and its gradient.

q is [shared…, own…, position?, along]; k is [shared… (1 if missing), over, along], and v likewise, where `along` may
have another size: fused kernels want them equal, and get the smaller padded with zeros. `groups` counts the shared, own
and position axes.

Other operands broadcast to the scores [shared…, own…, position?, over]: a mask, a bias, what dropout keeps, and the ids
of segments (those of the keys; a query's is that of its own position). A sink broadcasts to the queries. With `causal`
each query attends to keys up to its own position, in a `window` to those nearer than that; the first query is at key
position `start`.

torch's fused kernels are used where one applies. Otherwise scores are materialized: with a mask, a bias, a soft cap or
dropout, and on a GPU also in f32 or with segments, where the compiler's memory bound does not include them. A sink is
no part of any kernel: its weight is taken off the result and added to the denominator, and gradients that are given
these are then right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import and_
from typing import Any

import torch
from attrs import frozen
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


def _padded_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors with rows of one length, the shorter padded with zeros: products with them stay what they are."""
    longest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == longest else pad(x, (0, longest - x.shape[-1])) for x in tensors]


def _unpadded(x: Tensor, like: Tensor) -> Tensor:
    """Rows as long as those of another tensor."""
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]]


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


@frozen(eq=False)
class _Scores:
    """How scores are made of queries and keys: what they are given besides, on [B, H, position, over]."""

    causal: bool
    scale: float
    start: int = 0
    window: int | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    segments: Tensor | None = None
    keep: Tensor | None = None
    rate: float = 0.0

    @property
    def materialized(self) -> bool:
        """Whether no fused kernel makes them."""
        return any(each is not None for each in (self.mask, self.bias, self.softcap, self.keep))

    def allowed(self, q4: Tensor, k4: Tensor) -> Tensor | None:
        """A boolean tensor that broadcasts to the scores; None if everything is allowed."""
        found = [each for each in (self.mask, self._near(q4, k4), self._same(q4)) if each is not None]
        return reduce(and_, found) if found else None

    def _near(self, q4: Tensor, k4: Tensor) -> Tensor | None:
        """Where causality and the window let positions see each other."""
        if not self.causal and self.window is None:
            return None
        count, start = q4.shape[-2], self.start
        seen = torch.ones(count, k4.shape[-2], dtype=torch.bool, device=q4.device)
        if self.causal:
            seen = seen.tril(start)
        if self.window is not None:
            seen = seen.triu(start - self.window + 1)
            if not self.causal:
                seen = seen.tril(start + self.window - 1)
        return seen

    def _same(self, q4: Tensor) -> Tensor | None:
        """Where the query's segment is the key's."""
        if self.segments is None:
            return None
        own = self.segments.narrow(-1, self.start, q4.shape[-2]).transpose(-1, -2)
        return own == self.segments

    def added(self, q4: Tensor, k4: Tensor) -> tuple[bool, Tensor | None]:
        """Arguments for torch's own kernel: causal, if queries begin at the first key; otherwise numbers to add."""
        alone = self.segments is None and self.window is None and not (self.causal and self.start)
        seen = None if alone else self.allowed(q4, k4)
        if seen is None:
            return self.causal, None
        return False, torch.zeros_like(seen, dtype=q4.dtype).masked_fill_(~seen, float("-inf"))

    def of(self, q4: Tensor, k4: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores, and the slope of the soft cap."""
        scores = widened(q4 @ k4.transpose(-1, -2)) * self.scale
        slope = None
        if self.softcap is not None:
            bounded = torch.tanh(scores / self.softcap)
            scores, slope = bounded * self.softcap, 1 - bounded * bounded
        if self.bias is not None:
            scores = scores + self.bias
        seen = self.allowed(q4, k4)
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        return scores, slope

    def kept(self, weights: Tensor) -> Tensor:
        """Weights, or their gradients, after dropout."""
        return weights if self.keep is None else weights * self.keep / (1 - self.rate)

    def fused(self, q4: Tensor) -> bool:
        """Whether torch's own kernel with its gradient applies: on a CPU."""
        return not self.materialized and q4.is_cpu

    def flash(self, q4: Tensor, k4: Tensor, v4: Tensor) -> bool:
        """Whether FlashAttention applies: on a GPU, in half precision, with supported head sizes. Where positions
        count, it aligns the last query with the last key.
        """
        if self.materialized or self.segments is not None or not q4.is_cuda:
            return False
        size = max(q4.shape[-1], v4.shape[-1])
        fits = q4.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256
        placed = self.causal or self.window is not None
        return fits and (not placed or self.start + q4.shape[-2] == k4.shape[-2])


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
    *,
    groups: tuple[int, int, int],
    orders: tuple[tuple[int, ...], tuple[int, ...]],
    sink: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Softmax attention, and the logarithm of the softmax's denominator. `orders` permutes both results."""
    k, v = _seen(q, k, v, groups, options)
    q4, k4, v4 = _prepared(q, k, v, groups)
    how = _how(q, k, groups, options)
    if how.fused(q4):
        causal, added = how.added(q4, k4)
        o, denominator = aten._scaled_dot_product_flash_attention_for_cpu(
            *_padded_rows(q4, k4, v4), 0.0, causal, attn_mask=added, scale=how.scale
        )
    elif how.flash(q4, k4, v4):
        o, denominator = _flash(how, *_padded_rows(q4, k4, v4))
    else:
        scores, _ = how.of(q4, k4)
        denominator = torch.logsumexp(scores, -1)
        # A query that may attend to nothing yields zero, and has no gradient.
        finite = denominator.masked_fill(denominator == float("-inf"), 0.0)
        o = how.kept(torch.exp(scores - finite.unsqueeze(-1))).to(v4.dtype) @ v4
        denominator = finite if sink is None else denominator
    o = _shaped(_unpadded(o, v), (*q.shape[:-1], v.shape[-1]))
    denominator = _shaped(denominator, q.shape[:-1])
    if sink is not None:
        total = torch.logaddexp(denominator, widened(sink))
        o = (o * torch.exp(denominator - total).unsqueeze(-1)).to(o.dtype)
        denominator = total
    return o.permute(orders[0]), denominator.permute(orders[1])


def _seen(
    q: Tensor, k: Tensor, v: Tensor, groups: tuple[int, int, int], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The keys and values up to the last query, if it is causal: no query sees later ones. Narrows the options too."""
    length, end = k.shape[-2], options.get("start", 0) + q.shape[-2]
    if not options["causal"] or not groups[2] or end >= length:
        return k, v
    for name in ("mask", "bias", "keep", "segments"):
        if (given := options.get(name)) is not None and given.shape[-1] == length:
            options[name] = given.narrow(-1, 0, end)
    return k.narrow(-2, 0, end), v.narrow(-2, 0, end)


def _how(q: Tensor, k: Tensor, groups: tuple[int, int, int], options: dict[str, Any]) -> _Scores:
    """How scores are made, with operands on [B, H, position, over]."""
    for name in ("mask", "bias", "keep"):
        options[name] = _extra(options.get(name), q, k, groups)
    options["segments"] = _narrow(options.get("segments"), q, groups)
    return _Scores(**options)


def _flash(how: _Scores, q4: Tensor, k4: Tensor, v4: Tensor) -> tuple[Tensor, Tensor]:
    """FlashAttention: the result and the logarithm of the denominator."""
    if how.window is None:
        o, denominator, *_ = aten._scaled_dot_product_flash_attention(q4, k4, v4, 0.0, how.causal, scale=how.scale)
        return o, denominator
    across = [x.transpose(1, 2) for x in (q4, k4, v4)]
    o, denominator, *_ = aten._flash_attention_forward(
        *across,
        None,
        None,
        q4.shape[-2],
        k4.shape[-2],
        0.0,
        how.causal,
        False,
        scale=how.scale,
        **_sides(how.window, how.causal),
    )
    return o.transpose(1, 2), denominator


def _flash_gradient(how: _Scores, tensors: Sequence[Tensor], l4: Tensor) -> tuple[Tensor, ...]:
    """Its gradients, of the output's cotangent, queries, keys, values and the output."""
    _, q4, k4, *_ = tensors
    # Without dropout the random state is not read; sequences of one length have no list of lengths.
    state, offset = q4.new_empty(2, dtype=torch.uint64), q4.new_empty((), dtype=torch.uint64)
    lengths = None, None, q4.shape[-2], k4.shape[-2]
    if how.window is None:
        found = aten._scaled_dot_product_flash_attention_backward(
            *tensors, l4, *lengths, 0.0, how.causal, state, offset, scale=how.scale
        )
        return tuple(found)
    across = [x.transpose(1, 2) for x in tensors]
    found = aten._flash_attention_backward(
        *across, l4, *lengths, 0.0, how.causal, state, offset, scale=how.scale, **_sides(how.window, how.causal)
    )
    return tuple(x.transpose(1, 2) for x in found)


def _sides(window: int, causal: bool) -> dict[str, int]:
    """FlashAttention's window: how far to the left and to the right a query sees."""
    return {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1}


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
    **options: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, the bias and the sink. `result` is the output, the denominator's logarithm and the output's
    cotangent; `shapes` gives the shape of each gradient as computed and the permutation to its operand's own order.
    """
    length = k.shape[-2]
    k, v = _seen(q, k, v, groups, options)
    q4, k4, v4 = _prepared(q, k, v, groups)
    bias = options.get("bias")
    how = _how(q, k, groups, options)
    o, denominator, d = result
    lead = groups[0] + groups[1]
    found: list[Tensor] = []
    if sink is not None:
        # The sink has a weight and no value: of its softmax only the second term of the gradient remains.
        weight = torch.exp(widened(sink) - denominator)
        found = [(-weight * (widened(o) * widened(d)).sum(-1)).sum_to_size(sink.shape).to(sink.dtype)]
    if not groups[2]:
        o, d, denominator = o.unsqueeze(-2), d.unsqueeze(-2), denominator.unsqueeze(-1)
    o4, d4 = _rows(_four(o, lead)), _rows(_four(d, lead))
    l4 = _shaped(denominator, o4.shape[:-1])
    if how.fused(q4):
        causal, added = how.added(q4, k4)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_padded_rows(d4, q4, k4, v4, o4), l4, 0.0, causal, attn_mask=added, scale=how.scale
        )
    elif how.flash(q4, k4, v4):
        dq, dk, dv = _flash_gradient(how, _padded_rows(d4, q4, k4, v4, o4), l4)
    else:
        scores, slope = how.of(q4, k4)
        p = torch.exp(scores - l4.unsqueeze(-1))
        dv = how.kept(p).to(d4.dtype).transpose(-1, -2) @ d4
        dp = how.kept(widened(d4 @ v4.transpose(-1, -2)))
        ds = p * (dp - (widened(o4) * widened(d4)).sum(-1, keepdim=True))
        if bias is not None:
            whole = ds.reshape(_scores_shape(q, k, groups))
            like = bias if groups[2] or bias.dim() < 2 else bias.unsqueeze(-2)
            found.insert(0, whole.sum_to_size(like.shape).to(bias.dtype))
        if slope is not None:
            ds = ds * slope
        ds = (ds * how.scale).to(q4.dtype)
        dq = ds @ k4
        dk = ds.transpose(-1, -2) @ q4
    batch, own = q.shape[: groups[0]], q.shape[groups[0] : lead]
    first = [
        _shaped(_unpadded(dq, q), q.shape),
        _summed(_unpadded(dk, k), k, batch, own),
        _summed(_unpadded(dv, v), v, batch, own),
    ]
    del dq, dk, dv
    if k.shape[-2] < length:
        first[1:] = [pad(each, (0, 0, 0, length - k.shape[-2])) for each in first[1:]]
        if bias is not None and bias.shape[-1] == k.shape[-2]:
            found[0] = pad(found[0], (0, length - k.shape[-2]))
    found = [*first, *found]
    first.clear()
    for i, (shape, order) in enumerate(shapes):
        # In the operand's own order in memory too: products that read it as a matrix would copy it, each for itself.
        found[i] = _shaped(found[i], shape).permute(order).contiguous()
    return tuple(found)


def _summed(gradient: Tensor, like: Tensor, batch: Sequence[int], own: Sequence[int]) -> Tensor:
    """The gradient of keys or values, summed over the axes along which they were repeated."""
    if not own and gradient.shape == like.shape:
        return gradient
    gradient = gradient.reshape(*batch, *own, *like.shape[-2:])
    if own:
        gradient = gradient.sum(tuple(range(len(batch), len(batch) + len(own))))
    return gradient.sum_to_size(like.shape)
