"""Linear recurrences h[t] = a[t]·h[t−1] + b[t] along one dimension.

A loop over positions moves each element once, and is best where the elements of one position are many. Fewer are
gathered from chunks of positions, which advance together: first from zero, to find each chunk's product and last state;
then, by the same recurrence over chunks, the state before each; then again from there. Only products, sums and
differences occur, so a may be zero or negative. A product of a whole chunk beyond the range of floats counts as the
largest one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.registry import kernel

# Elements that one operation should have at least, and the least length and number of chunks.
ENOUGH = {"cpu": 1 << 14, "cuda": 1 << 18}
LENGTH, CHUNKS = 16, 8


@kernel
def linear_scan(
    a: Tensor,
    b: Tensor,
    before: Tensor | None = None,
    *,
    dim: int,
    block: int = 0,
    backward: bool = False,
    exclusive: bool = False,
) -> Tensor:
    """h[t] = a[t]·h[t−1] + b[t] along dimension `dim` of b, to which a broadcasts. `before` has the state before each
    block of `block` positions, else it is zero before the first; `exclusive`: the state before each position instead.
    """
    x, y = _first(_as_wide(a, b), dim, block), _first(b, dim, block)
    start = None if before is None else widened(before).movedim(dim, 0)
    if block:
        x, y = x.movedim(0, 1), y.movedim(0, 1)  # positions of a block first, then blocks
    out = _states(x, y, start, backward)
    if exclusive:
        out = _moved(out, start, backward)
    if block:
        out = out.movedim(0, 1).flatten(0, 1)
    return out.movedim(0, dim).to(b.dtype)


@kernel
def linear_scan_blocks(
    a: Tensor,
    b: Tensor,
    *,
    dim: int,
    block: int,
    product: tuple[int, ...],
    order: tuple[int, ...],
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """For each block of `block` positions the product of a, and the state after it if that is zero before it.

    Of the products only dimensions `product` are kept, in the given `order`; the others have size 1.
    """
    x, y = (_first(each, dim, block).movedim(0, 1) for each in (_as_wide(a, b), b))
    products, last = _ends(x, y, backward)
    products, last = products.movedim(0, dim), last.movedim(0, dim)
    others = [i for i in range(b.dim()) if i not in product]
    kept = products.squeeze(others) if others else products
    return kept.permute(order), last


@kernel
def linear_scan_gradient(
    a: Tensor,
    h: Tensor,
    d: Tensor,
    before: Tensor | None = None,
    after: Tensor | None = None,
    *,
    dim: int,
    summed: tuple[int, ...],
    order: tuple[int, ...],
    block: int = 0,
    backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """g[t] = d[t] + a[t+1]·g[t+1], the gradient of b, and g[t]·h[t−1], that of a: summed over dimensions `summed`, and
    with those that remain in the given `order`. `before` and `after` have, for each block of `block` positions, h
    before it, and a·g after it.
    """
    x, y, z = (_first(each, dim, block) for each in (_as_wide(a, h), h, d))
    start, end = (None if each is None else widened(each).movedim(dim, 0) for each in (before, after))
    if block:
        x, y, z = (each.movedim(0, 1) for each in (x, y, z))
    count = len(z)
    first, rest, following = (0, slice(1, count), slice(0, count - 1))
    if not backward:
        first, rest, following = (count - 1, slice(0, count - 1), slice(1, count))
    g = torch.empty_like(z, memory_format=torch.contiguous_format)
    g[first] = z[first] if end is None else z[first] + end
    if count > 1:
        _scan(x[following], z[rest], g[rest], g[first], not backward)
    to_a = _moved(y, start, backward).mul_(g)
    if block:
        g, to_a = (each.movedim(0, 1).flatten(0, 1) for each in (g, to_a))
    g, to_a = g.movedim(0, dim), to_a.movedim(0, dim)
    if summed:
        to_a = to_a.sum(summed)
    return to_a.permute(order).to(a.dtype), g.to(h.dtype)


def _as_wide(a: Tensor, b: Tensor) -> Tensor:
    """The tensor with as many dimensions as another to which it broadcasts."""
    return a[(None,) * (b.dim() - a.dim())]


def _first(x: Tensor, dim: int, block: int) -> Tensor:
    """The tensor in the dtype of accumulation, with dimension `dim` first, divided into blocks if there are any; copied
    if it lies so that the elements of one position are far apart.
    """
    x = widened(x).movedim(dim, 0)
    if 0 < x.stride(0) < LENGTH and x.numel() > len(x):
        x = x.contiguous()
    return _divided(x, block) if block else x


def _divided(x: Tensor, length: int) -> Tensor:
    """A view with the first dimension divided into parts of a length."""
    return x.as_strided(
        (len(x) // length, length, *x.shape[1:]),
        (x.stride(0) * length, *x.stride()),
        x.storage_offset(),
    )


def _states(a: Tensor, b: Tensor, start: Tensor | None, backward: bool) -> Tensor:
    """The states at all positions of the first dimension."""
    out = torch.empty_like(b, memory_format=torch.contiguous_format)
    _scan(a, b, out, start, backward)
    return out


def _moved(states: Tensor, start: Tensor | None, backward: bool) -> Tensor:
    """The states before each position: `start`, or zero, before the first one."""
    out = torch.empty_like(states)
    out[-1 if backward else 0] = 0 if start is None else start
    into, taken = (out[:-1], states[1:]) if backward else (out[1:], states[:-1])
    into.copy_(taken)
    return out


def _scan(a: Tensor, b: Tensor, out: Tensor, start: Tensor | None, backward: bool) -> None:
    """Write the states at all positions of the first dimension to `out`."""
    count, chunks = len(b), _chunks(b)
    if chunks < CHUNKS:
        _loop(a, b, out, start, backward)
        return
    length = count // chunks
    whole = chunks * length
    # What is left over is at the end of the recurrence.
    body, tail = (
        (slice(count - whole, count), slice(0, count - whole)) if backward else (slice(whole), slice(whole, None))
    )
    x, y, z = (_divided(each[body], length).movedim(1, 0) for each in (a, b, out))
    ends = torch.empty_like(z[0], memory_format=torch.contiguous_format)
    _scan(*_ends(x, y, backward), ends, start, backward)
    _loop(x, y, z, _moved(ends, start, backward), backward)
    if whole < count:
        _loop(a[tail], b[tail], out[tail], out[tail.stop if backward else whole - 1], backward)


def _chunks(b: Tensor) -> int:
    """Into how many chunks positions are best divided."""
    return min(len(b) // LENGTH, ENOUGH[b.device.type] // max(1, b[0].numel()))


def _loop(a: Tensor, b: Tensor, out: Tensor, state: Tensor | None, backward: bool) -> None:
    """One position after the other."""
    rows = list(zip(a.unbind(), b.unbind(), out.unbind(), strict=True))
    for factor, term, result in reversed(rows) if backward else rows:
        if state is None:
            result.copy_(term)
        else:
            torch.addcmul(term, factor, state, out=result)
        state = result


def _ends(a: Tensor, b: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    """The product of a along the first dimension, and the state after it, from zero."""
    count, chunks = len(b), _chunks(b)
    if chunks >= CHUNKS and count % chunks == 0:
        x, y = (_divided(each, count // chunks).movedim(1, 0) for each in (a, b))
        return _ends(*_ends(x, y, backward), backward)
    rows = list(zip(a.unbind(), b.unbind(), strict=True))
    product = torch.ones_like(a[0], memory_format=torch.contiguous_format)
    state = torch.zeros_like(b[0], memory_format=torch.contiguous_format)
    for factor, term in reversed(rows) if backward else rows:
        torch.addcmul(term, factor, state, out=state)
        product.mul_(factor)
    most = torch.finfo(product.dtype).max
    return product.clamp_(-most, most), state
