"""Pointwise functions and their gradients."""

from __future__ import annotations

from functools import lru_cache
from math import pi, sqrt
from typing import Any, cast

import torch
from torch import Tensor

from partita.runtime.kernels.compiling import is_tracing
from partita.runtime.kernels.native.library import native
from partita.runtime.kernels.registry import kernel

aten = torch.ops.aten
_broadcast: Any = torch.broadcast_tensors


# gelu(x) = x·sigmoid(ROOT·(x + CUBE·x³)), as (1 + tanh(u))/2 = sigmoid(2u).
ROOT = 2 * sqrt(2 / pi)
CUBE = 0.044715
# Elements per thread to which several passes are applied in turn, so that all but the first hit a cache (L2 is 1 or 2
# MB per core nowadays).
BLOCK = 1 << 16


@kernel
def gelu(x: Tensor) -> Tensor:
    """The tanh approximation."""
    functions = native(x)
    if functions is not None:
        x = x.contiguous()
        y = torch.empty_like(x)
        functions.gelu(y.data_ptr(), x.data_ptr(), x.numel())
        return y
    if not _by_sigmoid(x):
        return torch.nn.functional.gelu(x, approximate="tanh")
    return _inner(x).sigmoid_().mul_(x)


@kernel
def gelu_gradient(d: Tensor, x: Tensor) -> Tensor:
    """d times gelu'(x)."""
    functions = native(x)
    if functions is not None:
        d, x = (each.contiguous() for each in ((d, x) if d.shape == x.shape else _broadcast(d, x)))
        y = torch.empty_like(x)
        functions.gelu_gradient(y.data_ptr(), d.data_ptr(), x.data_ptr(), x.numel())
        return y
    if not _by_sigmoid(x):
        return cast(Tensor, aten.gelu_backward(d, x, approximate="tanh"))
    # With u = ROOT·(x + CUBE·x³) and s = sigmoid(u): s + x·u'·s·(1 − s), and x·u' = 3·(u − 2/3·ROOT·x).
    if is_tracing():
        u = _inner(x)
        s = torch.sigmoid(u)
        return (s + 3 * sigmoid_gradient(u - 2 / 3 * ROOT * x, s)) * d
    result = torch.empty_like(x)
    block = BLOCK * torch.get_num_threads()
    if x.numel() <= block or not (d.shape == x.shape and d.is_contiguous() and x.is_contiguous()):
        return _gelu_derivative(x, result).mul_(d) if d.shape == x.shape else _gelu_derivative(x, result).mul(d)
    d_parts, parts, results = (torch.split(each.view(-1), block) for each in (d, x, result))
    for d_part, part, of_part in zip(d_parts, parts, results, strict=True):
        _gelu_derivative(part, of_part).mul_(d_part)
    return result


def _gelu_derivative(x: Tensor, s: Tensor) -> Tensor:
    """gelu'(x), written to s."""
    u = _inner(x)
    torch.sigmoid(u, out=s)
    u.sub_(x, alpha=2 / 3 * ROOT)
    return s.add_(sigmoid_gradient(u, s), alpha=3)


def _inner(x: Tensor) -> Tensor:
    """ROOT·(x + CUBE·x³)."""
    if is_tracing():
        return x * (ROOT + CUBE * ROOT * x * x)
    return torch.addcmul(_number(ROOT, x.dtype), x, x, value=CUBE * ROOT).mul_(x)


def _by_sigmoid(x: Tensor) -> bool:
    """Whether several passes with torch's sigmoid are faster than its gelu: its tanh is slow on a CPU."""
    return x.is_cpu and x.dtype != torch.bfloat16


@lru_cache(maxsize=8)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


@kernel
def gelu_exact_gradient(d: Tensor, x: Tensor) -> Tensor:
    """d times gelu'(x), of gelu by the error function."""
    return cast(Tensor, aten.gelu_backward(d, x))


@kernel
def erf_gradient(d: Tensor, x: Tensor) -> Tensor:
    """d·2/√π·exp(−x²)."""
    return d * (2 / sqrt(pi) * torch.exp(-x * x))


@kernel
def power_exponent_gradient(d: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """d·y·log(x), of y = xᵖ in p; zero where x is, as y is there for any p near it."""
    return torch.where(x == 0, 0, d * y * torch.log(x))


@kernel
def silu_gradient(d: Tensor, x: Tensor) -> Tensor:
    """d times silu'(x)."""
    return cast(Tensor, aten.silu_backward(d, x))


@kernel
def relu_gradient(d: Tensor, y: Tensor) -> Tensor:
    """d where the result was positive."""
    return cast(Tensor, aten.threshold_backward(d, y, 0))


@kernel
def tanh_gradient(d: Tensor, y: Tensor) -> Tensor:
    """d·(1 − y²)."""
    return cast(Tensor, aten.tanh_backward(d, y))


@kernel
def sigmoid_gradient(d: Tensor, y: Tensor) -> Tensor:
    """d·y·(1 − y)."""
    return cast(Tensor, aten.sigmoid_backward(d, y))
