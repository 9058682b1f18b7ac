"""Large matrix products.

On a CPU, torch multiplies f32 matrices by MKL. oneDNN, which torch comes with, has AVX-512 kernels for every vendor's
processors, where MKL falls back to AVX2 on some: there it is twice as fast. The choice depends on the processor and
the dtype alone, never on a measurement, so that a run can be repeated to the last bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from partita.runtime.kernels.compiling import is_tracing

_mkldnn: Any = torch.backends.mkldnn
ONEDNN = _mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _by_onednn(a: Tensor) -> bool:
    return ONEDNN and a.dtype == torch.float32 and a.device.type == "cpu"


def _product(a: Tensor, b: Tensor) -> Tensor:
    """By oneDNN, whose weight is the transposed right matrix."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], ""))


_make_library: Any = torch.library.Library
_library = _make_library("partita", "FRAGMENT")
_library.define("matmul(Tensor a, Tensor b) -> Tensor")
_library.impl("matmul", _product, "CPU")
# What compiling needs to know of it: the result's shape.
_library._register_fake("matmul", lambda a, b: a.new_empty(a.shape[0], b.shape[1]))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """[m, k] times [k, n]."""
    if not _by_onednn(a):
        return torch.mm(a, b)
    # Inductor takes oneDNN's operation for a layer with weights that never change: to it, this is one of ours.
    return cast(Tensor, torch.ops.partita.matmul(a, b)) if is_tracing() else _product(a, b)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add [m, k] times [k, n] into [m, n], in place."""
    return total.add_(_product(a, b)) if _by_onednn(a) else total.addmm_(a, b)
