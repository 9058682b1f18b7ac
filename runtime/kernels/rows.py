"""Normalization, lookup and the loss: kernels that read full rows."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from partita.runtime.kernels.compiling import is_tracing
from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.native.library import native
from partita.runtime.kernels.registry import kernel

FEW = 16  # numbers of a row, as of the experts chosen for it, that are added one after the other on a GPU

layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


@kernel
def normalize(x: Tensor, over: tuple[int, ...], eps: float, center: bool) -> tuple[Tensor, Tensor]:
    """x (less its mean) times rate = 1/sqrt(mean of squares + eps) over dimensions `over`; and the rate, without those
    dimensions.

    Here and below `over` is ascending and counts from the end: -1 is the last dimension.
    """
    functions = native(x) if over[0] == -len(over) else None
    if functions is not None:
        x, rate = x.contiguous(), x.new_empty(x.shape[: over[0]])
        y, rows = torch.empty_like(x), rate.numel()
        size = x.numel() // rows
        functions.normalize(y.data_ptr(), rate.data_ptr(), x.data_ptr(), rows, size, eps, center)
        return y, rate
    if center and _as_layer(x, over):
        # torch's kernel takes twice as long without scale and shift.
        shape = x.shape[over[0] :]
        zeros, ones = _zeros_and_ones(shape, x.dtype, x.device)
        y, _, rate = torch.native_layer_norm(x, shape, ones, zeros, eps)
        return y, rate.squeeze(over)
    if not center and fused_rms(x, over):
        y, rate = torch.ops.aten._fused_rms_norm(x, x.shape[over[0] :], None, eps)
        return y, rate.squeeze(over)
    wide = widened(x)
    if center:
        wide = wide - wide.mean(over, keepdim=True)
    rate = torch.rsqrt(wide.square().mean(over, keepdim=True).add_(eps))
    return (wide * rate).to(x.dtype), rate.squeeze(over)


@kernel
def normalize_gradient(
    d: Tensor, y: Tensor, rate: Tensor, over: tuple[int, ...], center: bool, plus: Tensor | None = None
) -> Tensor:
    """rate·(d − mean(d·y)·y), with `center` less mean(d). `plus` is added to the result."""
    gradients = _native_gradient(d, y, rate, None, over, center, plus)
    if gradients is not None:
        return gradients[0]
    rate = _over(rate, over)
    if center and _as_layer(y, over):
        # torch's gradient kernel, with y as the input: its mean is 0 and its rate 1.
        zeros, ones = _zeros_and_ones(rate.shape, rate.dtype, rate.device)
        inner, _, _ = layer_norm_backward(d, y, y.shape[over[0] :], zeros, ones, None, None, [True, False, False])
        return _scaled(inner, rate, plus)
    if not center and fused_rms(y, over):
        return _scaled(_rms_backward(d, y, over, None)[0], rate, plus)
    wide_d, wide_y = widened(d), widened(y)
    mean = (wide_d * wide_y).mean(over, keepdim=True)
    less = wide_d.mean(over, keepdim=True) if center else None
    result = torch.addcmul(wide_d, wide_y, mean, value=-1, out=None if wide_d is d else wide_d)
    del wide_d, wide_y
    if less is not None:
        result -= less
    result = result.mul_(rate).to(y.dtype)
    return result if plus is None else result.add_(plus)


@kernel
def rms_norm_gradient(
    d: Tensor, y: Tensor, rate: Tensor, scale: Tensor, over: tuple[int, ...], plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of an RMS norm's input and scale; `scale` broadcasts to y, the normalized tensor. `plus` is added to
    the first.
    """
    gradients = _native_gradient(d, y, rate, scale, over, False, plus)
    if gradients is not None:
        return gradients[0], gradients[1]
    if fused_rms(y, over) and scale.shape == y.shape[over[0] :]:
        inner, to_scale = _rms_backward(d, y, over, scale)
        return _scaled(inner, _over(rate, over), plus), to_scale
    rest = tuple(i for i in range(-y.dim(), 0) if i not in over)
    to_scale = (d * y).sum(rest, dtype=y.dtype) if rest else d * y
    return normalize_gradient(d * scale, y, rate, over, False, plus), to_scale


