"""Products in eight bits, with scales by row that are powers of two (`partita.compiler.ops.float8`).

Everything but the rounding to e4m3 is exact in f32: dividing by a power of two, and the products of two such floats. So
a CPU computes what a GPU's tensor cores do, up to the order of sums.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from partita.runtime.kernels.compiling import is_tracing
from partita.runtime.kernels.products import matmul
from partita.runtime.kernels.registry import kernel

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # 1.75 * 2^8
# Of a float, as an integer: that, the bits of its fraction, the bias of its exponent.
BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
UNIT = 16  # `_scaled_mm` takes matrices whose sizes are multiples
CAPABILITY = (9, 0)  # the first whose products have scales by row
MIN_EXPONENT = -100  # of a scale: its inverse is finite


def scale_of(largest: Tensor) -> Tensor:
    """The least power of two by which a row, of this largest magnitude, must be divided to fit into e4m3, but not below
    2^LEAST_EXPONENT; NaN for a row that has an infinity or NaN, which its products then have as well. In f32 at least.
    """
    wide = largest if largest.dtype == torch.float64 else largest.float()
    integer, fraction, bias = BITS[wide.dtype]
    # The fraction that 448 has is carried into the exponent by whatever is larger; then the fraction is cut off.
    carried = wide.view(integer) + ((1 << fraction) // 4 - 1)
    power = (carried & (2 * bias + 1 << fraction)) - (8 << fraction)
    scale = power.clamp(min=bias + MIN_EXPONENT << fraction).view(wide.dtype)
    return scale + (wide - wide)  # which is zero, or NaN


@kernel
def to_float8(x: Tensor, largest: Tensor) -> Tensor:
    """The bits of x in e4m3, divided by the scale of its row; `largest` broadcasts against x."""
    inverse = scale_of(largest).reciprocal().to(x.dtype)  # a power of two as well, which any dtype has
    return (x * inverse).to(E4M3).view(torch.uint8)


@kernel
def float8_matmul(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """[m, k] times [k, n], both as bits, whose rows and columns have these largest magnitudes: [m] and [n]."""
    left, right = scale_of(rows).unsqueeze(1), scale_of(columns).unsqueeze(0)
    if dtype == torch.bfloat16 and _in_hardware(a, b):
        first, second = a.contiguous().view(E4M3), b.t().contiguous().view(E4M3).t()
        return torch._scaled_mm(first, second, scale_a=left, scale_b=right, out_dtype=dtype)
    # Every e4m3 is a bf16, so these are the same products, summed in f32 and rounded once.
    return matmul(_numbers(a, dtype), _numbers(b, dtype)).mul_(left.to(dtype)).mul_(right.to(dtype))


def _numbers(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """What bits stand for."""
    if bits.device.type != "cpu" or is_tracing():
        return bits.view(E4M3).to(dtype)
    # Several times as fast as torch's conversion on CPUs.
    return torch.index_select(_table(dtype), 0, bits.reshape(-1).int()).view(bits.shape)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """The number of each byte."""
    return torch.arange(256, dtype=torch.uint8).view(E4M3).to(dtype)


def _in_hardware(a: Tensor, b: Tensor) -> bool:
    """Whether the device multiplies such matrices in eight bits."""
    if a.device.type != "cuda" or any(size % UNIT for size in (*a.shape, *b.shape)):
        return False
    return torch.cuda.get_device_capability(a.device) >= CAPABILITY
