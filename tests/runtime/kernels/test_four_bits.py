"""Matrices in four bits, against numpy, and bit for bit against bitsandbytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from partita.compiler.ops.four_bits import CODES, FACTORS, OFFSET, SCALES, FourBits
from partita.dsl.types import Axis, Type
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.kernels.four_bits import MAP, QUANTILES, dequantized, quantize
from tests.marks import examples


def form_of(shape: tuple[int, ...], order: tuple[int, ...], block: int, dtype: str = "f32") -> FourBits:
    axes = tuple(Axis(name, size) for name, size in zip("abcd", shape, strict=False))
    return FourBits(Type(dtype, axes), tuple("abcd"[i] for i in order), block)


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return 0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def forms(draw: st.DrawFn) -> FourBits:
    shape = tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=3)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    return form_of(shape, order, draw(st.integers(1, 40)), draw(st.sampled_from(["f32", "bf16"])))


@given(form=forms(), seed=st.integers(0, 100))
@examples(50)
def test_each_element_is_the_nearest_that_its_block_has(form: FourBits, seed: int):
    x = drawn(form.whole.shape, seed).to(DTYPES[form.whole.dtype])
    parts = quantize(x, form)
    assert {name: tuple(each.shape) for name, each in parts.items()} == {
        name: type.shape for name, type in form.types.items()
    }
    found = dequantized(parts, form)
    assert found.shape == x.shape
    assert found.dtype == x.dtype
    order = [form.whole.names.index(name) for name in form.order]
    rows = x.float().permute(order).numpy().reshape(-1, x.shape[order[-1]])
    seen = found.float().permute(order).numpy().reshape(rows.shape)
    table, eight = np.array(QUANTILES, np.float32), np.array(MAP, np.float32)
    starts = range(0, rows.shape[1], form.length)
    largest = np.stack([np.abs(rows[:, i : i + form.length]).max(1) for i in starts], 1)
    offset = largest.mean()
    # A scale is off by at most half of the widest gap of the dynamic map, of the largest in its group.
    gap = np.diff(eight).max() / 2 * np.abs(largest - offset).max()
    for column, start in enumerate(starts):
        block, its = rows[:, start : start + form.length], seen[:, start : start + form.length]
        scale = largest[:, column : column + 1]
        nearest = table[np.abs(block[..., None] / np.maximum(scale, 1e-38)[..., None] - table).argmin(-1)]
        assert np.all(np.abs(its - nearest * scale) <= gap * 1.01 + 0.01 * np.abs(its) + 1e-7)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("shape", "order"),
    [((512, 1024), (1, 0)), ((256, 8, 2, 64), (1, 2, 3, 0)), ((8, 2, 64, 256), (3, 0, 1, 2)), ((4096, 300), (1, 0))],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_it_is_what_bitsandbytes_makes_of_a_linear_layer(shape: tuple[int, ...], order: tuple[int, ...], dtype: str):
    functional = pytest.importorskip("bitsandbytes.functional")
    form = form_of(shape, order, 64, dtype)
    x = drawn(shape).to(DTYPES[dtype])
    parts = quantize(x, form)
    linear = x.permute(order).contiguous()
    codes, state = functional.quantize_4bit(linear, blocksize=64, compress_statistics=True, quant_type="nf4")
    grid = [form.scales.names.index(name) for name in form.grid]
    assert torch.equal(parts[CODES].permute([*grid, len(grid)]).reshape(-1), codes.view(-1))
    assert torch.equal(parts[OFFSET], state.offset)
    assert torch.equal(parts[FACTORS].view(form.beside(form.scales)).permute(grid).reshape(-1), state.state2.absmax)
    # Its processor code looks eight bits up in a coarser table, and is not always nearest: ours are, and it reads them.
    eight, own, its = state.state2.code, parts[SCALES].permute(grid).reshape(-1), state.absmax.view(-1)
    blocks = linear.float().view(-1, 64).abs().amax(1) - state.offset
    scaled = (blocks.view(-1, 256) / state.state2.absmax[:, None]).view(-1)
    assert (own == its).float().mean() > 0.99
    assert torch.all((scaled - eight[own.int()]).abs() <= (scaled - eight[its.int()]).abs() + 1e-6)
    state.absmax = own.contiguous()
    theirs = functional.dequantize_4bit(codes, state).view(linear.shape)
    assert torch.equal(dequantized(parts, form).permute(order), theirs.to(x.dtype))
