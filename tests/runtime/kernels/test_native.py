"""Kernels in C++ compute what torch's operations do, up to rounding, for all sizes of what is last in a row."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from partita.runtime.kernels import products, rows
from partita.runtime.kernels.native import attention, library
from partita.runtime.kernels.optimizers import adamw, adamw_of_each, sum_of_squares
from partita.runtime.kernels.pointwise import gelu, gelu_gradient
from partita.runtime.transports.lines import same_bits

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "c++") is None, reason="no C++ compiler")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    # Of sums of terms that cancel, relative to the largest.
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=3e-6 * max(1.0, largest))


def attend_exactly(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


@needs_compiler
def test_they_are_compiled_where_there_is_a_compiler() -> None:
    assert library.library() is not None


@needs_compiler
@given(st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 70)] * 2, st.integers(2, 40)), st.booleans())
def test_attention(sizes: tuple[int, int, int, int, int], causal: bool) -> None:
    batch, heads, queries, keys, size = sizes
    q, d = (drawn(batch, queries, heads, size, seed=seed).transpose(1, 2) for seed in (1, 2))
    k, v = (drawn(batch, keys, heads, size, seed=seed).transpose(1, 2) for seed in (3, 4))
    with threads(1):
        found = attention.attended(q, k, v, causal, 0.3)
        assert found is not None
        gradients = attention.gradients(d, q, k, v, *found, causal, 0.3)
    assert gradients is not None
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = attend_exactly(*exact, causal, 0.3)
    expected[0].backward(d.double())
    for one, other in zip(found, expected, strict=True):
        close(one, other.detach())
    for one, each in zip(gradients, exact, strict=True):
        assert each.grad is not None
        close(one, each.grad)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
def test_a_head_has_the_same_bits_alone_and_among_others(causal: bool) -> None:
    q, k, v = (drawn(3, 2, 37, 18, seed=seed) for seed in range(3))
    found, alone = (
        attention.attended(*[x[part] for x in (q, k, v)], causal, 0.3) for part in (slice(0, 3), slice(1, 2))
    )
    assert found is not None
    assert alone is not None
    assert all(same_bits(one[1:2], other) for one, other in zip(found, alone, strict=True))


@needs_compiler
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("plus", [False, True])
def test_norms(size: int, center: bool, plus: bool) -> None:
    x, d, other, scale = (
        drawn(3, 5, size) + 2,
        drawn(3, 5, size, seed=1),
        drawn(3, 5, size, seed=2),
        drawn(size, seed=3),
    )
    found, expected = (
        _norms(*(each.to(dtype) for each in (x, d, other, scale)), center, plus)
        for dtype in (torch.float32, torch.float64)
    )
    for one, each in zip(found, expected, strict=True):
        close(one, each)


@needs_compiler
def test_norms_by_several_threads() -> None:
    x, d, scale = drawn(500, 70), drawn(500, 70, seed=1), drawn(70, seed=2)
    with threads(2):
        found = _norms(x, d, d, scale, True, False)
    for one, each in zip(found, _norms(*(each.double() for each in (x, d, d, scale)), True, False), strict=True):
        close(one, each)


def _norms(x: Tensor, d: Tensor, other: Tensor, scale: Tensor, center: bool, plus: bool) -> tuple[Tensor, ...]:
    y, rate = rows.normalize(x, (-1,), 1e-2, center)
    added = other if plus else None
    scaled = rows.layer_norm_gradient if center else rows.rms_norm_gradient
    return (
        y,
        rate,
        rows.normalize_gradient(d, y, rate, (-1,), center, added),
        *scaled(d, y, rate, scale, (-1,), added),
    )


@needs_compiler
@given(st.integers(1, 5), st.integers(1, 40), st.lists(st.integers(-3, 43), min_size=5, max_size=5), st.integers(0, 9))
def test_cross_entropy(count: int, classes: int, ids: list[int], start: int) -> None:
    """Of targets of which some are out of range, and of a shard whose first class is `start`."""
    logits, d, targets = 9 * drawn(count, classes), drawn(count, seed=1), torch.tensor(ids[:count])
    (loss, denominator), wide = rows.nll(logits, targets, guarded=True), logits.double()
    hot = (targets.unsqueeze(-1) == torch.arange(classes)).double()
    close(denominator, torch.logsumexp(wide, -1))
    close(loss, torch.logsumexp(wide, -1) - (hot * wide).sum(-1))
    expected = torch.softmax(wide, -1) - hot
    close(rows.nll_gradient(d, logits, targets, denominator), d.double().unsqueeze(-1) * expected)
    close(rows.nll_gradient(0.3, logits, targets + start, denominator, start), 0.3 * expected)
    alone = rows.nll(logits[-1:], targets[-1:], guarded=True)
    assert all(same_bits(one[-1:], other) for one, other in zip((loss, denominator), alone, strict=True))


@needs_compiler
def test_a_small_loss_is_precise() -> None:
    logits = torch.tensor([[1000.0, 990.0, 985.0]])
    loss, _ = rows.nll(logits, torch.tensor([0]))
    exact = -torch.log_softmax(logits.double(), -1)[0, 0]
    torch.testing.assert_close(loss.double()[0], exact, rtol=1e-2, atol=0.0)


@needs_compiler
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (1, 17), (17, 1), (5, 70), (16, 64), (33, 129), (300, 200)])
def test_a_matrix_is_turned(shape: tuple[int, int], count: int) -> None:
    source = drawn(*shape)
    with threads(count):
        found = products._in_rows(source.t())
    assert found.is_contiguous()
    assert torch.equal(found, source.t())
    assert torch.equal(products._in_rows(drawn(9, 9)[:7, :5].t()), drawn(9, 9)[:7, :5].t())


def drawn_updates(*sizes: int) -> list[list[Tensor]]:
    """Parameters, gradients, means and squares of such sizes."""
    found = [[drawn(size, seed=4 * i + kind) for i, size in enumerate(sizes)] for kind in range(4)]
    return [*found[:3], [each.square() for each in found[3]]]


NUMBERS = (0.03, 3, 0.7, 0.95, 0.1)  # rate, update, betas, eps


@needs_compiler
@pytest.mark.parametrize("decay", [0.0, 0.4])
@pytest.mark.parametrize("factor", [None, 0.3])
def test_adamw(decay: float, factor: float | None) -> None:
    """It is torch's, by which it is computed in f64; and leaves gradients as they are."""
    found = drawn_updates(1, 16, 37, 1000)
    exact = [[each.double() for each in own] for own in found]
    given = [each.clone() for each in found[1]]
    adamw_of_each(*found, *NUMBERS, decay, None if factor is None else torch.tensor(factor, dtype=torch.float64))
    if factor is not None:
        exact[1] = [each * factor for each in exact[1]]
    adamw_of_each(*exact, *NUMBERS, decay)
    for one, other in zip((found[0], *found[2:]), (exact[0], *exact[2:]), strict=True):
        for each, expected in zip(one, other, strict=True):
            close(each, expected)
    assert all(map(torch.equal, found[1], given))


