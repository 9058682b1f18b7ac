"""Pointwise functions and their gradients."""

from __future__ import annotations

from functools import lru_cache
from math import pi, sqrt
from typing import cast

import torch
from torch import Tensor

from partita.runtime.kernels.compiling import is_tracing

aten = torch.ops.aten


# gelu(x) = x·sigmoid(ROOT·(x + CUBE·x³)), as (1 + tanh(u))/2 = sigmoid(2u).
ROOT = 2 * sqrt(2 / pi)
CUBE = 0.044715


def gelu(x: Tensor) -> Tensor:
    """The tanh form."""
    if not _by_sigmoid(x):
        return torch.nn.functional.gelu(x, approximate="tanh")
    if is_tracing():
        return x * torch.sigmoid(x * (ROOT + CUBE * ROOT * x * x))
    return torch.addcmul(_number(ROOT, x.dtype), x, x, value=CUBE * ROOT).mul_(x).sigmoid_().mul_(x)


def gelu_gradient(d: Tensor, x: Tensor) -> Tensor:
    """d times gelu'(x)."""
    if not _by_sigmoid(x):
        return cast(Tensor, aten.gelu_backward(d, x, approximate="tanh"))
    square = torch.square(x).mul_(CUBE * ROOT)
    part = torch.add(square, ROOT).mul_(x).sigmoid_()
    slope = square.mul_(3).add_(ROOT).mul_(x)
    # part + part·(1 − part)·slope
    return slope.addcmul_(slope, part, value=-1).add_(1).mul_(part) * d


def _by_sigmoid(x: Tensor) -> bool:
    """Whether several passes with torch's sigmoid are quicker than its own gelu: its tanh is slow on a CPU."""
    return x.device.type == "cpu" and x.dtype != torch.bfloat16


@lru_cache(maxsize=8)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


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
