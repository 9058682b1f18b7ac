"""The primitive operations, one class each: all modules of this folder, registered by name in `OPS`.

A new operation of the language takes three files: the rule that types it, in `partita.dsl.functions.rules`; the
operation here, under the function's name, whose fields are the options that the rule returns; and its kernel in
`partita.runtime.kernels`, unless one torch expression is enough. A function that takes several operations also has a
lowering, in `partita.compiler.passes.functions`.
"""

from importlib import import_module
from pkgutil import iter_modules

from partita.compiler.ops.op import Op


def __getattr__(name: str) -> dict[str, type[Op]]:
    """Imports the modules of this folder on first access to `OPS`: checking a file does not need them."""
    if name != "OPS":
        raise AttributeError(name)
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    registry: dict[str, type[Op]] = import_module(f"{__name__}.op").OPS
    globals()["OPS"] = registry
    return registry
