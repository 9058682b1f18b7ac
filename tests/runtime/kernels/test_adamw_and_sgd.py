"""Updates equal torch's own, step by step, however their tensors lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch

from partita.runtime.kernels.optimizers import adamw, adamw_of_each, sgd

STEPS = 4
Laid = Callable[[torch.Tensor], torch.Tensor]


def straight(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def sliced(x: torch.Tensor) -> torch.Tensor:
    """As a part of something larger: such a tensor takes another path than torch's fused kernel."""
    larger = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    part = larger[..., : x.shape[-1]]
    part.copy_(x)
    return part


def drawn(seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A parameter, and a gradient for each step."""
    generator = torch.Generator().manual_seed(seed)
    first, *gradients = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(STEPS + 1))
    return first, gradients


def torchs(kind: type[torch.optim.Optimizer], first: torch.Tensor, gradients: list[torch.Tensor], **arguments: object):
    """The parameter after each step of torch's optimizer, whose rate grows from step to step."""
    parameter = first.clone().requires_grad_()
    optimizer = kind([parameter], **arguments)
    for number, gradient in enumerate(gradients, 1):
        optimizer.param_groups[0]["lr"] = 0.03 * number
        parameter.grad = gradient.clone()
        optimizer.step()
        yield parameter.detach().clone()


def test_adamw_of_each_parameter_is_that_of_one():
    """Also of those that torch's kernel does not take."""
    forms = straight, sliced, straight
    first, gradients = drawn(1)
    alone, together = (
        [[laid(x) for laid in forms] for x in (first, torch.zeros_like(first), torch.ones_like(first))] for _ in "ab"
    )
    constants = 0.03, 2, 0.7, 0.95, 0.3, 0.4
    adamw_of_each(together[0], gradients[:3], *together[1:], *constants)
    for parameter, gradient, mean, square in zip(alone[0], gradients[:3], *alone[1:], strict=True):
        adamw(parameter, gradient, mean, square, *constants)
    for expected, found in zip(alone, together, strict=True):
        assert all(map(torch.equal, found, expected))


def test_gradients_are_clipped_in_runs_no_larger_than_the_largest(monkeypatch: pytest.MonkeyPatch):
    """Also of those that torch's kernel does not take; gradients are left as they are."""
    counts: list[int] = []
    multiply = torch._foreach_mul

    def counted(tensors: list[torch.Tensor], factor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        counts.append(sum(each.numel() for each in tensors))
        return multiply(tensors, factor)

    monkeypatch.setattr(torch, "_foreach_mul", counted)
    first, gradients = drawn(1)
    shapes = [(2, 3), (4, 3), (3,), (2, 3), (5,), (6,), (4, 2)]
    laid = [straight] * 6 + [sliced]
    factor, constants = torch.tensor(0.3, dtype=torch.float64), (0.03, 2, 0.7, 0.95, 0.3, 0.4)

    def tensors(x: torch.Tensor) -> list[torch.Tensor]:
        return [form(x.reshape(-1)[: prod(shape)].reshape(shape)) for form, shape in zip(laid, shapes, strict=True)]

    found, expected = ([tensors(x) for x in (first, gradients[0], first / 2, first.square())] for _ in "ab")
    adamw_of_each(*found, *constants, factor)
    for parameter, gradient, mean, square in zip(*expected, strict=True):
        adamw(parameter, gradient * factor, mean, square, *constants)
    for kind in (0, 2, 3):
        assert all(map(torch.equal, found[kind], expected[kind]))
    assert all(map(torch.equal, found[1], tensors(gradients[0])))
    assert counts == [6, 12, 9, 11]


@pytest.mark.parametrize("laid", [straight, sliced])
@pytest.mark.parametrize("decay", [0.0, 0.4])
def test_adamw(laid: Laid, decay: float):
    first, gradients = drawn(1)
    # An epsilon that counts beside the root of the second moment.
    arguments = {"betas": (0.7, 0.95), "eps": 0.3, "weight_decay": decay}
    expected = torchs(torch.optim.AdamW, first, gradients, lr=0.0, **arguments)
    parameter, mean, square = laid(first), laid(torch.zeros_like(first)), laid(torch.zeros_like(first))
    for number, (gradient, wanted) in enumerate(zip(gradients, expected, strict=True), 1):
        adamw(parameter, gradient, mean, square, 0.03 * number, number, 0.7, 0.95, 0.3, decay)
        torch.testing.assert_close(parameter, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("laid", [straight, sliced])
@pytest.mark.parametrize("decay", [0.0, 0.4])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.8, False), (0.8, True)])
def test_sgd(laid: Laid, decay: float, momentum: float, nesterov: bool):
    first, gradients = drawn(2)
    arguments = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    expected = torchs(torch.optim.SGD, first, gradients, lr=0.0, **arguments)
    parameter, buffer = laid(first), laid(torch.zeros_like(first)) if momentum else None
    for number, (gradient, wanted) in enumerate(zip(gradients, expected, strict=True), 1):
        sgd(parameter, gradient, buffer, 0.03 * number, momentum, nesterov, decay)
        torch.testing.assert_close(parameter, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [None, 0.3])
@pytest.mark.parametrize("cut", ["columns", "turned"])
def test_a_gradient_that_is_part_of_another_tensor_updates_to_the_bit_as_a_dense_one(cut: str, factor: float | None):
    """Copies of a parameter have one or the other."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(40, 60, generator=generator)
    part = whole[:, 7:37] if cut == "columns" else whole[:30].T
    by = None if factor is None else torch.tensor(factor)
    updated = []
    for gradient in (part, part.contiguous()):
        tensors = [torch.full(part.shape, start) for start in (0.5, 0.01, 0.2)]
        before = gradient.clone()
        adamw_of_each(*([each] for each in (tensors[0], gradient, *tensors[1:])), 0.1, 3, 0.9, 0.99, 1e-8, 0.1, by)
        assert torch.equal(gradient, before)
        updated.append(tensors)
    for one, other in zip(*updated, strict=True):
        assert torch.equal(one, other)
