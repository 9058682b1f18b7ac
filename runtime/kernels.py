"""What emitted functions call where one torch expression is not enough.

Layouts are those that `partita.compiler.ops` writes; each function says its own. Reductions compute in f32 at
least.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

aten = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


# ---------------------------------------------------------------- pointwise


def gelu(x: Tensor) -> Tensor:
    """The tanh form."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_gradient(d: Tensor, x: Tensor) -> Tensor:
    """d times gelu'(x)."""
    return cast(Tensor, aten.gelu_backward(d, x, approximate="tanh"))


def silu_gradient(d: Tensor, x: Tensor) -> Tensor:
    """d times silu'(x)."""
    return cast(Tensor, aten.silu_backward(d, x))


def relu_gradient(d: Tensor, y: Tensor) -> Tensor:
    """d where the result was positive."""
    return cast(Tensor, aten.threshold_backward(d, y, 0))


def tanh_gradient(d: Tensor, y: Tensor) -> Tensor:
    """d·(1 − y²)."""
    return cast(Tensor, aten.tanh_backward(d, y))


def sigmoid_gradient(d: Tensor, y: Tensor) -> Tensor:
    """d·y·(1 − y)."""
    return cast(Tensor, aten.sigmoid_backward(d, y))


# ---------------------------------------------------------------- normalisation


def normalize(x: Tensor, over: tuple[int, ...], eps: float, center: bool) -> tuple[Tensor, Tensor]:
    """x (less its mean) times 1/sqrt(mean of squares + eps) over dimensions `over`; and that rate, without them."""
    wide = _wide(x)
    if center:
        wide = wide - wide.mean(over, keepdim=True)
    rate = torch.rsqrt(wide.square().mean(over, keepdim=True).add_(eps))
    return (wide * rate).to(x.dtype), rate.squeeze(over)


def normalize_gradient(d: Tensor, y: Tensor, rate: Tensor, over: tuple[int, ...], center: bool) -> Tensor:
    """rate·(d − mean(d·y)·y), with `center` less mean(d)."""
    wide_d, wide_y = _wide(d), _wide(y)
    for position in sorted(over):
        rate = rate.unsqueeze(position)
    mean = (wide_d * wide_y).mean(over, keepdim=True)
    result = torch.addcmul(wide_d, wide_y, mean, value=-1)
    if center:
        result -= wide_d.mean(over, keepdim=True)
    return result.mul_(rate).to(y.dtype)


# ---------------------------------------------------------------- lookup


def lookup(ids: Tensor, table: Tensor, shared: int) -> Tensor:
    """Rows of [shared…, rows, rest…] by [shared…, own…]: [shared…, own…, rest…]."""
    return table[(*_batch_index(ids, shared), ids)]


def add_rows(table: Tensor, ids: Tensor, values: Tensor, shared: int) -> Tensor:
    """Add [shared…, own…, rest…] into [shared…, rows, rest…] where [shared…, own…] says, in place, in order."""
    values = values.to(table.dtype)
    if shared or table.dim() != 2 or not table.is_contiguous():
        return table.index_put_((*_batch_index(ids, shared), ids), values, accumulate=True)
    return table.index_add_(0, ids.reshape(-1), values.reshape(-1, table.shape[1]))


def _batch_index(ids: Tensor, shared: int) -> list[Tensor]:
    index = []
    for position in range(shared):
        shape = [1] * ids.dim()
        shape[position] = ids.shape[position]
        index.append(torch.arange(ids.shape[position], device=ids.device).view(shape))
    return index


# ---------------------------------------------------------------- loss


