"""AdamW with quantized states.

An element of a state is stored as a code of eight bits: an index into the *dynamic map*, whose values times the largest
magnitude of the element's block are the numbers that can be represented. The map is that of Dettmers et al. (8-bit
Optimizers via Block-wise Quantization, arXiv 2110.02861, section 1.3; `create_dynamic_map` of bitsandbytes): decimal
exponents from 0 to -6, with a fraction that has one bit more for each exponent that is larger by one.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from partita.runtime.declared import waits
from partita.runtime.kernels.optimizers import adam_step
from partita.runtime.kernels.registry import kernel

EXPONENTS = 7
# What a block of zeros is divided by.
MIN_SCALE = 1e-12


def dynamic_map(signed: bool, dtype: torch.dtype = torch.float64) -> list[float]:
    """The 256 values of the dynamic map, ascending, as arithmetic in a dtype has them; that of bitsandbytes is f32."""
    values = [0.0, 1.0]
    for exponent in range(EXPONENTS):
        bounds = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1, dtype=dtype)
        middles = (10.0 ** (exponent + 1 - EXPONENTS) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        values += [*middles, *(-each for each in middles)] if signed else middles
    return sorted(values)


MAPS = {signed: dynamic_map(signed) for signed in (False, True)}


@lru_cache(maxsize=16)
@waits("a table, made once")
def _tables(signed: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The map, and the bounds between what is nearest to one value and to the next."""
    values = torch.tensor(MAPS[signed], dtype=dtype, device=device)
    return values, (values[1:] + values[:-1]) / 2


def _blocks(x: Tensor, block: int) -> Tensor:
    """The elements in order, a block in each row; the last is filled up with zeros."""
    flat = x.reshape(-1)
    missing = -flat.numel() % block
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, block)


def dequantized(codes: Tensor, scales: Tensor, block: int, signed: bool) -> Tensor:
    """The numbers that codes and scales stand for, in the dtype of the scales."""
    values, _ = _tables(signed, scales.dtype, scales.device)
    scaled = _blocks(values[codes.int()], block) * scales.reshape(-1, 1)
    return scaled.view(-1)[: codes.numel()].view(codes.shape)


def quantize(x: Tensor, codes: Tensor, scales: Tensor, block: int, signed: bool) -> None:
    """Write the nearest numbers that codes can stand for, each block scaled by its largest magnitude."""
    _, bounds = _tables(signed, x.dtype, x.device)
    blocks = _blocks(x, block)
    scale = blocks.abs().amax(1, keepdim=True)
    indices = torch.bucketize(blocks / scale.clamp(min=MIN_SCALE), bounds, out_int32=True)
    scales.copy_(scale.view(scales.shape))
    codes.copy_(indices.view(-1)[: codes.numel()].view(codes.shape))


@kernel
def adamw_8bit(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    mean_scale: Tensor,
    square: Tensor,
    square_scale: Tensor,
    rate: float,
    update: int,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    block: int,
) -> tuple[Tensor, ...]:
    """One AdamW update in place; the new states are rounded only after the parameter has been updated with them."""
    mean_now = dequantized(mean, mean_scale, block, signed=True).lerp_(gradient, 1 - beta1)
    square_now = dequantized(square, square_scale, block, signed=False).lerp_(gradient.square(), 1 - beta2)
    adam_step(parameter, mean_now, square_now, rate, update, beta1, beta2, eps, decay)
    quantize(mean_now, mean, mean_scale, block, signed=True)
    quantize(square_now, square, square_scale, block, signed=False)
    return parameter, mean, mean_scale, square, square_scale
