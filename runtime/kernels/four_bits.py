"""Matrices in four bits, made and read (`partita.compiler.ops.four_bits`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from partita.compiler.ops.four_bits import CODES, FACTORS, OFFSET, SCALES, SLAB, FourBits
from partita.runtime.declared import waits
from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.kernels.quantized import dynamic_map
from partita.runtime.kernels.registry import kernel

# The quantiles of QLoRA's NF4: 16 values of which each is as likely, of numbers that are distributed normally, and one
# is zero (arXiv:2305.14314, appendix E; as bitsandbytes has them).
QUANTILES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
MAP = dynamic_map(True, torch.float32)
LEAST = 1e-38  # what a block of zeros is divided by


@lru_cache(maxsize=8)
@waits("a table, made once")
def _pairs(device: torch.device) -> Tensor:
    """The two numbers of each byte: f32[256, 2]."""
    values = torch.tensor(QUANTILES, device=device)
    return torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)


@lru_cache(maxsize=8)
@waits("a table, made once")
def _map(device: torch.device) -> Tensor:
    return torch.tensor(MAP, device=device)


@kernel
def nf4(
    codes: Tensor,
    scales: Tensor,
    factors: Tensor,
    offset: Tensor,
    position: int,
    size: int,
    block: int,
    dtype: torch.dtype,
) -> Tensor:
    """The matrix: along the dimension `position` it has `size` elements, where codes and scales have blocks of `block`.
    `factors` have as many dimensions as scales, and parts of their sizes.
    """
    for dim, parts in enumerate(factors.shape):
        if 1 < parts < scales.shape[dim]:
            factors = factors.repeat_interleave(scales.shape[dim] // parts, dim)
    largest = _map(scales.device)[scales.int()] * factors + offset
    shape = [*scales.shape]
    shape[position] = size
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    first = scales.shape[0]
    rows = max(1, SLAB * first // max(2 * codes.numel(), 1))
    for start in range(0, first, rows):
        some = slice(start, start + rows)
        # A byte more may be read of each block than it has elements.
        elements = _pairs(codes.device)[codes[some].int()].flatten(-2)[..., :block] * largest[some].unsqueeze(-1)
        whole = elements.movedim(-1, position + 1).flatten(position, position + 1)
        if position:
            out[some] = whole.narrow(position, 0, size)
        else:
            end = min(size, (start + rows) * block)
            out[start * block : end] = whole[: end - start * block]
    return out


def dequantized(parts: Mapping[str, Tensor], form: FourBits) -> Tensor:
    """The matrix of parts that `quantize` has made."""
    factors = parts[FACTORS].view(form.beside(form.scales))
    place, size, dtype = form.whole.position(form.blocked), form.whole.axis(form.blocked).size, form.whole.dtype
    return nf4(parts[CODES], parts[SCALES], factors, parts[OFFSET], place, size, form.length, DTYPES[dtype])


def quantize(x: Tensor, form: FourBits) -> dict[str, Tensor]:
    """The parts of a matrix of the form, in the order of its axes."""
    axes = form.whole.names
    flat = x.float().permute([axes.index(name) for name in form.order]).contiguous()
    grid = form.scales.names
    length, size = form.length, flat.shape[-1]
    missing = -size % length
    blocks = torch.nn.functional.pad(flat, (0, missing)).reshape(*flat.shape[:-1], -1, length)
    largest = blocks.abs().amax(-1)
    values = torch.tensor(QUANTILES, device=x.device)
    scaled = (blocks * (1.0 / largest.clamp(min=LEAST)).unsqueeze(-1)).clamp(-1, 1)
    indices = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)
    indices = torch.nn.functional.pad(indices, (0, length % 2))
    codes = indices[..., ::2] << 4 | indices[..., 1::2]
    offset = largest.mean()
    scales, factors = _scales(largest - offset, form)
    order = [form.grid.index(name) for name in grid]
    return {
        CODES: codes.permute([*order, len(order)]).contiguous(),
        SCALES: scales.permute(order).contiguous(),
        FACTORS: factors.permute(order).reshape(form.factors.shape).contiguous(),
        OFFSET: offset,
    }


def _scales(scales: Tensor, form: FourBits) -> tuple[Tensor, Tensor]:
    """Scales less their mean in eight bits, and the factor of each group of them, with as many dimensions."""
    spans = [form.spans[name] for name in form.grid]
    groups = [size // span for size, span in zip(scales.shape, spans, strict=True)]
    split = scales.reshape([each for pair in zip(groups, spans, strict=True) for each in pair])
    factors = split.abs().amax([2 * i + 1 for i in range(len(spans))], keepdim=True)
    values = _map(scales.device)
    scaled = (split * (1.0 / factors.clamp(min=LEAST))).clamp(-1, 1)
    codes = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)
    return codes.reshape(scales.shape), factors.reshape(groups)
