"""Pointwise kernels of several passes: the numbers do not depend on how a tensor lies, or is gone over."""

from __future__ import annotations

import pytest
import torch

from partita.runtime.kernels import pointwise
from partita.runtime.kernels.pointwise import BLOCK, gelu, gelu_gradient
from partita.runtime.transports.lines import same_bits


@pytest.fixture(autouse=True, params=[True, False], ids=["native", "torch"])
def _by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels in C++ where there is a compiler, and by torch's operations."""
    if not request.param:
        monkeypatch.setattr(pointwise, "native", lambda x: None)


@pytest.mark.parametrize("shape", [(3, 7), (1, BLOCK + 1), (2, BLOCK), (129, 1021)])
def test_gelu(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    d, x = (torch.randn(shape, generator=generator) * 3 for _ in range(2))
    found = gelu_gradient(d, x)
    # Where one of them lies otherwise, all passes go over the whole.
    assert same_bits(found, gelu_gradient(d.t().contiguous().t(), x))
    assert same_bits(found, gelu_gradient(d.t(), x.t()).t().contiguous())
    exact = x.double().requires_grad_()
    value = torch.nn.functional.gelu(exact, approximate="tanh")
    value.backward(d.double())
    assert exact.grad is not None
    torch.testing.assert_close(found, exact.grad.float(), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(gelu(x), value.detach().float(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(6, 1), (1,), ()])
def test_gelu_gradient_where_one_operand_is_repeated(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    d, x = torch.randn(4, 6, 5, generator=generator), torch.randn(shape, generator=generator)
    repeated = x.expand(d.shape).contiguous()
    assert same_bits(gelu_gradient(d, x), gelu_gradient(d, repeated))
    torch.testing.assert_close(gelu_gradient(x, d), gelu_gradient(repeated, d))
