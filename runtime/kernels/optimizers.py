"""Optimizer updates, in place."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int64
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from partita.runtime.kernels.native.library import native
from partita.runtime.kernels.registry import kernel


@kernel
def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of all elements of several tensors of one dtype, in f64: for a norm."""
    functions = native(tensors[0])
    if functions is None:
        return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64)).square_().sum()
    dense, total = [each.contiguous() for each in tensors], torch.empty((), dtype=torch.float64)
    listed = [number for each in dense for number in (each.data_ptr(), each.numel())]
    functions.sum_of_squares(total.data_ptr(), _numbers(listed), len(dense))
    return total


@kernel
def adamw(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    rate: float,
    update: int,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One AdamW update in place, like torch.optim.AdamW; updates count from 1."""
    adamw_of_each([parameter], [gradient], [mean], [square], rate, update, beta1, beta2, eps, decay)
    return parameter, mean, square


@kernel
def adamw_of_each(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    rate: float,
    update: int,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    factor: Tensor | None = None,
) -> None:
    """AdamW updates of several parameters of one dtype in place, with gradients times a factor, which are left as they
    are: as few kernels as are possible without memory for more than the largest gradient.
    """
    flat = []
    for tensors in zip(parameters, gradients, means, squares, strict=True):
        parameter, gradient, mean, square = tensors
        if _flat(tensors):
            flat.append(tensors)
        elif _flat((parameter, mean, square)):
            # As on ranks where the gradient is no part of another tensor: copies of a parameter are equal to the bit.
            dense, by = gradient.to(parameter.dtype).contiguous(), factor
            if by is not None and native(parameter) is None:
                dense, by = dense.mul_(by.to(dense.dtype)), None
            _adamw_flat([(parameter, dense, mean, square)], rate, update, beta1, beta2, eps, decay, by)
            del dense
        else:
            _take_into_means(gradient, mean, square, beta1, beta2, factor)
            adam_step(parameter, mean, square, rate, update, beta1, beta2, eps, decay)
    if flat:
        _adamw_flat(flat, rate, update, beta1, beta2, eps, decay, factor)


def _take_into_means(
    gradient: Tensor, mean: Tensor, square: Tensor, beta1: float, beta2: float, factor: Tensor | None
) -> None:
    """In place; of a gradient times a factor, which is gone before the step is made."""
    scaled = gradient if factor is None else gradient * factor.to(gradient.dtype)
    mean.lerp_(scaled, 1 - beta1)
    square.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)


def adam_step(
    parameter: Tensor,
    mean: Tensor,
    square: Tensor,
    rate: float,
    update: int,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Update a parameter with its decay and the means after this update, in place."""
    if decay:
        parameter.mul_(1 - rate * decay)
    correction = (1 - beta2**update) ** 0.5
    denominator = square.sqrt().div_(correction).add_(eps)
    parameter.addcdiv_(mean, denominator, value=-rate / (1 - beta1**update))


def _adamw_flat(
    each: Sequence[Sequence[Tensor]],
    rate: float,
    update: int,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    factor: Tensor | None,
) -> None:
    """AdamW on the parameter, gradient, mean and square of each of several parameters."""
    one = each[0][0]
    functions = native(one)
    if functions is not None:
        listed = [number for own in each for number in (*[x.data_ptr() for x in own], own[0].numel())]
        functions.adamw(
            _numbers(listed), len(each), 1.0 if factor is None else float(factor), 1 - rate * decay, 1 - beta1, beta2,
            1 - beta2, (1 - beta2**update) ** 0.5, eps, rate / (1 - beta1**update),
        )  # fmt: skip
        return
    for some in [each] if factor is None else _runs(each):
        parameters, gradients, means, squares = (list(own) for own in zip(*some, strict=True))
        if factor is not None:
            gradients = list(torch._foreach_mul(gradients, factor.to(one.dtype)))
        torch._fused_adamw_(
            parameters, gradients, means, squares, [], [_number(update, one.device)] * len(parameters),
            lr=rate, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip


def _runs(each: Sequence[Sequence[Tensor]]) -> list[list[Sequence[Tensor]]]:
    """In runs, none larger than the largest parameter."""
    limit, headroom = max(own[0].numel() for own in each), 0
    runs: list[list[Sequence[Tensor]]] = []
    for own in each:
        if own[0].numel() > headroom:
            runs.append([])
            headroom = limit
        runs[-1].append(own)
        headroom -= own[0].numel()
    return runs


def _numbers(listed: Sequence[int]) -> Array[c_int64]:
    return (c_int64 * len(listed))(*listed)


def _flat(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels apply that make one pass over memory instead of seven, but treat tensors as flat arrays. Shapes,
    strides and dtypes must be equal; a slice of a parameter has different strides.
    """
    one, *others = tensors
    if not one.is_contiguous():
        return False
    return all(each.is_contiguous() and each.shape == one.shape and each.dtype == one.dtype for each in others)


@kernel
def ema(mean: Tensor, parameter: Tensor, update: int, decay: float) -> Tensor:
    """The exponential moving mean of a parameter after each of `update` updates, in place."""
    return mean.lerp_(parameter, (1 - decay) / (1 - decay**update))


@lru_cache(maxsize=1)
def _number(update: int, device: torch.device) -> Tensor:
    """An update's number as the fused kernel expects it, made once for all parameters, on the device."""
    return torch.full((), float(update), device=device)


@kernel
def sgd(
    parameter: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    rate: float,
    momentum: float,
    nesterov: bool,
    decay: float,
) -> Tensor | tuple[Tensor, ...]:
    """One SGD step in place, like torch.optim.SGD. A buffer of zeros makes the first step's buffer the gradient."""
    if decay:
        gradient = gradient.add(parameter, alpha=decay)
    if buffer is None:
        parameter.add_(gradient, alpha=-rate)
        return parameter
    buffer.mul_(momentum).add_(gradient)
    direction = gradient.add(buffer, alpha=momentum) if nesterov else buffer
    parameter.add_(direction, alpha=-rate)
    return parameter, buffer


@kernel
def lion(
    parameter: Tensor, gradient: Tensor, mean: Tensor, rate: float, beta1: float, beta2: float, decay: float
) -> tuple[Tensor, Tensor]:
    """One Lion update in place."""
    direction = mean.lerp(gradient, 1 - beta1).sign_()
    if decay:
        parameter.mul_(1 - rate * decay)
    parameter.add_(direction, alpha=-rate)
    mean.lerp_(gradient, 1 - beta2)
    return parameter, mean


@kernel
def adagrad(
    parameter: Tensor, gradient: Tensor, accumulated: Tensor, rate: float, eps: float, decay: float
) -> tuple[Tensor, Tensor]:
    """One Adagrad update in place, like torch.optim.Adagrad; weight decay is decoupled."""
    accumulated.addcmul_(gradient, gradient)
    if decay:
        parameter.mul_(1 - rate * decay)
    parameter.addcdiv_(gradient, accumulated.sqrt().add_(eps), value=-rate)
    return parameter, accumulated


@kernel
def rowwise_adagrad(
    parameter: Tensor,
    gradient: Tensor,
    accumulated: Tensor,
    squares: Tensor,
    rate: float,
    columns: tuple[int, ...],
    count: int,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """One update in place; `columns` are the dimensions of a row, of `count` elements, and `squares` the sums over
    them of the gradient's squares.
    """
    accumulated.add_(squares, alpha=1 / count)
    scale = accumulated.sqrt().add_(eps)
    for dimension in columns:
        scale = scale.unsqueeze(dimension)
    if decay:
        parameter.mul_(1 - rate * decay)
    parameter.addcdiv_(gradient, scale, value=-rate)
    return parameter, accumulated


@kernel
def factored_inverse_root(row: Tensor, column: Tensor, total: Tensor, rows: int, eps: float) -> Tensor:
    """One over the root of a factored second moment, in one memory; `total` is the sum of `row` over the rows."""
    moment = (row / (total / rows).clamp(min=eps)) * column
    return moment.clamp_(min=eps**2).rsqrt_()


@kernel
def adafactor(
    parameter: Tensor,
    gradient: Tensor,
    states: tuple[Tensor, ...],
    means: tuple[Tensor, ...],
    inverse: Tensor,
    squares: Tensor,
    size: Tensor,
    rate: float,
    update: int,
    count: int,
    eps_scale: float,
    clip_threshold: float,
    decay: float,
) -> tuple[Tensor, ...]:
    """One Adafactor update in place, by gradient times `inverse` root of its second moment: no longer than
    `clip_threshold`, relative to the parameter's root mean square. `squares` and `size` are the sums of their squares.
    """
    relative = (size / count).sqrt_().clamp_(min=eps_scale)
    length = (squares / count).sqrt_().div_(clip_threshold).clamp_(min=1.0)
    step = relative.div_(length).mul_(-min(rate, update**-0.5))
    for state, mean in zip(states, means, strict=True):
        state.copy_(mean)
    if decay:
        parameter.mul_(1 - rate * decay)
    parameter.addcmul_(gradient * inverse, step)
    return (parameter, *states)


# The quintic of Jordan et al.: steep at zero, and within about 0.7 and 1.2 of a singular value after five steps.
QUINTIC = (3.4445, -4.7750, 2.0315)


@kernel
def orthogonalize(x: Tensor, stacked: tuple[int, ...], inner: tuple[int, ...], steps: int, eps: float) -> Tensor:
    """Newton and Schulz's iteration of each matrix: rows along the dimensions `inner`, columns along those that are
    neither these nor `stacked`.
    """
    outer = tuple(i for i in range(x.dim()) if i not in stacked and i not in inner)
    order = (*stacked, *inner, *outer)
    sizes = [prod(x.shape[i] for i in part) for part in (stacked, inner, outer)]
    turned = x.permute(order)
    matrix = turned.reshape(sizes)
    transposed = sizes[1] > sizes[2]
    if transposed:
        matrix = matrix.mT
    matrix = matrix / torch.linalg.vector_norm(matrix, dim=(1, 2), keepdim=True).clamp_(min=eps)
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = matrix @ matrix.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        matrix = torch.baddbmm(matrix, polynomial, matrix, beta=a)
    if transposed:
        matrix = matrix.mT
    back = sorted(range(len(order)), key=order.__getitem__)
    return matrix.reshape(turned.shape).permute(back).contiguous()


@kernel
def muon(
    parameter: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    orthogonal: Tensor,
    rate: float,
    beta: float,
    scale: float,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """One Muon update in place, like torch.optim.Muon."""
    momentum.lerp_(gradient, 1 - beta)
    if decay:
        parameter.mul_(1 - rate * decay)
    parameter.add_(orthogonal, alpha=-rate * scale)
    return parameter, momentum


@kernel
def outer_sgd(anchor: Tensor, total: Tensor, groups: int, rate: float) -> Tensor:
    """Move the anchor towards the mean of the groups, in place."""
    return anchor.lerp_(total / groups, rate)


@kernel
def outer_nesterov(
    anchor: Tensor, total: Tensor, velocity: Tensor, groups: int, rate: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """One step of the outer optimizer in place, like torch.optim.SGD with Nesterov's momentum, of the outer gradient:
    the anchor minus the mean of the groups.
    """
    gradient = (total / -groups).add_(anchor)
    velocity.mul_(momentum).add_(gradient)
    anchor.add_(gradient.add_(velocity, alpha=momentum), alpha=-rate)
    return anchor, velocity
