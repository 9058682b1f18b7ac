"""Optimizers are those of others: twenty steps on a parameter, equal to 1e-6."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from partita.compiler.graph import Builder
from partita.compiler.optimizers.registry import OPTIMIZERS, Trained
from partita.compiler.passes.readers import Matrix
from partita.dsl.types import Axis, Type
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.kernels.quantized import dequantized, quantize
from tests.compiler.interpret import prepare

STEPS, RATE = 20, 0.01


def start(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 4


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    """Of changing size: some steps are clipped."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 + step)) * (1 + step % 3)


def ours(name: str, shape: tuple[int, ...], decay: float = 0.0, **arguments: Any) -> Tensor:
    """The parameter after all steps, by the operations that the compiler would emit."""
    type = Type("f32", tuple(Axis(f"a{i}", size) for i, size in enumerate(shape)))
    record = OPTIMIZERS[name]
    given = {each.name: each.default for each in record.settings} | arguments
    # A weight as torch keeps it, [out, in]: the last axis is summed.
    matrix = Matrix(type.names[1:], (), type.names[:1]) if len(shape) > 1 else None
    op = record.update(given, Trained(type=type, decay=decay, matrix=matrix, rows=()))
    build = Builder()
    values = [build.value(f"v{i}", each) for i, each in enumerate((type, type, *op.state_types(type)))]
    operands = op.operands(build, type, values[0], values[1], values[2:])
    results = build.apply_all(op, *values, *operands)
    tensors = [start(shape), start(shape), *(torch.zeros(v.type.shape, dtype=DTYPES[v.type.dtype]) for v in values[2:])]
    for step in range(1, STEPS + 1):
        tensors[1] = gradient(shape, step)
        prepare(build.nodes, values, results, step, RATE)(tensors)
    return tensors[0]


def theirs(make: Any, shape: tuple[int, ...]) -> Tensor:
    """The parameter after all steps of another implementation."""
    parameter = torch.nn.Parameter(start(shape))
    optimizer = make([parameter])
    for step in range(1, STEPS + 1):
        parameter.grad = gradient(shape, step)
        optimizer.step()
    return parameter.detach()


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7,)])
def test_adafactor_is_that_of_torch(shape: tuple[int, ...]):
    def make(parameters):
        return torch.optim.Adafactor(parameters, lr=RATE, eps=(1e-7, 1e-3), weight_decay=0.1)

    same(ours("adafactor", shape, 0.1), theirs(make, shape))


@pytest.mark.few(4)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_muon_is_that_of_torch_in_whole_precision(
    shape: tuple[int, ...], adjust: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
):
    # torch orthogonalizes in bf16.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)

    def make(parameters):
        return torch.optim.Muon(parameters, lr=RATE, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)

    same(ours("muon", shape, 0.1, nesterov=nesterov, adjust=adjust), theirs(make, shape))


def test_lion_is_that_of_its_authors_formula():
    """Algorithm 2 of Chen et al., as lion-pytorch has it."""
    parameter, mean = start((6, 10)), torch.zeros(6, 10)
    for step in range(1, STEPS + 1):
        now = gradient((6, 10), step)
        parameter.mul_(1 - RATE * 0.1)
        parameter.add_(mean.clone().mul_(0.9).add(now, alpha=0.1).sgn_(), alpha=-RATE)
        mean.mul_(0.99).add_(now, alpha=0.01)
    same(ours("lion", (6, 10), 0.1), parameter)


@pytest.mark.parametrize("eps", [1e-10, 0.5])
def test_adagrad_is_that_of_torch(eps: float):
    def make(parameters):
        return torch.optim.Adagrad(parameters, lr=RATE, eps=eps)

    same(ours("adagrad", (6, 10), eps=eps), theirs(make, (6, 10)))


@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_rowwise_adagrad_with_rows_of_one_element_is_adagrad(eps: float):
    def make(parameters):
        return torch.optim.Adagrad(parameters, lr=RATE, eps=eps)

    same(ours("rowwise_adagrad", (7, 1), eps=eps), theirs(make, (7, 1)))
    same(ours("rowwise_adagrad", (7,), eps=eps), theirs(make, (7,)))


@pytest.mark.parametrize("magnitude", [1.0, 1e-4, 1e-10])
def test_eight_bits_are_relative_to_their_block(magnitude: float):
    """However small it is, as squares of gradients are; and the last block is not full."""
    x = start((5, 20)).abs() * magnitude
    codes, scales = torch.zeros(x.shape, dtype=torch.uint8), torch.zeros(4)
    quantize(x, codes, scales, 32, signed=False)
    assert float((dequantized(codes, scales, 32, signed=False) - x).abs().max()) < 0.02 * float(x.max())


@pytest.mark.soak
def test_eight_bits_are_those_of_torchao():
    """But for an element between two codes, which rounding sends to the other."""
    optim = pytest.importorskip("torchao.optim")
    with torch.compiler.set_stance("force_eager"):
        expected = theirs(lambda parameters: optim.AdamW8bit(parameters, lr=RATE, weight_decay=0.1), (32, 256))
    difference = (ours("adamw_8bit", (32, 256), 0.1) - expected).abs()
    assert float(difference.max()) < 1e-4
    assert float(difference.flatten().sort().values[-10]) < 2e-6
