"""Normalisation, lookup and the loss: what reads a whole row."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.runtime.kernels.dtypes import widened


def normalize(x: Tensor, over: tuple[int, ...], eps: float, center: bool) -> tuple[Tensor, Tensor]:
    """x (less its mean) times 1/sqrt(mean of squares + eps) over dimensions `over`; and that rate, without them."""
    wide = widened(x)
    if center:
        wide = wide - wide.mean(over, keepdim=True)
    rate = torch.rsqrt(wide.square().mean(over, keepdim=True).add_(eps))
    return (wide * rate).to(x.dtype), rate.squeeze(over)


def normalize_gradient(d: Tensor, y: Tensor, rate: Tensor, over: tuple[int, ...], center: bool) -> Tensor:
    """rate·(d − mean(d·y)·y), with `center` less mean(d)."""
    wide_d, wide_y = widened(d), widened(y)
    for position in sorted(over):
        rate = rate.unsqueeze(position)
    mean = (wide_d * wide_y).mean(over, keepdim=True)
    result = torch.addcmul(wide_d, wide_y, mean, value=-1)
    if center:
        result -= wide_d.mean(over, keepdim=True)
    return result.mul_(rate).to(y.dtype)


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


def nll(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of targets […] under logits […, classes], and log(sum(exp(logits)))."""
    wide = widened(logits)
    denominator = torch.logsumexp(wide, -1)
    chosen = wide.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return denominator - chosen, denominator


def nll_gradient(d: Tensor, logits: Tensor, targets: Tensor, denominator: Tensor) -> Tensor:
    """d·(softmax(logits) − one_hot(targets))."""
    result = torch.exp(widened(logits) - denominator.unsqueeze(-1))
    d = d.unsqueeze(-1).to(result.dtype)
    result.mul_(d)
    result.scatter_add_(-1, targets.long().unsqueeze(-1), -d.expand(*targets.shape, 1))
    return result.to(logits.dtype)
