"""Attention on a GPU is what the formula says: whichever kernel takes it, and its gradients."""

from __future__ import annotations

from math import sqrt
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from partita.runtime.kernels import scores
from partita.runtime.kernels.attention import attend, attend_gradient
from partita.runtime.kernels.scores import prefers_cudnn

BATCH, ORDER = 2, (0, 1, 2, 3)
BF16, F32 = torch.bfloat16, torch.float32
# dtype, heads, queries of a head, positions, size of a key and of a value, the first query's position
CASES = [
    (BF16, 4, 1, 256, 64, 64, 0),
    (BF16, 4, 1, 256, 128, 128, 0),
    (BF16, 2, 4, 256, 64, 64, 0),
    (BF16, 3, 1, 77, 100, 36, 0),
    (BF16, 2, 2, 129, 40, 128, 0),
    (BF16, 2, 1, 128, 192, 192, 0),
    (BF16, 2, 1, 128, 64, 64, 64),
    (BF16, 2, 1, 33, 320, 64, 0),
    (F32, 3, 2, 77, 36, 20, 0),
]


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None, start: int) -> Tensor:
    """By the formula: [batch, heads, own, queries, key], [batch, heads, keys, key] and [batch, heads, keys, value]."""
    made = torch.einsum("bhgqk,bhsk->bhgqs", q, k) * scale
    places = torch.arange(q.shape[-2]).unsqueeze(-1) + start - torch.arange(k.shape[-2])
    seen = torch.ones_like(places, dtype=torch.bool)
    if causal:
        seen &= places >= 0
    if window is not None:
        seen &= places.abs() < window
    return torch.einsum("bhgqs,bhsv->bhgqv", made.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True], ids=["torch's choice", "without cuDNN"])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "heads", "group", "length", "key", "value", "start"), CASES)
def test_attention_on_a_gpu(
    dtype: torch.dtype, heads: int, group: int, length: int, key: int, value: int, start: int, causal: bool,
    window: int | None, own: bool,
) -> None:  # fmt: skip
    torch.manual_seed(length + key)
    q, d = (torch.randn(BATCH, heads, group, length - start, size).to(dtype) for size in (key, value))
    k, v = (torch.randn(BATCH, heads, length, size).to(dtype) for size in (key, value))
    scale = 1 / sqrt(key)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, causal, scale, window, start)
    expected.backward(d.double())
    settings = {"groups": (2, 1, 1), "causal": causal, "scale": scale, "window": window, "start": start}
    there = [x.cuda() for x in (q, k, v, d)]
    shapes = [(tuple(x.shape), tuple(range(x.dim()))) for x in (q, k, v)]
    orders = (tuple(range(5)), ORDER)
    with patch.object(scores, "prefers_cudnn", (lambda device: False) if own else prefers_cudnn):
        o, denominator = attend(*there[:3], orders=orders, **settings)
        found = attend_gradient(*there[:3], result=(o, denominator, there[3]), shapes=shapes, **settings)
    tolerance = 2e-2 if dtype is BF16 else 1e-3
    for each, wanted in zip((o, *found), (expected, *(x.grad for x in wide)), strict=True):
        assert wanted is not None
        error = (each.cpu().double() - wanted).norm() / wanted.norm()
        assert error < tolerance, f"{error:.4f}"


@pytest.mark.gpu
def test_hopper_takes_cudnn() -> None:
    """The kernel that torch itself takes there, with its gradient."""
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        pytest.skip("neither Hopper nor Blackwell")
    assert prefers_cudnn(device), torch.backends.cudnn.version()
