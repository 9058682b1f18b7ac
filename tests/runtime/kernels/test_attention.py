"""Attention takes torch's fused kernels where there is one: no scores are made. GPUs are fake here: shapes only."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.runtime.kernels import scores
from partita.runtime.kernels.attention import attend, attend_gradient
from partita.runtime.kernels.scores import Scores

BATCH, HEADS, SEQ, KEY = 2, 4, 512, 64
GROUPS = (2, 0, 1)
ORDER = (0, 1, 2, 3)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        self.elements = max([self.elements, *(each.numel() for each in tensors)])
        self.operations.append(str(func))
        return made


@pytest.mark.parametrize("more", [{}, {"window": 16}], ids=["plain", "window"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_no_scores_are_made(device: str, dtype: torch.dtype, causal: bool, more: dict[str, Any]):
    settings: dict[str, Any] = {"groups": GROUPS, "causal": causal, "scale": 0.125, **more}
    with FakeTensorMode(), Largest() as found:
        q, k, v, d = (torch.empty(BATCH, HEADS, SEQ, KEY, device=device, dtype=dtype) for _ in range(4))
        o, denominator = attend(q, k, v, **settings, orders=(ORDER, ORDER[:3]))
        gradients = attend_gradient(
            q, k, v, **settings, result=(o, denominator, d), shapes=[(tuple(q.shape), ORDER)] * 3
        )
        assert o.shape == q.shape
        assert denominator.shape == q.shape[:3]
        assert denominator.dtype == torch.float32
        assert [(each.shape, each.dtype) for each in gradients] == [(q.shape, dtype)] * 3
    assert found.elements <= (BATCH * HEADS * SEQ * KEY if not more else SEQ * SEQ)
    assert any("flash_attention" in each for each in found.operations)


@pytest.mark.parametrize(
    ("dtype", "key", "keys", "causal", "start"),
    [
        (torch.float32, 64, SEQ, True, 0),
        (torch.bfloat16, 260, SEQ, True, 0),
        (torch.bfloat16, 64, SEQ // 2, True, 0),
        (torch.bfloat16, 64, SEQ, True, 1),
    ],
)
def test_where_flash_attention_means_something_else_or_does_not_run_it_is_not_taken(
    dtype: torch.dtype, key: int, keys: int, causal: bool, start: int
):
    with FakeTensorMode():
        q = torch.empty(BATCH, HEADS, SEQ, key, device="cuda", dtype=dtype)
        k = torch.empty(BATCH, HEADS, keys, key, device="cuda", dtype=dtype)
        assert not Scores(causal, 0.125, start).flash(q, k, k)
        half = torch.empty(BATCH, HEADS, SEQ, 64, device="cuda", dtype=torch.bfloat16)
        assert Scores(causal, 0.125).flash(half, half, half)


@pytest.mark.parametrize(
    ("how", "key", "keys", "taken"),
    [
        (Scores(True, 0.125), 128, SEQ, True),
        (Scores(False, 0.125), 128, 2 * SEQ, True),
        (Scores(False, 0.125, SEQ), 64, 2 * SEQ, True),
        (Scores(True, 0.125, SEQ), 64, 2 * SEQ, False),
        (Scores(True, 0.125, window=16), 64, SEQ, False),
        (Scores(False, 0.125), 136, SEQ, False),
        (Scores(False, 0.125), 64, 1, False),
    ],
)
def test_cudnn_is_taken_where_it_means_the_same_and_has_a_gradient(how: Scores, key: int, keys: int, taken: bool):
    """It aligns the first query with the first key, where FlashAttention aligns the last ones."""
    with FakeTensorMode():
        q = torch.empty(BATCH, HEADS, SEQ, key, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(BATCH, HEADS, keys, key, device="cuda", dtype=torch.bfloat16)
        with patch.object(scores, "prefers_cudnn", lambda device: True):
            assert how.flash(q, k, k)
            assert how.cudnn(q, k, k) == taken
        assert not how.cudnn(q, k, k)  # there is no GPU


@pytest.mark.parametrize(
    ("key", "keys", "taken"), [(128, 1 << 16, True), (136, SEQ, False), (64, (1 << 16) + 1, False)]
)
def test_memory_efficient_attention_is_taken_as_far_as_it_is_right(key: int, keys: int, taken: bool):
    with FakeTensorMode():
        q, k = (torch.empty(BATCH, HEADS, count, key, device="cuda") for count in (SEQ, keys))
        assert Scores(False, 0.125).efficient(q, k, k) == taken


@pytest.mark.few(2)
@pytest.mark.parametrize("start", [0, SEQ // 4, SEQ - SEQ // 4])
@pytest.mark.parametrize("more", [{}, {"window": 16}], ids=["plain", "window"])
def test_queries_of_a_slice_make_no_scores_and_read_no_later_keys(start: int, more: dict[str, Any]):
    """FlashAttention aligns the last query with the last key that it is given: that is the query's own."""
    settings: dict[str, Any] = {"groups": GROUPS, "causal": True, "scale": 0.125, "start": start, **more}
    few = SEQ // 4
    with FakeTensorMode(), Largest() as found:
        q, d = (torch.empty(BATCH, HEADS, few, KEY, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.empty(BATCH, HEADS, SEQ, KEY, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        o, denominator = attend(q, k, v, **settings, orders=(ORDER, ORDER[:3]))
        shapes = [(tuple(x.shape), ORDER) for x in (q, k, v)]
        gradients = attend_gradient(q, k, v, **settings, result=(o, denominator, d), shapes=shapes)
        assert [each.shape for each in gradients] == [q.shape, k.shape, v.shape]
    assert found.elements <= BATCH * HEADS * SEQ * KEY
    assert any("flash_attention" in each for each in found.operations)
