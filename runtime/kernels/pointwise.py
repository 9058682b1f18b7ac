"""Pointwise functions and their gradients."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

aten = torch.ops.aten


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
