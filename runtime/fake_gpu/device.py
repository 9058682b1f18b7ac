"""A GPU that is not there: torch's FakeTensorMode with tensors on `cuda`, and stand-ins for the rest of torch.cuda.

FakeTensorMode computes shapes, strides, dtypes and devices, also where torch is built without CUDA. What such a build
lacks stands in here: streams and events, pinned memory, and indexing and moving tensors, for which torch's Python
bindings switch to the device first; they are made of the same operations of ATen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from partita.runtime.fake_gpu.streams import Stream, Timed
from partita.runtime.fake_gpu.watch import Graph, Watch

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)  # of an H100


def _get(x: torch.Tensor, index: Any) -> Any:
    if x.device.type != "cuda":
        return NotImplemented
    view, indices = _indexed(x, index)
    return aten.index(view, indices) if indices else view


def _set(x: torch.Tensor, index: Any, value: Any) -> Any:
    if x.device.type != "cuda":
        return NotImplemented
    view, indices = _indexed(x, index)
    if indices:
        values = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
        aten.index_put_(view, indices, values)
    elif isinstance(value, torch.Tensor):
        while value.dim() > view.dim() and value.shape[0] == 1:
            value = value.squeeze(0)
        aten.copy_(view, value)
    else:
        view.fill_(value)
    return None


def _indexed(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that slices and numbers make, and the tensors by which it is then indexed."""
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    consumed = sum(each.dim() if _mask(each) else each is not None and each is not Ellipsis for each in parts)
    if not any(each is Ellipsis for each in parts):
        parts.append(Ellipsis)
    at = next(i for i, each in enumerate(parts) if each is Ellipsis)
    parts[at : at + 1] = [slice(None)] * (x.dim() - consumed)
    dim, indices = 0, list[torch.Tensor | None]()
    for each in parts:
        if isinstance(each, torch.Tensor) and each.dtype in (torch.int64, torch.int32, torch.bool):
            indices += [None] * (dim - len(indices)) + [each]
            dim += each.dim() if _mask(each) else 1
        elif each is None:
            x, dim = aten.unsqueeze(x, dim), dim + 1
        elif isinstance(each, slice):
            if each != slice(None):
                x = aten.slice(x, dim, each.start, each.stop, each.step or 1)
            dim += 1
        else:
            x = aten.select(x, dim, int(each))
    return x, indices


def _mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def _to(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    copies = kwargs.pop("copy", False)
    args = (args[0].device, args[0].dtype) if args and isinstance(args[0], torch.Tensor) else args
    device, dtype, background, form = torch._C._nn._parse_to(*args, **kwargs)
    if device is None or (device.type == x.device.type and not copies):
        return NotImplemented
    options = {"dtype": dtype or x.dtype, "device": device, "non_blocking": background}
    return aten._to_copy(x, **options, **({} if form is None else {"memory_format": form}))


def _contiguous(x: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    if x.device.type != "cuda":
        return NotImplemented
    return x if x.is_contiguous(memory_format=memory_format) else aten.clone(x, memory_format=memory_format)


def _pinned(x: torch.Tensor) -> Any:
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return aten.copy_(copy, x)


def _fake_tensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor`: made on the host, and copied to the device."""

    def made(data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> torch.Tensor:
        tensor = original(data, dtype=dtype, **options)
        return tensor if device is None or torch.device(device).type != "cuda" else tensor.to(device)

    return made


def _nonzero(x: torch.Tensor, *, as_tuple: bool = False) -> Any:
    indices = aten.nonzero(x)  # which asks for its shape
    return indices.unbind(1) if as_tuple else indices


def _list(x: torch.Tensor) -> Any:
    """All numbers are copied to the host at once, and are what one number of them would be."""
    if x.device.type != "cuda" or not x.numel():
        return NotImplemented
    number = x.view(-1).select(0, 0).item()
    nested: Any = number
    for size in reversed(x.shape):
        nested = [nested] * size
    return nested


def _uncached(mode: FakeTensorMode) -> Callable[..., Any]:
    """`set_`, of which FakeTensorMode does not keep the memory that it is given."""

    def set_(x: torch.Tensor, *args: Any) -> torch.Tensor:
        before, mode.cache_enabled = mode.cache_enabled, False
        try:
            result: torch.Tensor = torch._C.TensorBase.set_(x, *args)
            return result
        finally:
            mode.cache_enabled = before

    return set_


# What torch's Python bindings do only after they have switched to the tensor's device.
_STAND_INS: dict[str, Callable[..., Any]] = {
    "__getitem__": _get,
    "__setitem__": _set,
    "__invert__": aten.bitwise_not,
    "to": _to,
    "contiguous": _contiguous,
    "copy_": aten.copy_,
    "pin_memory": _pinned,
    "nonzero": _nonzero,
    "tolist": _list,
}


def _stand_in(name: str, instead: Callable[..., Any]) -> Callable[..., Any]:
    """A method of tensors that does something else for tensors of the device."""
    original = getattr(torch._C.TensorBase, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # What traces an operation wraps tensors of the device.
        on_device = isinstance(self, FakeTensor) or self.device.type == DEVICE.type
        result = instead(self, *args, **kwargs) if on_device else NotImplemented
        return original(self, *args, **kwargs) if result is NotImplemented else result

    return method


def _resized(watch: Watch) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
    """`torch.UntypedStorage.resize_`, by which memory is given back."""
    original = torch.UntypedStorage.resize_

    def resize(memory: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        assert size == 0, size
        watch.given_back(memory)
        original(memory, size)
        return memory

    return resize


@contextmanager
def fake_gpu(watch: Watch) -> Iterator[torch.device]:
    """A GPU that is not there, on which all that is launched is watched."""
    instead: dict[str, Any] = {
        "Stream": lambda device=None, priority=0: Stream(watch.waited),
        "Event": lambda enable_timing=False, blocking=False, interprocess=False: Timed(
            lambda: watch.current, watch.waited
        ),
        "current_stream": lambda device=None: watch.current,
        "stream": watch.on,
        "synchronize": lambda device=None: watch.waited("torch.cuda.synchronize"),
        "CUDAGraph": Graph,
        "graph": watch.capture,
        "set_device": lambda device: None,
        "max_memory_allocated": lambda device=None: watch.peak,
        "is_available": lambda: False,
        "get_device_capability": lambda device=None: CAPABILITY,
    }
    with ExitStack() as stack:
        for name, value in instead.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for name, value in {**_STAND_INS, "set_": _uncached(mode), "is_pinned": watch.pinned}.items():
            of = FakeTensor if name in vars(FakeTensor) else torch.Tensor
            stack.enter_context(patch.object(of, name, _stand_in(name, value), create=True))
        # Memory is nowhere; what is told apart by its address, and asked for its device, is known to the watch.
        stack.enter_context(patch.object(torch.UntypedStorage, "data_ptr", lambda memory: memory._cdata))
        stack.enter_context(patch.object(torch.UntypedStorage, "device", property(watch.device_of)))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", _resized(watch)))
        stack.enter_context(patch.object(torch, "tensor", _fake_tensor(torch.tensor)))
        stack.enter_context(mode)
        stack.enter_context(watch)
        yield DEVICE
