"""What emitted functions call where one torch expression is not enough: functions of the modules of this folder that
are marked as kernels.

Layouts are those that `partita.compiler.ops` writes; each function says its own. Reductions compute in f32 at least.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from partita.compiler.optimizers.registry import OPTIMIZERS
from partita.runtime.kernels.registry import KERNELS

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
# Found here at once, also where a module has a kernel's name.
globals().update(KERNELS)


def __getattr__(name: str) -> Callable[..., Any]:
    """A kernel of a module elsewhere, or an optimizer's own."""
    found = KERNELS.get(name) or (OPTIMIZERS[name].kernel if name in OPTIMIZERS else None)
    if found is None:
        raise AttributeError(f"there is no kernel `{name}`")
    return found
