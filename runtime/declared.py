"""What functions say of themselves that would be a mistake elsewhere; `partita verify --gpu` finds what is not said.

A GPU runs what it is given while the host goes on. Reading a number from it makes the host wait until all that was
launched before is done, and the device then waits for what the host launches next. So no function of a step does that
but those that say so, and why. Likewise only those that say so compute in f64, which GPUs do slowly, though the file's
precision is less.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

WAITS: dict[CodeType, str] = {}
IN_F64: dict[CodeType, str] = {}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def waits(why: str) -> Callable[[_Function], _Function]:
    """Says of a function that the host waits for the device in it, and why."""
    return _said(WAITS, why)


def in_f64(why: str) -> Callable[[_Function], _Function]:
    """Says of a function that it computes in f64, and why."""
    return _said(IN_F64, why)


def _said(of: dict[CodeType, str], why: str) -> Callable[[_Function], _Function]:
    def say(function: _Function) -> _Function:
        of[function.__code__] = why
        return function

    return say
