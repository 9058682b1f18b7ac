"""Eight bits: what a row is divided by, what rounding loses, and what a GPU multiplies."""

from __future__ import annotations

from math import frexp, inf, isnan, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.runtime.kernels.float8 import E4M3, LARGEST, MIN_EXPONENT, float8_matmul, scale_of, to_float8

MAGNITUDES = st.floats(2.0**-90, 2.0**100, width=32)


def dequantized(bits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return bits.view(E4M3).double() * scale


@given(largest=MAGNITUDES | st.integers(-80, 80).map(lambda k: LARGEST * 2.0**k))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_is_the_least_power_of_two_with_which_a_row_fits(largest: float, dtype: torch.dtype) -> None:
    scale = float(scale_of(torch.tensor(largest, dtype=dtype)))
    assert frexp(scale)[0] == 0.5
    assert largest / scale <= LARGEST < 2 * largest / scale


def test_rows_without_a_scale_of_their_own() -> None:
    found = scale_of(torch.tensor([0.0, inf, nan, 1e-44])).tolist()
    assert found[0] == 2.0**MIN_EXPONENT
    assert isnan(found[1])
    assert isnan(found[2])
    assert found[3] == 2.0**MIN_EXPONENT


@given(row=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=8), exponent=st.integers(-60, 60))
def test_rounding_is_to_three_bits_or_to_the_least_step(row: list[float], exponent: int) -> None:
    x = torch.tensor([row], dtype=torch.float32) * 2.0**exponent
    largest = x.abs().amax(1)
    scale = scale_of(largest).double()
    found = dequantized(to_float8(x, largest.unsqueeze(1)), scale)
    error = (found - x.double()).abs()
    assert bool((error <= torch.maximum(x.double().abs() * 2.0**-4, scale * 2.0**-10)).all())


@given(seed=st.integers(0, 1000))
def test_a_power_of_two_changes_nothing(seed: int) -> None:
    """Scales are exact: a tensor that is larger by a power of two has the same bits."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    first, second = (to_float8(each, each.abs().amax(1, keepdim=True)) for each in (x, x * 2.0**37))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_product_is_that_of_what_the_bits_stand_for(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 12).to(dtype), torch.randn(12, 7).to(dtype)
    rows, columns = a.abs().amax(1), b.abs().amax(0)
    left, right = to_float8(a, rows.unsqueeze(1)), to_float8(b, columns)
    found = float8_matmul(left, right, rows, columns, dtype)
    exact = dequantized(left, scale_of(rows).unsqueeze(1)) @ dequantized(right, scale_of(columns).unsqueeze(0))
    assert found.dtype == dtype
    assert torch.allclose(found.double(), exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    assert not torch.allclose(exact, a.double() @ b.double(), rtol=1e-3)


def test_what_is_not_finite_stays_so_in_its_row() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    a[1, 2] = inf
    rows, columns = a.abs().amax(1), b.abs().amax(0)
    found = float8_matmul(
        to_float8(a, rows.unsqueeze(1)), to_float8(b, columns), rows, columns, torch.float32
    ).isfinite()
    assert found.tolist() == [[True, True], [False, False], [True, True]]


@pytest.mark.gpu
def test_a_gpu_multiplies_what_the_cpu_does() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 96).bfloat16(), torch.randn(96, 32).bfloat16()
    rows, columns = a.abs().amax(1), b.abs().amax(0)
    given = (to_float8(a, rows.unsqueeze(1)), to_float8(b, columns), rows, columns)
    there = [each.cuda() for each in given]
    assert torch.equal(to_float8(a.cuda(), rows.cuda().unsqueeze(1)).cpu(), given[0])
    found = float8_matmul(*there, torch.bfloat16).cpu()
    assert torch.allclose(found.float(), float8_matmul(*given, torch.float32), rtol=2.0**-7, atol=2.0**-7)
