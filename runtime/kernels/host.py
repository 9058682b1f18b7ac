"""Copies between a device's memory and the host's. On a CPU both are one, and nothing is copied."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.compiler.instructions import COPIES
from partita.compiler.schedules.schedule import LOAD, OFFLOAD
from partita.runtime.context import Context
from partita.runtime.declared import waits
from partita.runtime.kernels.registry import kernel
from partita.runtime.streams import ENDED, Handle, OnHost, copied


@kernel
@waits("what is updated in the host's memory has to arrive there")
def to_host(x: Tensor) -> Tensor:
    """A tensor in the host's memory: pinned, so that the device copies it there by itself; it has arrived."""
    if x.device.type == "cpu":
        return x
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return pinned


@kernel
def copy_out(x: Tensor, context: Context) -> Tensor:
    """Starts to copy a tensor of the device to pinned memory of the host, while the device computes; `land` waits for
    the copy.
    """
    if x.device.type == "cpu":
        return x
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)

    def out(source: Tensor, copy: Tensor) -> Handle:
        copied(source, copy)
        context.arriving[id(copy)] = OnHost(torch.cuda.current_stream(source.device).record_event())
        return ENDED

    context.streams.launch(COPIES[OFFLOAD], out, x, pinned)
    return pinned


@kernel
@waits("what is updated in the host's memory has to arrive there")
def land(x: Tensor, context: Context) -> Tensor:
    """The result of `copy_out`, which its handle has the host wait for."""
    return arrive(x, context)


@kernel
def to_device(x: Tensor, context: Context) -> Tensor:
    """A tensor of the host in the device's memory. From pinned memory it is copied while the host goes on; what is not
    pinned is first copied there.
    """
    if context.device.type != "cpu" and x.is_cpu and not x.is_pinned():
        x = x.pin_memory()
    return x.to(context.device, non_blocking=True)


@kernel
def prefetch(x: Tensor, context: Context) -> Tensor:
    """Starts to copy a tensor of the host to the device, while that computes; `arrive` waits for the copy."""
    if context.device.type == "cpu":
        return x
    copy = torch.empty_like(x, device=context.device)
    # After the current compute: the memory belongs to its stream, where earlier operations may still read it.
    context.arriving[id(copy)] = context.streams.launch(COPIES[LOAD], copied, x, copy)
    return copy


@kernel
def arrive(x: Tensor, context: Context) -> Tensor:
    """The result of `prefetch`: the compute stream waits for the copy, the host does not."""
    handle = context.arriving.pop(id(x), None)
    if handle is not None:
        handle.done()
    return x


@kernel
def cast_on_host(x: Tensor, dtype: torch.dtype, context: Context) -> Tensor:
    """A tensor of the host in another dtype, there: pinned if a device copies it from there."""
    if context.device.type == "cpu":
        return x.to(dtype)
    return torch.empty(x.shape, dtype=dtype, pin_memory=True).copy_(x)


@kernel
def store(parameter: Tensor, value: Tensor) -> Tensor:
    """Write a value over a parameter. A device copies it from the host's memory by itself."""
    return parameter.copy_(value, non_blocking=not parameter.is_cpu)
