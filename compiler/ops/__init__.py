"""The primitive operations, one class each: every module of this folder, registered by name in `OPS`."""

from importlib import import_module
from pkgutil import iter_modules

from partita.compiler.ops.op import OPS, Op

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["OPS", "Op"]
