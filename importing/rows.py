"""Modules without memory: a large parameter has that of one row, which all its rows are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 1 << 14  # elements


@contextmanager
def in_rows() -> Iterator[None]:
    """Within it, large parameters of modules have the memory of one row, and begin as they should."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.numel() > LARGE and stored(param) is param:
            longest = max(range(param.dim()), key=lambda dim: param.shape[dim])
            row = torch.zeros([size if dim == longest else 1 for dim, size in enumerate(param.shape)])
            param = nn.Parameter(row.expand(param.shape), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        with _InRows():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def stored(tensor: Tensor) -> Tensor:
    """The part of a tensor that has memory of its own; the tensor itself if all of it has."""
    strides = [stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return tensor if all(strides) else tensor[tuple(slice(None) if each else slice(1) for each in strides)]


class _InRows(TorchDispatchMode):
    """Within it, what changes a tensor of equal rows in place changes one row."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.overloadpacket.__name__.endswith("_"):
            function(stored(args[0]), *args[1:], **(kwargs or {}))
            return args[0]
        return function(*args, **(kwargs or {}))
