"""Optimizer updates, in place."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from partita.runtime.kernels.registry import kernel


@kernel
def adamw(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    rate: float,
    update: int,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW update in place, like torch.optim.AdamW; updates count from 1."""
    tensors = (parameter, gradient, mean, square)
    # torch's fused kernel makes one pass over memory instead of seven, but treats tensors as flat arrays: shapes,
    # strides and dtypes must be equal. A slice of a parameter has different strides.
    form = parameter.shape, parameter.dtype
    if all(each.is_contiguous() and (each.shape, each.dtype) == form for each in tensors):
        steps = _number(update, parameter.device)
        torch._fused_adamw_(
            [parameter], [gradient], [mean], [square], [], [steps],
            lr=rate, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        return parameter, mean, square
    if decay:
        parameter.mul_(1 - rate * decay)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    correction = (1 - beta2**update) ** 0.5
    denominator = square.sqrt().div_(correction).add_(eps)
    parameter.addcdiv_(mean, denominator, value=-rate / (1 - beta1**update))
    return parameter, mean, square


@lru_cache(maxsize=8)
def _number(update: int, device: torch.device) -> Tensor:
    """An update's number as the fused kernel expects it, made once for all parameters."""
    return torch.tensor(float(update), device=device)


@kernel
def sgd(
    parameter: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    rate: float,
    momentum: float,
    nesterov: bool,
    decay: float,
) -> Tensor | tuple[Tensor, ...]:
    """One SGD step in place, like torch.optim.SGD. A buffer of zeros makes the first step's buffer the gradient."""
    if decay:
        gradient = gradient.add(parameter, alpha=decay)
    if buffer is None:
        parameter.add_(gradient, alpha=-rate)
        return parameter
    buffer.mul_(momentum).add_(gradient)
    direction = gradient.add(buffer, alpha=momentum) if nesterov else buffer
    parameter.add_(direction, alpha=-rate)
    return parameter, buffer
