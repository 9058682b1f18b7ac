"""The Python files that a .par file names: imported only if the user allows it, each once per process.

What is imported is the text that was read with the .par file, which all ranks have compared.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from traceback import extract_tb
from types import ModuleType
from typing import Any

from partita.compiler.optimizers.python import update_functions
from partita.dsl.diagnostic import Diagnostic, Refused, refuse, shown
from partita.dsl.spec import Model, Operation, PythonFunction, Spec
from partita.dsl.syntax.source import Source

FLAG = "--allow-python"
MAX_FRAMES, MAX_LINES = 4, 4


class OperationFailed(Refused):
    """A function of the user's failed, or did not return what is declared. Only the rank that it happened on knows."""


_modules: dict[tuple[str, str], ModuleType] = {}


def require_python(spec: Spec, allowed: bool) -> None:
    """Refuse (E0620) a file with operations or optimizers of its own, unless Python code is `allowed`."""
    require_allowed(spec.model, allowed)
    updates = update_functions(spec.train).values()
    require_functions({f"the update by `{each.name}`": each for each in updates}, allowed)


def require_allowed(model: Model | None, allowed: bool) -> None:
    """Refuse (E0620) a model that has operations of its own, unless Python code is `allowed`."""
    operations = model.operations.values() if model is not None else ()
    require_functions({called(each): each.forward for each in operations}, allowed)


def require_functions(functions: Mapping[str, PythonFunction], allowed: bool) -> None:
    """Refuse (E0620) functions, by what messages call their owners, unless Python code is `allowed`."""
    for owner, function in functions.items() if not allowed else ():
        raise refuse(
            "E0620",
            f"{owner} runs Python code from `{function.source.name}`, which was not allowed",
            function.span,
            notes=["unlike a .par file, Python code can do whatever you can; nothing of it has been run"],
            help=f"if you trust it, add {FLAG}",
        )


def called(operation: Operation) -> str:
    """What messages call an operation."""
    return f"op `{operation.name}`"


def imported(owner: str, function: PythonFunction) -> Callable[..., Any]:
    """A function of what messages call `owner`, an operation or an optimizer. Raises Refused (E0621)."""
    name = function.source.name
    try:
        module = _module(function.source)
    except (Exception, SystemExit) as error:
        notes = raised(error, function.source)
        message = f"`{name}` cannot be imported"
        raise Refused([problem("E0621", owner, function, message, notes)]) from error
    attribute: object = getattr(module, function.name, None)
    if attribute is None:
        raise Refused([problem("E0621", owner, function, f"`{name}` has no `{function.name}`", ())])
    if not callable(attribute):
        message = f"`{function.name}` of `{name}` is not a function, but `{type(attribute).__name__}`"
        raise Refused([problem("E0621", owner, function, message, ())])
    return attribute


def _module(source: Source) -> ModuleType:
    """The module of a Python file, from the text that was read."""
    path = os.path.abspath(source.name)
    key = (path, source.text)
    if key not in _modules:
        digest = sha256(f"{path}\0{source.text}".encode("utf-8", "surrogatepass")).hexdigest()
        module = ModuleType(f"partita_custom_{digest[:16]}")
        module.__file__ = path
        # Its lines, for tracebacks and for compilers that read the source of functions, as they are run.
        linecache.cache[path] = (len(source.text), None, source.text.splitlines(keepends=True), path)
        sys.modules[module.__name__] = module
        try:
            exec(compile(source.text, path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[module.__name__]
            raise
        _modules[key] = module
    return _modules[key]


# ---------------------------------------------------------------- what goes wrong


def problem(
    code: str,
    owner: str,
    function: PythonFunction,
    message: str,
    notes: Sequence[str],
    help: str | None = None,
) -> Diagnostic:
    """A diagnostic about a function of an operation or an optimizer."""
    return Diagnostic(code, f"{owner}: {message}", function.span, tuple(notes), help)


@contextmanager
def guarded(owner: str, function: PythonFunction, help: str | None = None, notes: Sequence[str] = ()) -> Iterator[None]:
    """Turns what the user's code raises into a diagnostic (E0622), with `notes` of when it did."""
    try:
        yield
    except (Exception, SystemExit) as error:
        message, notes = f"`{function.name}` raised {type(error).__name__}", [*notes, *raised(error, function.source)]
        raise OperationFailed([problem("E0622", owner, function, message, notes, help)]) from error


def raised(error: BaseException, source: Source) -> list[str]:
    """What was raised, and the lines of the user's file through which it came."""
    path = os.path.abspath(source.name)
    frames = [frame for frame in extract_tb(error.__traceback__) if frame.filename == path]
    notes = [
        shown(f"{source.name}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}")
        for frame in frames[-MAX_FRAMES:]
    ]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        lines = [f"{error.msg} ({source.name}:{error.lineno})"]
    message_lines = [shown(line) for line in lines[:MAX_LINES]]
    first = f"{type(error).__name__}: {message_lines[0]}" if message_lines else type(error).__name__
    return [*notes, first, *message_lines[1:]]