def fused_rms(x: Tensor, over: tuple[int, ...]) -> bool:
    """Whether torch's RMS norm applies: to the last dimensions, on a GPU. Inductor generates its own."""
    return x.is_cuda and over[0] == -len(over) and not is_tracing()


def _rms_backward(d: Tensor, y: Tensor, over: tuple[int, ...], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """torch's gradient kernel, with y as the input: its rate is 1."""
    _, ones = _zeros_and_ones(
        (*y.shape[: over[0]], *[1] * len(over)), torch.float32 if y.dtype == torch.bfloat16 else y.dtype, y.device
    )
    gradients: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm_backward(
        d.contiguous(), y, y.shape[over[0] :], ones, scale, [True, scale is not None]
    )
    return gradients


@kernel
def layer_norm_gradient(
    d: Tensor, y: Tensor, rate: Tensor, scale: Tensor, over: tuple[int, ...], plus: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a layer norm's input, scale and shift; `scale` broadcasts to y, the normalized tensor. `plus` is
    added to the first.
    """
    gradients = _native_gradient(d, y, rate, scale, over, True, plus)
    if gradients is not None:
        return gradients
    if _as_layer(y, over):
        rate = _over(rate, over)
        zeros, ones = _zeros_and_ones(rate.shape, rate.dtype, rate.device)
        inner, to_scale, to_shift = layer_norm_backward(
            d, y, scale.shape, zeros, ones, scale, scale, [True, True, True]
        )
        return _scaled(inner, rate, plus), to_scale, to_shift
    rest = tuple(i for i in range(-y.dim(), 0) if i not in over)
    to_scale, to_shift = (x.sum(rest) if rest else x for x in (d * y, d))
    return normalize_gradient(d * scale, y, rate, over, True, plus), to_scale, to_shift


@kernel
def layer_norm_scale_gradient(
    d: Tensor, y: Tensor, rate: Tensor, scale: Tensor, over: tuple[int, ...], plus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and scale of a layer norm without a shift, as `layer_norm_gradient` makes them."""
    to_x, to_scale, _ = layer_norm_gradient(d, y, rate, scale, over, plus)
    return to_x, to_scale


def _native_gradient(
    d: Tensor,
    y: Tensor,
    rate: Tensor,
    scale: Tensor | None,
    over: tuple[int, ...],
    center: bool,
    plus: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of a norm's input, scale and shift by one pass; None if the library does not apply. Without a scale the
    last two are nothing.
    """
    functions, shape = native(y) if over[0] == -len(over) else None, y.shape[over[0] :]
    if functions is None or d.shape != y.shape or (scale is not None and scale.shape != shape):
        return None
    operands = [None if each is None else each.contiguous() for each in (d, y, rate, scale, plus)]
    to_x, to_scale, to_shift = y.new_empty(y.shape), y.new_empty(shape), y.new_empty(shape)
    pointers = [0 if each is None else each.data_ptr() for each in (to_x, to_scale, to_shift, *operands)]
    functions.normalize_gradient(*pointers, rate.numel(), y.numel() // rate.numel(), center)
    return to_x, to_scale, to_shift


def _scaled(inner: Tensor, rate: Tensor, plus: Tensor | None) -> Tensor:
    """The tensor times the rate, plus `plus`."""
    if plus is not None and inner.is_cuda:
        return torch.addcmul(plus, inner, rate, out=inner)  # one pass, in the dtype of accumulation
    inner.mul_(rate)
    return inner if plus is None else inner.add_(plus)


def _over(rate: Tensor, over: tuple[int, ...]) -> Tensor:
    """The rate with its reduced dimensions restored, of size 1."""
    for position in reversed(over):
        rate = rate.unsqueeze(position)
    return rate


def _as_layer(x: Tensor, over: tuple[int, ...]) -> bool:
    """Whether torch's layer norm applies: to the last dimensions, on a CPU not in bf16, of which its gradient wants the
    rates in bf16 too. Inductor generates its own.
    """
    return over[0] == -len(over) and (x.is_cuda or x.dtype != torch.bfloat16) and not is_tracing()


@lru_cache(maxsize=32)
def _zeros_and_ones(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(shape, dtype=dtype, device=device), torch.ones(shape, dtype=dtype, device=device)


@kernel
def lookup(ids: Tensor, table: Tensor, shared: int, start: int | None = None) -> Tensor:
    """Rows of [shared…, rows, rest…] at indices [shared…, own…]: [shared…, own…, rest…].

    `start` is given if `table` is a shard: the index of its first row; rows of other shards are returned as zeros.
    """
    if start is None:
        return _rows(table, ids, shared)
    index, outside = _local(ids, start, table.shape[shared])
    rows = _rows(table, index, shared)
    if not ids.dim():
        rows = rows.clone()  # the row of a single id is a view of the table
    return rows.masked_fill_(over_rows(outside, rows), 0)


@kernel
def one_hot(ids: Tensor, size: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """1 where the last axis, whose positions count from `start`, is at the id."""
    return (ids.unsqueeze(-1) == torch.arange(start, start + size, device=ids.device)).to(dtype)


@kernel
def add_rows(table: Tensor, ids: Tensor, values: Tensor, shared: int, start: int | None = None) -> Tensor:
    """Add [shared…, own…, rest…] into rows of [shared…, rows, rest…] at indices [shared…, own…], in place and in order.

    `start` as for `lookup`; rows of other shards are skipped.
    """
    original, values = values, values.to(table.dtype)
    if start is not None:
        ids, outside = _local(ids, start, table.shape[shared])
        mask = over_rows(outside, values)
        values = values.masked_fill(mask, 0) if values is original else values.masked_fill_(mask, 0)
    # On a GPU these add in any order, and replicas of the table on several ranks would diverge: so only what goes to
    # places that differ is added at once.
    if shared and _of_numbers(table, ids, shared):
        if table.is_cpu:
            return table.scatter_add_(-1, ids.long(), values)
        if ids.shape[-1] <= FEW:
            for own, each in zip(ids.long().unbind(-1), values.unbind(-1), strict=True):
                table.scatter_add_(-1, own.unsqueeze(-1), each.unsqueeze(-1))
            return table
    if shared or table.dim() != 2 or not table.is_contiguous() or not table.is_cpu:
        return table.index_put_((*_batch_index(ids, shared), ids), values, accumulate=True)
    return table.index_add_(0, ids.reshape(-1), values.reshape(-1, table.shape[1]))


@kernel
def max_rows(table: Tensor, ids: Tensor, values: Tensor, shared: int, start: int | None = None) -> Tensor:
    """As `add_rows`, but the largest of what goes to a place, and of what is there."""
    if start is not None:
        ids, outside = _local(ids, start, table.shape[shared])
        values = values.masked_fill(over_rows(outside, values), -torch.inf)
    index, first = ids.long(), table.shape[:shared]
    for position, own in enumerate(_batch_index(ids, shared)):
        index = index + own * (first[position + 1 :].numel() * table.shape[shared])
    rest = table.shape[shared + 1 :].numel()
    flat = table.reshape(-1, rest)
    places = index.reshape(-1, 1).expand(-1, rest)
    return flat.scatter_reduce(0, places, values.reshape(-1, rest), "amax").view(table.shape)


def _rows(table: Tensor, ids: Tensor, shared: int) -> Tensor:
    if shared and _of_numbers(table, ids, shared):
        return table.gather(-1, ids.long())
    return table[(*_batch_index(ids, shared), ids)]


def _of_numbers(table: Tensor, ids: Tensor, shared: int) -> bool:
    """Whether each row is a number, and all axes but the indexed one are shared: torch has kernels for these alone."""
    return table.dim() == ids.dim() == shared + 1


def _local(ids: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Indices into the shard of `count` rows from `start`, and a mask of those outside it.

    Indices outside are spread over the shard: if all were one row, a GPU's atomic additions would serialize there.
    """
    ids = ids.long() - start
    return ids.remainder(count), (ids < 0) | (ids >= count)


def over_rows(mask: Tensor, rows: Tensor) -> Tensor:
    """A mask of rows that broadcasts over their elements."""
    return mask.view((*mask.shape, *[1] * (rows.dim() - mask.dim())))


def _batch_index(ids: Tensor, shared: int) -> list[Tensor]:
    index = []
    for position in range(shared):
        shape = [1] * ids.dim()
        shape[position] = ids.shape[position]
        index.append(torch.arange(ids.shape[position], device=ids.device).view(shape))
    return index


@kernel
def nll(logits: Tensor, targets: Tensor, guarded: bool = False) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of targets […] under logits […, classes], and log(sum(exp(logits))).

    With `guarded` a target may be out of range: its logit then counts as zero.
    """
    functions = native(logits)
    if functions is not None:
        logits, index = logits.contiguous(), targets.long().contiguous()
        loss, denominator = logits.new_empty(index.shape), logits.new_empty(index.shape)
        tensors = (loss, denominator, logits, index)
        functions.nll(*[each.data_ptr() for each in tensors], index.numel(), logits.shape[-1])
        return loss, denominator
    if guarded:
        denominator = torch.logsumexp(widened(logits), -1)
        return denominator - pick(logits, targets, 0), denominator
    wide, index = widened(logits), targets.long().unsqueeze(-1)
    # One pass instead of the several of torch's logsumexp.
    likelihood = torch.log_softmax(wide, -1).gather(-1, index).squeeze(-1)
    return -likelihood, wide.gather(-1, index).squeeze(-1) - likelihood


@kernel
def nll_gradient(
    d: Tensor | float, logits: Tensor, targets: Tensor, denominator: Tensor, start: int | None = None
) -> Tensor:
    """d·(softmax(logits) − one_hot(targets)). `start` is given if logits are a shard: its first class."""
    functions = native(logits)
    if functions is not None:
        of_rows = d.to(logits.dtype).expand(targets.shape).contiguous() if isinstance(d, Tensor) else None
        logits, index, result = logits.contiguous(), targets.long().contiguous(), logits.new_empty(logits.shape)
        tensors = (result, of_rows, logits, index, denominator.contiguous())
        pointers = [0 if each is None else each.data_ptr() for each in tensors]
        number = 0.0 if isinstance(d, Tensor) else d
        functions.nll_gradient(*pointers, index.numel(), logits.shape[-1], start or 0, number)
        return result
    result = torch.sub(logits, denominator.unsqueeze(-1)).exp_()  # in the denominator's dtype, that of accumulation
    index = targets.long()
    if isinstance(d, Tensor):
        d = d.unsqueeze(-1).to(result.dtype)
        cotangent = d.expand(*targets.shape, 1)
    else:
        cotangent = result.new_full((*targets.shape, 1), d)
    result.mul_(d)
    if start is not None:
        index, outside = _local(targets, start, logits.shape[-1])
        cotangent = cotangent.masked_fill(outside.unsqueeze(-1), 0)
    result.scatter_add_(-1, index.unsqueeze(-1), -cotangent)
    return result.to(logits.dtype)


@kernel
def exp_sum(x: Tensor, peak: Tensor) -> Tensor:
    """The sum of exp(x − peak) over the last axis, in the peak's dtype, that of accumulation."""
    return (x - peak.unsqueeze(-1)).exp_().sum(-1)


@kernel
def pick(x: Tensor, index: Tensor, start: int | None = None) -> Tensor:
    """Elements of x along its last axis. `start` is given if x is a shard: elements of other shards are zero."""
    if start is None:
        return widened(x.gather(-1, index.long().unsqueeze(-1)).squeeze(-1))
    index, outside = _local(index, start, x.shape[-1])
    return widened(x.gather(-1, index.unsqueeze(-1)).squeeze(-1)).masked_fill_(outside, 0)


# Less than minus any index; its negation is an int64, too.
_NOWHERE = -(2**62)


@kernel
def first_index(x: Tensor, peak: Tensor, start: int) -> Tensor:
    """Minus the first index (counted from `start`) along the last axis at which x equals `peak`, its maximum."""
    best = x.argmax(-1, keepdim=True)
    own = x.gather(-1, best).squeeze(-1)
    matches = (own == peak) | (own.isnan() & peak.isnan())  # argmax takes NaN for the largest
    return torch.where(matches, -(best.squeeze(-1) + start), _NOWHERE)
