"""Modules without memory: a large parameter has that of one row, which all its rows are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 1 << 14  # elements
HUGE = 1 << 28  # of a tensor that is never there as a whole


@contextmanager
def in_rows() -> Iterator[None]:
    """Within it, large parameters of modules have the memory of one row, and begin as they should."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.numel() > LARGE and param.dim() > 1 and stored(param) is param:
            param = nn.Parameter(_rows(param.shape), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        with _InRows():  # type: ignore[no-untyped-call]
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def stored(tensor: Tensor) -> Tensor:
    """The part of a tensor that has memory of its own; the tensor itself if all of it has."""
    part = _part(tensor)
    return tensor if part is None else tensor[part]


def _part(tensor: Tensor) -> tuple[slice, ...] | None:
    own = [stride > 0 or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return None if all(own) else tuple(slice(None) if each else slice(1) for each in own)


def _rows(shape: torch.Size) -> Tensor:
    """Zeros: of a table each row is one number, so that what is said of one row is said of no other."""
    long = 0 if len(shape) == 2 else max(range(len(shape)), key=lambda dim: shape[dim])
    return torch.zeros([size if dim == long else 1 for dim, size in enumerate(shape)]).expand(shape)


class _InRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, what changes a tensor of equal rows in place changes one row."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if name == "empty" and torch.Size(args[0]).numel() > HUGE:
            return _rows(torch.Size(args[0]))
        part = _part(args[0]) if name.endswith("_") else None
        if part is None:
            return function(*args, **kwargs)
        shape = args[0].shape
        function(*(each[part] if isinstance(each, Tensor) and each.shape == shape else each for each in args), **kwargs)
        return args[0]