@needs_compiler
def test_an_update_has_the_same_bits_alone_in_parts_and_by_any_threads() -> None:
    """As layouts have it that split parameters, or that clip by an operation of its own."""
    sizes = 50_000, 37
    together, alone, parts = (drawn_updates(*sizes) for _ in range(3))
    factor = torch.tensor(1 / 3, dtype=torch.float64)
    with threads(2):
        adamw_of_each(*together, *NUMBERS, 0.1, factor)
    with threads(1):
        for parameter, gradient, mean, square in zip(*alone, strict=True):
            adamw(parameter, gradient * factor.float(), mean, square, *NUMBERS, 0.1)
        for part in (slice(0, 19), slice(19, None)):
            adamw_of_each(*[[each[part] for each in own] for own in parts], *NUMBERS, 0.1, factor)
    for kind in (0, 2, 3):
        assert all(map(same_bits, together[kind], alone[kind]))
        assert all(map(same_bits, together[kind], parts[kind]))


@needs_compiler
@pytest.mark.parametrize("sizes", [(1,), (37, 16), (8_192, 8_193, 5), (100_000, 3)])
def test_a_sum_of_squares(sizes: Sequence[int]) -> None:
    tensors = [drawn(size, seed=i) for i, size in enumerate(sizes)]
    expected = sum(float(each.double().square().sum()) for each in tensors)
    with threads(1):
        found = sum_of_squares(tensors)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(expected, rel=1e-6)
    with threads(2):
        assert same_bits(found, sum_of_squares(tensors))
    lying_apart = [drawn(2, size)[0:2:2] if size % 2 else drawn(size, 2).t()[:1] for size in sizes]
    exact = sum(float(each.double().square().sum()) for each in lying_apart)
    assert float(sum_of_squares(lying_apart)) == pytest.approx(exact, rel=1e-5)


@needs_compiler
@pytest.mark.parametrize("function", [gelu, lambda x: gelu_gradient(torch.ones_like(x), x)], ids=["gelu", "gradient"])
def test_what_is_not_finite_stays_so(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([float("nan"), 1.0, 100.0, -100.0, 0.0])
    found = function(x)
    assert torch.equal(found.isnan(), torch.tensor([True, False, False, False, False]))
    close(found[1:], function(x.double())[1:])


def test_without_a_library_torch_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = drawn(4, 33)
    by_library, squares = gelu(x), sum_of_squares([x, x[0]])
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    for variable, value in (("PARTITA_NATIVE", "0"), ("CXX", "no-such-compiler"), ("CXX", "false")):
        with monkeypatch.context() as patched:
            patched.setenv(variable, value)
            library._found.cache_clear()
            assert library.library() is None
            assert value in library.why_none()
            torch.testing.assert_close(gelu(x), by_library, rtol=1e-5, atol=1e-6)
            assert torch.equal(products._in_rows(x.t()), x.t())
            assert float(sum_of_squares([x, x[0]])) == pytest.approx(float(squares), rel=1e-6)
    library._found.cache_clear()


@needs_compiler
def test_a_library_in_which_others_may_write_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = library._compiled(shutil.which(os.environ.get("CXX") or "c++") or "")
    for folder, file, loaded in ((0o700, 0o700, True), (0o777, 0o700, False), (0o700, 0o777, False)):
        tmp_path.chmod(folder)
        # Under a name of its own: what is written over a library that is loaded is run.
        (copy := Path(shutil.copy(own, tmp_path / f"{folder:o}-{file:o}.so"))).chmod(file)
        monkeypatch.setattr(library, "_compiled", lambda compiler, copy=copy: copy)
        library._found.cache_clear()
        assert (library.library() is not None) == loaded
        assert (library.why_none() == "") == loaded
    library._found.cache_clear()
