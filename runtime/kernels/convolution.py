"""Sliding windows: patches of images, convolution, and their gradients.

Windows slide along some dimensions. For each of them, `stride` says how far at a time, `padding` how much lies outside
before and after, and `dilation` how far apart the elements of a window are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.grad as gradients
from torch import Tensor

from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.parts import owned
from partita.runtime.kernels.registry import kernel

Padding = Sequence[tuple[int, int]]

_cudnn: Any = torch.backends.cudnn
# Ranks that compute the same gradient must not diverge; and f32 is f32, as it is in products.
_cudnn.deterministic = True
_cudnn.allow_tf32 = False

# By the number of dimensions that windows slide along.
_FORWARD: Any = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
_TO_IMAGE: Any = {1: gradients.conv1d_input, 2: gradients.conv2d_input, 3: gradients.conv3d_input}
_TO_KERNEL: Any = {1: gradients.conv1d_weight, 2: gradients.conv2d_weight, 3: gradients.conv3d_weight}


@kernel
def patches(
    x: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    fill: float,
) -> Tensor:
    """The windows along `dims`: positions in place of these dimensions, the `sizes` elements of windows last. `fill`
    lies outside.
    """
    view = _padded(x, dict(zip(dims, padding, strict=True)), fill)
    for dim, size, step, spread in zip(dims, sizes, stride, dilation, strict=True):
        view = view.unfold(dim, spread * (size - 1) + 1, step)[..., ::spread]
    # A result has memory of its own.
    return view.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, ends: dict[int, tuple[int, int]], fill: float) -> Tensor:
    """The tensor with `fill` before and after it along some dimensions; the tensor itself if there is none."""
    if not any(map(any, ends.values())):
        return x
    number: bool | int | float
    if x.dtype == torch.bool:
        number = bool(fill)
    elif x.is_floating_point():
        limits = torch.finfo(x.dtype)
        number = min(max(fill, limits.min), limits.max)
    else:
        number = int(fill)
    last_first = [end for dim in reversed(range(x.dim())) for end in ends.get(dim, (0, 0))]
    return torch.nn.functional.pad(x, last_first, value=number)


@kernel
def fold(
    d: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
) -> Tensor:
    """The sum of windows, whose elements are the last dimensions, into an image of `sizes` along `dims`: what
    `patches` read from an element, added up.
    """
    result = widened(d)
    for i in reversed(range(len(dims))):
        size, spread = result.shape[-1], dilation[i]
        if spread > 1:
            apart = result.new_zeros((*result.shape[:-1], spread * (size - 1) + 1))
            apart[..., ::spread] = result
            result = apart
        shape = list(result.shape[:-1])
        shape[dims[i]] = sizes[i] + sum(padding[i])
        result = torch.ops.aten.unfold_backward(result, shape, dims[i], result.shape[-1], stride[i])
    for dim, size, (before, _) in zip(dims, sizes, padding, strict=True):
        result = result.narrow(dim, before, size)
    return result.to(d.dtype, copy=any(map(any, padding))).contiguous()


@kernel
def convolution(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Padding, dilation: Sequence[int], groups: int
) -> Tensor:
    """Of images [batch, groups · channels, …] and kernels [groups · filters, channels, …]: [batch, groups · filters,
    …].
    """
    x, alike = _image(x, padding)
    return cast(Tensor, _FORWARD[len(stride)](x, w, None, stride, alike, dilation, groups))


@kernel
def convolution_image_gradient(
    d: Tensor,
    w: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of an image of `shape`, from that of the result."""
    alike = _alike(padding)
    ends = [(0, 0)] * len(padding) if alike else padding
    whole = (*shape[:2], *(size + sum(end) for size, end in zip(shape[2:], ends, strict=True)))
    result: Tensor = _TO_IMAGE[len(stride)](whole, w, d, stride, alike or (0,) * len(stride), dilation, groups)
    part = result
    for dim, (size, (before, _)) in enumerate(zip(shape[2:], ends, strict=True), 2):
        part = part.narrow(dim, before, size)
    return owned(part, result)


@kernel
def convolution_kernel_gradient(
    x: Tensor,
    d: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of kernels of `shape`, from that of the result."""
    x, alike = _image(x, padding)
    return cast(Tensor, _TO_KERNEL[len(stride)](x, shape, d, stride, alike, dilation, groups))


def _alike(padding: Padding) -> tuple[int, ...] | None:
    """The padding of both ends of each dimension, as torch's convolution takes it; None if ends differ."""
    return tuple(before for before, _ in padding) if all(before == after for before, after in padding) else None


def _image(x: Tensor, padding: Padding) -> tuple[Tensor, tuple[int, ...]]:
    """The image, padded if its ends differ, and the padding that is left."""
    alike = _alike(padding)
    if alike is not None:
        return x, alike
    return _padded(x, dict(enumerate(padding, 2)), 0.0), (0,) * len(padding)
