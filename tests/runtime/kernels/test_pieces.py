"""Attention of queries and keys that stand in runs of positions: the same numbers, and no work for what is not seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from partita.compiler.ops.runs import Runs, zigzag_runs
from partita.runtime.kernels.attention import attend, attend_gradient
from partita.runtime.kernels.native import attention
from partita.runtime.kernels.positions import take_runs
from tests.marks import soak

GROUPS, ORDER = (2, 0, 1), (0, 1, 2, 3)


class Products(TorchDispatchMode):
    """The pairs of a query and a key of which products are made, for each head: half of them if causal."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "flash_attention_for_cpu" in name:
            backward = "backward" in name
            q, k = args[1:3] if backward else args[:2]
            causal = args[7 if backward else 4] if len(args) > 4 else False
            self.pairs += q.shape[-2] * k.shape[-2] / (2 if causal else 1)
        return func(*args, **(kwargs or {}))


def whole_and_parts(
    length: int, queries: list[Runs], keys: Runs, options: dict[str, Any], seed: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients of attention on one device, and of its parts put together."""
    torch.manual_seed(seed)
    heads, key, value = 2, 4, 6
    q, k = (torch.randn(2, heads, length, key, dtype=torch.float64) for _ in range(2))
    v, d = (torch.randn(2, heads, length, value, dtype=torch.float64) for _ in range(2))
    given = dict(options)
    given |= {"segments": torch.arange(length)[None, None].expand(2, 1, -1) // 3} if options.get("segments") else {}
    given |= {"bias": torch.randn(heads, 1, length, dtype=torch.float64)} if options.get("bias") else {}
    given |= {"mask": torch.rand(2, 1, 1, length) < 0.7} if options.get("mask") else {}
    settings: dict[str, Any] = {"groups": GROUPS, "scale": 0.5}
    shapes = [(tuple(x.shape), ORDER) for x in (q, k, v)] + [((heads, 1, length), ORDER[:3])] * ("bias" in given)
    o, total = attend(q, k, v, **settings, **given, orders=(ORDER, ORDER[:3]))
    expected = [o, total, *attend_gradient(q, k, v, **settings, **given, result=(o, total, d), shapes=shapes)]

    def take(x: torch.Tensor, runs: Runs, dim: int = -2) -> torch.Tensor:
        return take_runs(x, x.dim() + dim, runs)

    ordered = {n: take(x, keys, -1) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    found = [torch.zeros_like(x) for x in expected]
    back = torch.argsort(take(torch.arange(length), keys, -1))
    for own in queries:
        rows = take(torch.arange(length), own, -1)
        mine = [take(q, own), take(k, keys), take(v, keys)]
        part = attend(*mine, **settings, **ordered, places=(own, keys), orders=(ORDER, ORDER[:3]))
        found[0][:, :, rows], found[1][:, :, rows] = part
        own_shapes = [(tuple(mine[0].shape), ORDER), *shapes[1:]]
        parts = attend_gradient(
            *mine, **settings, **ordered, places=(own, keys), result=(*part, take(d, own)), shapes=own_shapes
        )
        found[2][:, :, rows] = parts[0]
        for i, gradient in enumerate(parts[1:], 3):
            found[i] += gradient[..., back] if i > 4 else gradient[:, :, back]
    return found, expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("more", ["", "window", "segments", "bias", "mask", "softcap"])
@given(
    half=st.integers(1, 4),
    ranks=st.integers(1, 3),
    parts=st.sampled_from([1, 2, 3, 4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_parts_in_zigzag_order_make_the_whole(half: int, ranks: int, parts: int, causal: bool, more: str, seed: int):
    length = 2 * half * ranks
    parts = parts if length % parts == 0 else ranks
    size = length // parts
    value = {"window": 3, "softcap": 1.5, "": None}.get(more, True)
    options = {"causal": causal, **({more: value} if more else {})}
    queries = [zigzag_runs(start, size, length, ranks) for start in range(0, length, size)]
    found, expected = whole_and_parts(length, queries, zigzag_runs(0, length, length, ranks), options, seed)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, *soak(3, 4, 8)])
def test_every_rank_makes_as_many_products_and_none_that_are_not_seen(ranks: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "library", lambda: None)  # products of torch's kernel can be seen
    length, size = 64 * ranks, 64
    keys = zigzag_runs(0, length, length, ranks)
    forward, backward = [], []
    for start in range(0, length, size):
        places = zigzag_runs(start, size, length, ranks), keys
        q, k, v = (torch.randn(1, 1, n, 8) for n in (size, length, length))
        settings: dict[str, Any] = {"groups": GROUPS, "causal": True, "scale": 1.0, "places": places}
        with Products() as made:
            o, total = attend(q, k, v, **settings, orders=(ORDER, ORDER[:3]))
        forward.append(made.pairs)
        shapes = [(tuple(x.shape), ORDER) for x in (q, k, v)]
        with Products() as made:
            attend_gradient(q, k, v, **settings, result=(o, total, torch.randn_like(o)), shapes=shapes)
        backward.append(made.pairs)
    assert forward == backward == [length * length / 2 / ranks] * ranks
