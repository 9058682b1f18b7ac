"""What emitted functions call if one torch expression is not enough: the functions in this folder's modules that are
marked as kernels.

`partita.compiler.ops` chooses layouts; each function documents its own. Reductions compute in f32 at least.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from partita.compiler.optimizers.registry import OPTIMIZERS
from partita.runtime.kernels.registry import KERNELS

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
# Kernels as attributes, in place of any module of the same name.
globals().update(KERNELS)


def __getattr__(name: str) -> Callable[..., Any]:
    """A kernel defined elsewhere, or an optimizer's own."""
    kernel = KERNELS.get(name) or (OPTIMIZERS[name].kernel if name in OPTIMIZERS else None)
    if kernel is None:
        raise AttributeError(f"there is no kernel `{name}`")
    return kernel
