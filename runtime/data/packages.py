"""Packages that only some data needs: the extras `data` and `remote` of the installation."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from partita.dsl.diagnostic import refuse
from partita.dsl.syntax.source import Span


def package(module: str, extra: str, what: str, span: Span | None) -> Any:
    """A module of a package that not every installation has. Raises Refused (E0617) if this one lacks it."""
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        broken = "" if isinstance(error, ModuleNotFoundError) else f", which cannot be imported: {error}"
        raise refuse("E0617", f"{what} needs {name}{broken}", span, help=f"pip install 'partita[{extra}]'") from error
