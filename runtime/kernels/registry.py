"""The kernels by name: functions that emitted source may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

KERNELS: dict[str, Callable[..., Any]] = {}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Let emitted source call a function as `kernels.NAME`. Raises ValueError if the name is taken."""
    if function.__name__ in KERNELS:
        raise ValueError(f"there is a kernel `{function.__name__}` already")
    KERNELS[function.__name__] = function
    return function
