"""The primitive operations, one class each: every module of this folder, registered by name in `OPS`.

An operation of the language takes three files: the rule that gives it a type, in `partita.dsl.rules`; the operation
here, under the function's name, whose fields are the options that the rule returns; and its kernel in
`partita.runtime.kernels`, if one expression over torch is not enough. A function that takes several operations has a
lowering too, in `partita.compiler.lowering.functions`.
"""

from importlib import import_module
from pkgutil import iter_modules

from partita.compiler.ops.op import Op


def __getattr__(name: str) -> dict[str, type[Op]]:
    """`OPS`, with the modules of this folder imported when it is first asked for: a file is checked without them."""
    if name != "OPS":
        raise AttributeError(name)
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    found: dict[str, type[Op]] = import_module(f"{__name__}.op").OPS
    globals()["OPS"] = found
    return found
