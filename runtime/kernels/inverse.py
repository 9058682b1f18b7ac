"""The inverse of small matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.registry import kernel


@kernel
def inverse(x: Tensor, triangular: bool) -> Tensor:
    """The inverse of the matrices of the last two dimensions, computed in f32 at least. `triangular`: of lower ones
    with ones on their diagonals. Where there is none, it is not finite: the host does not wait for it.
    """
    wide = widened(x)
    if triangular:
        ones = torch.eye(x.shape[-1], dtype=wide.dtype, device=x.device)
        found: Tensor = torch.linalg.solve_triangular(wide, ones, upper=False, unitriangular=True)
    else:
        found = torch.linalg.inv_ex(wide).inverse
    return found.to(x.dtype)
