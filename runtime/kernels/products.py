"""Large matrix products.

On a CPU, torch multiplies f32 matrices with MKL, which has AVX-512 kernels for Intel processors and falls back to AVX2
on others. oneDNN, which torch includes, has them for every vendor and is twice as fast there; on Intel, MKL is as fast
and has less overhead. The choice depends on the processor and the dtype only, never on measurements: runs are
reproducible bitwise.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from partita.runtime.kernels.compiling import is_tracing
from partita.runtime.kernels.native.library import native
from partita.runtime.kernels.registry import kernel

_mkldnn: Any = torch.backends.mkldnn
_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _by_intel(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether, according to Linux, this is an Intel processor."""
    with suppress(OSError), cpuinfo.open() as lines:
        return any(line.startswith("vendor_id") and "GenuineIntel" in line for line in lines)
    return False


ONEDNN = _mkldnn.is_available() and _AVX512 and not _by_intel()
_linear: Any = torch.ops.mkldnn._linear_pointwise.default if _mkldnn.is_available() else None


def by_onednn(a: Tensor) -> bool:
    """Whether products with a matrix are oneDNN's."""
    return ONEDNN and a.dtype == torch.float32 and a.device.type == "cpu"


def _add_wide(total: Tensor, a: Tensor, b: Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """By oneDNN, whose weight argument is the transposed right matrix, and which would copy a transposed left one."""
    if a.stride(0) == 1:
        a = _in_rows(a)
    return cast(Tensor, _linear(a, b.t(), None, "none", [], ""))


def _in_rows(a: Tensor) -> Tensor:
    """A matrix that lies column by column, row by row."""
    functions, source = native(a), a.t()
    if functions is None or not source.is_contiguous():
        return a.contiguous()
    copied = a.new_empty(a.shape)
    functions.transpose(copied.data_ptr(), source.data_ptr(), *source.shape)
    return copied


_make_library: Any = torch.library.Library
_library = _make_library("partita", "FRAGMENT")
_library.define("matmul(Tensor a, Tensor b) -> Tensor")
_library.impl("matmul", _product, "CPU")
# GPUs add products of bf16 to f32 without rounding them first.
_library.define("add_matmul(Tensor(a!) total, Tensor a, Tensor b) -> ()")
_library.impl("add_matmul", lambda total, a, b: _add_wide(total, a, b), "CUDA")
_library._register_fake("add_matmul", lambda total, a, b: None)
# The result's shape, for tracing.
_library._register_fake("matmul", lambda a, b: a.new_empty(a.shape[0], b.shape[1]))


@kernel
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """[m, k] times [k, n]."""
    if not by_onednn(a):
        return torch.mm(a, b)
    # Inductor treats oneDNN's operator as a layer with frozen weights, so tracing uses our own operator.
    return cast(Tensor, torch.ops.partita.matmul(a, b)) if is_tracing() else _product(a, b)


def matmul_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write [m, k] times [k, n] to [m, n]."""
    if by_onednn(a):
        out.copy_(_product(a, b))
    else:
        torch.mm(a, b, out=out)


@kernel
def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add [m, k] times [k, n] into [m, n], in place; the total may be wider."""
    if total.dtype != a.dtype:
        if a.is_cuda and total.dtype == torch.float32:
            torch.ops.partita.add_matmul(total, a, b)
            return total
        return total.add_(matmul(a, b))
    return total.add_(_product(a, b)) if by_onednn(a) else total.addmm_(a, b)


def in_place(other: Tensor) -> bool:
    """Whether products are added to a tensor while they are made: on a GPU, where each pass over memory is a kernel;
    and in f64, in which programs are verified, so that whatever a GPU writes over is written over there too.
    """
    return (other.is_cuda or other.dtype == torch.float64) and not is_tracing()


@kernel
def sum_matmul(other: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """[m, k] times [k, n], plus a tensor of as many elements that is not read again, in its shape."""
    if in_place(other) and other.dtype == a.dtype and other.is_contiguous():
        other.view(a.shape[0], b.shape[1]).addmm_(a, b)
        return other
    return matmul(a, b).view(other.shape).add_(other)