def nll(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of targets […] under logits […, classes], and log(sum(exp(logits)))."""
    wide = _wide(logits)
    denominator = torch.logsumexp(wide, -1)
    chosen = wide.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return denominator - chosen, denominator


def nll_gradient(d: Tensor, logits: Tensor, targets: Tensor, denominator: Tensor) -> Tensor:
    """d·(softmax(logits) − one_hot(targets))."""
    result = torch.exp(_wide(logits) - denominator.unsqueeze(-1))
    d = d.unsqueeze(-1).to(result.dtype)
    result.mul_(d)
    result.scatter_add_(-1, targets.long().unsqueeze(-1), -d.expand(*targets.shape, 1))
    return result.to(logits.dtype)


# ---------------------------------------------------------------- attention

# q: [shared…, own…, position?, along]; k, v: [shared… (1 where lacking), over, along]; mask and bias broadcast to
# the scores [shared…, own…, position?, over]. `groups` counts shared, own and position axes.


def _heads(x: Tensor, shared: int, own: Sequence[int], batch: Sequence[int]) -> Tensor:
    """Keys or values as [B, H, over, along]: repeated along the own axes."""
    tail = x.shape[-2:]
    x = x.reshape(*x.shape[:shared], *[1] * len(own), *tail).expand(*batch, *own, *tail)
    return _four(x, len(batch) + len(own))


def _four(x: Tensor, lead: int) -> Tensor:
    """[lead…, T, K] as [B, H, T, K]; a view where it can be."""
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


def _rows(x: Tensor) -> Tensor:
    """The tensor with its last axis dense in memory, which torch's kernel takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _scores_shape(q: Tensor, k: Tensor, groups: tuple[int, int, int]) -> tuple[int, ...]:
    shared, own, position = groups
    places = q.shape[shared + own : shared + own + position] or (1,)
    return (*q.shape[: shared + own], *places, k.shape[-2])


def _extra(x: Tensor, q: Tensor, k: Tensor, groups: tuple[int, int, int]) -> Tensor:
    """A mask or bias as [B, H, position, over]."""
    if not groups[2] and x.dim() > 1:
        x = x.unsqueeze(-2)
    return _four(x.expand(_scores_shape(q, k, groups)), groups[0] + groups[1])


def _allowed(q4: Tensor, k4: Tensor, causal: bool, mask: Tensor | None) -> Tensor | None:
    """Where attention may go: a boolean tensor that broadcasts to the scores, or None for everywhere."""
    if causal:
        below = torch.ones(q4.shape[-2], k4.shape[-2], dtype=torch.bool, device=q4.device).tril()
        mask = below if mask is None else mask & below
    return mask


def _fused(q: Tensor, mask: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's own kernel with its own gradient serves: no mask or bias, on a CPU."""
    return mask is None and bias is None and q.device.type == "cpu"


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
    orders: tuple[Sequence[int], Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """Softmax attention, and the logarithm of the softmax's denominator. `orders` permute both results."""
    q4, k4, v4 = _prepared(q, k, v, groups)
    if _fused(q, mask, bias):
        o, denominator = aten._scaled_dot_product_flash_attention_for_cpu(
            q4, k4, v4, 0.0, causal, attn_mask=None, scale=scale
        )
    else:
        scores = _scores(q, k, q4, k4, mask, bias, groups, causal, scale)
        denominator = torch.logsumexp(scores, -1)
        # A query that may attend to nothing gets zero, and passes no gradient on.
        denominator = denominator.masked_fill(denominator == float("-inf"), 0.0)
        o = torch.exp(scores - denominator.unsqueeze(-1)).to(v4.dtype) @ v4
    o = o.reshape(q.shape).permute(*orders[0])
    return o, denominator.reshape(q.shape[:-1]).permute(*orders[1])


def _scores(
    q: Tensor,
    k: Tensor,
    q4: Tensor,
    k4: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    groups: tuple[int, int, int],
    causal: bool,
    scale: float,
) -> Tensor:
    scores = _wide(q4 @ k4.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + _extra(bias, q, k, groups)
    allowed = _allowed(q4, k4, causal, None if mask is None else _extra(mask, q, k, groups))
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


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
    result: tuple[Tensor, Tensor, Tensor],
    shapes: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and the bias. `result` is the output, the denominator and the output's cotangent;
    `shapes` give the shape of each gradient as computed and the permutation to its operand's own order."""
    q4, k4, v4 = _prepared(q, k, v, groups)
    o, denominator, d = result
    lead = groups[0] + groups[1]
    if not groups[2]:
        o, d, denominator = o.unsqueeze(-2), d.unsqueeze(-2), denominator.unsqueeze(-1)
    o4, d4 = _rows(_four(o, lead)), _rows(_four(d, lead))
    l4 = denominator.reshape(o4.shape[:-1])
    bias_gradient = None
    if _fused(q, mask, bias):
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d4, q4, k4, v4, o4, l4, 0.0, causal, attn_mask=None, scale=scale
        )
    else:
        scores = _scores(q, k, q4, k4, mask, bias, groups, causal, scale)
        p = torch.exp(scores - l4.unsqueeze(-1))
        dv = p.to(d4.dtype).transpose(-1, -2) @ d4
        dp = _wide(d4 @ v4.transpose(-1, -2))
        ds = p * (dp - (_wide(o4) * _wide(d4)).sum(-1, keepdim=True))
        if bias is not None:
            whole = ds.reshape(_scores_shape(q, k, groups))
            like = bias if groups[2] or bias.dim() < 2 else bias.unsqueeze(-2)
            bias_gradient = whole.sum_to_size(like.shape).to(bias.dtype)
        ds = (ds * scale).to(q4.dtype)
        dq = ds @ k4
        dk = ds.transpose(-1, -2) @ q4
    batch, own = q.shape[: groups[0]], q.shape[groups[0] : lead]
    found = [
        dq.reshape(q.shape),
        _summed(dk, k, batch, own),
        _summed(dv, v, batch, own),
        *([] if bias_gradient is None else [bias_gradient]),
    ]
    return tuple(
        tensor.reshape(tuple(shape)).permute(*order) if len(order) else tensor.reshape(())
        for tensor, (shape, order) in zip(found, shapes, strict=True)
    )


def _summed(gradient: Tensor, like: Tensor, batch: Sequence[int], own: Sequence[int]) -> Tensor:
    """The gradient of keys or values, summed over the axes along which they were repeated."""
    tail = like.shape[-2:]
    gradient = gradient.reshape(*batch, *own, *tail)
    if own:
        gradient = gradient.sum(tuple(range(len(batch), len(batch) + len(own))))
    return gradient.sum_to_size(like.shape)


# ---------------------------------------------------------------- positions and random numbers


@lru_cache(maxsize=32)
def _angles(count: int, half: int, base: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    position = torch.arange(count, dtype=torch.float64, device=device)
    rate = base ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = position[:, None] * rate
    return angle.cos().to(wide), angle.sin().to(wide)


def rope(x: Tensor, start: int, base: float, inverse: bool, order: Sequence[int]) -> Tensor:
    """Rotate the halves of the last axis by the position along the last but one, which begins at `start`."""
    half = x.shape[-1] // 2
    cos, sin = _angles(start + x.shape[-2], half, base, x.dtype, x.device)
    cos, sin = cos[start:], sin[start:]
    if inverse:
        sin = -sin
    a, b = _wide(x[..., :half]), _wide(x[..., half:])
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype).permute(*order)


DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "bool": torch.bool,
}

# Multipliers of the 64-bit finalizer of MurmurHash3 (Appleby) and of Weyl's sequence, as signed integers.
_MIX = (-0x00AE502812AA7333, -0x3B314601E57A13AD, -0x61C8864680B583EB)


def _mixed(x: Tensor) -> Tensor:
    """A bijective hash of 64-bit integers, element by element, in place."""
    for multiplier in _MIX[:2]:
        x ^= (x >> 33) & 0x7FFFFFFF
        x *= multiplier
    x ^= (x >> 33) & 0x7FFFFFFF
    return x


def _scalar_mixed(*numbers: int) -> int:
    """One 64-bit key from several integers."""
    key = 0
    for number in numbers:
        key = (key ^ (number & (2**64 - 1))) * 0x9E3779B97F4A7C15 & (2**64 - 1)
        key ^= key >> 29
    return key - 2**64 if key >= 2**63 else key


def random(
    c: Any,
    distribution: str,
    scale: float,
    key: int,
    shape: Sequence[int],
    starts: Sequence[int],
    whole: Sequence[int],
    dtype: str,
) -> Tensor:
    """Random numbers by the hash of (seed, step, key, coordinates): the region `shape` at `starts` of `whole`."""
    index = torch.zeros((), dtype=torch.int64, device=c.device)
    for position, (size, start, extent) in enumerate(zip(shape, starts, whole, strict=True)):
        coordinate = torch.arange(start, start + size, device=c.device)
        view = [1] * len(shape)
        view[position] = size
        index = index * extent + coordinate.view(view)
    stream = _scalar_mixed(c.seed, c.step, key)
    bits = _mixed((index.expand(tuple(shape)) * 2 + 1) * _MIX[2] + stream)
    # 53 bits make a double in [0, 1).
    unit = ((bits >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53
    if distribution == "keep":
        return unit >= scale
    if distribution == "uniform":
        return ((unit * 2 - 1) * scale).to(DTYPES[dtype])
    assert distribution == "normal", distribution
    other = _mixed((index.expand(tuple(shape)) * 2 + 2) * _MIX[2] + stream)
    angle = ((other >> 11) & (2**53 - 1)).to(torch.float64) * (2.0**-53 * 2 * torch.pi)
    radius = torch.sqrt(-2 * torch.log1p(-unit))
    return (radius * torch.cos(angle) * scale).to(DTYPES[dtype])


# ---------------------------------------------------------------- optimizers


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    rate: float,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of AdamW in place, as torch.optim.AdamW; steps count from 1."""
    if decay:
        parameter.mul_(1 - rate * decay)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    correction = (1 - beta2**step) ** 0.5
    denominator = square.sqrt().div_(correction).add_(eps)
    parameter.addcdiv_(mean, denominator, value=-rate / (1 - beta1**step))
    return parameter, mean, square


def sgd(
    parameter: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    rate: float,
    momentum: float,
    nesterov: bool,
    decay: float,
) -> tuple[Tensor, ...]:
    """One step of SGD in place, as torch.optim.SGD. A buffer of zeros makes the first step's buffer the gradient."""
    if decay:
        gradient = gradient.add(parameter, alpha=decay)
    if buffer is None:
        parameter.add_(gradient, alpha=-rate)
        return (parameter,)
    buffer.mul_(momentum).add_(gradient)
    direction = gradient.add(buffer, alpha=momentum) if nesterov else buffer
    parameter.add_(direction, alpha=-rate)
    return parameter, buffer
