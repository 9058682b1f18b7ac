"""What emitted functions call where one torch expression is not enough.

Layouts are those that `partita.compiler.ops` writes; each function says its own. Reductions compute in f32 at least.
"""

from collections.abc import Callable
from typing import Any

from partita.compiler.optimizers.registry import OPTIMIZERS
from partita.runtime.kernels import optimizers
from partita.runtime.kernels.attention import attend, attend_gradient, attend_heads, attend_heads_gradient
from partita.runtime.kernels.compiling import compiled
from partita.runtime.kernels.pointwise import (
    gelu,
    gelu_gradient,
    relu_gradient,
    sigmoid_gradient,
    silu_gradient,
    tanh_gradient,
)
from partita.runtime.kernels.positions import random, rope
from partita.runtime.kernels.products import add_matmul, matmul
from partita.runtime.kernels.rows import (
    add_rows,
    exp_sum,
    first_index,
    layer_norm_gradient,
    lookup,
    nll,
    nll_gradient,
    normalize,
    normalize_gradient,
    pick,
)

__all__ = [
    "add_matmul",
    "add_rows",
    "attend",
    "attend_gradient",
    "attend_heads",
    "attend_heads_gradient",
    "compiled",
    "exp_sum",
    "first_index",
    "gelu",
    "gelu_gradient",
    "layer_norm_gradient",
    "lookup",
    "matmul",
    "nll",
    "nll_gradient",
    "normalize",
    "normalize_gradient",
    "pick",
    "random",
    "relu_gradient",
    "rope",
    "sigmoid_gradient",
    "silu_gradient",
    "tanh_gradient",
]


def __getattr__(name: str) -> Callable[..., Any]:
    """The kernel of an optimizer: its own, or that of its name here."""
    if name not in OPTIMIZERS:
        raise AttributeError(f"there is no kernel `{name}`")
    found: Callable[..., Any] = OPTIMIZERS[name].kernel or getattr(optimizers, name)
    return found
