"""Linear recurrences h[t] = a[t]·h[t−1] + b[t] along one dimension.

A loop over positions reads and writes each element once, and is best where the elements of one position are many: then
each is one operation, and blocks of positions are finished while they are in cache. Fewer are gathered from chunks of
positions, which advance together: first from zero, to find each chunk's product and last state; then, by the same
recurrence over chunks, the state before each; then again from there. Only products and sums occur, so a may be zero or
negative. A product of a whole chunk beyond the range of floats counts as the largest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from partita.runtime.kernels.dtypes import widened
from partita.runtime.kernels.registry import kernel

# A position of more elements is one operation; of fewer, chunks are taken until there are enough.
WIDE = {"cpu": 1 << 11, "cuda": 1 << 15}
ENOUGH = {"cpu": 1 << 16, "cuda": 1 << 18}
# The least length and number of chunks. Lengths are odd: positions at the same place of all chunks, which are read
# together, would else lie a power of two apart, and share few sets of the cache.
LENGTH, CHUNKS = 15, 8
BLOCK = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements of a block
NEAR = 16  # positions at a smaller distance in memory are copied first: the elements of each are far apart


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
    result = torch.empty_like(b, memory_format=torch.contiguous_format)
    x, y, out = (_first(each, dim, block) for each in (_as_wide(a, b), b, result))
    start = None if before is None else widened(before).movedim(dim, 0)
    edge, rest = _edge(len(y), backward)
    state = widened(y[edge]) if start is None else torch.addcmul(widened(y[edge]), widened(x[edge]), start)
    for _ in _follow(x[rest], y[rest], out, state, backward):
        pass
    if exclusive:
        out.copy_(_moved(out, start, backward))
    return result


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
    x, y = (_first(each, dim, block) for each in (_as_wide(a, b), b))
    combined = reduce(_joined, (_reduced(_near(x[part]), _near(y[part]), backward) for part in _parts(y, backward)))
    products, last = (each.movedim(0, dim) for each in combined)
    others = [i for i in range(b.dim()) if i not in product]
    squeezed = products.squeeze(others) if others else products
    return squeezed.permute(order), last


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
    to_b = torch.empty_like(h, memory_format=torch.contiguous_format)
    to_a = a.new_empty([1 if i in summed else size for i, size in enumerate(h.shape)])
    x, y, z, g, product = (_first(each, dim, block) for each in (_as_wide(a, h), h, d, to_b, to_a))
    start, end = (None if each is None else widened(each).movedim(dim, 0) for each in (before, after))
    count = len(z)
    over = [i for i, (size, whole) in enumerate(zip(product.shape, g.shape, strict=True)) if size < whole]

    def multiply(part: slice, states: Tensor) -> None:
        """Of g at these positions and h before each of them."""
        step, edge = (1, count - 1) if backward else (-1, 0)
        low, high = (part.start, min(part.stop, edge)) if backward else (max(part.start, 1), part.stop)
        own = states[low - part.start : high - part.start]
        if over:
            product[low:high] = (_near(y[low + step : high + step]) * own).sum(over, keepdim=True)
        else:
            torch.mul(_near(y[low + step : high + step]), own, out=product[low:high])
        if part.start <= edge < part.stop:
            first = product[edge]
            first.zero_() if start is None else first.copy_(
                (start * states[edge - part.start]).sum_to_size(first.shape)
            )

    # Nothing follows the last position that h reaches in its block; the gradients of the others follow from there.
    edge, rest = _edge(count, not backward)
    state = widened(z[edge]) if end is None else widened(z[edge]) + end
    multiply(slice(edge, edge + 1), state.unsqueeze(0))
    factors = x[_edge(count, backward)[1]]
    for part, states in _follow(factors, z[rest], g, state, not backward):
        multiply(slice(part.start + rest.start, part.stop + rest.start), states)
    return to_a.squeeze(summed).permute(order), to_b


def _as_wide(a: Tensor, b: Tensor) -> Tensor:
    """The tensor with as many dimensions as another to which it broadcasts."""
    return a[(None,) * (b.dim() - a.dim())]


def _first(x: Tensor, dim: int, block: int) -> Tensor:
    """A view with the positions first: of a block, if there are blocks, which come next."""
    x = x.movedim(dim, 0)
    return _divided(x, block).movedim(0, 1) if block else x


def _divided(x: Tensor, length: int) -> Tensor:
    """A view with the first dimension divided into parts of a length."""
    return x.view(len(x) // length, length, *x.shape[1:])


def _near(x: Tensor) -> Tensor:
    """Some positions in the dtype of accumulation, copied if the elements of one position are far apart."""
    x = widened(x)
    return x.contiguous() if 0 < x.stride(0) < NEAR else x


def _parts(x: Tensor, backward: bool) -> Iterator[slice]:
    """Positions by blocks, in the order of the recurrence; one block if they are chunked."""
    count = len(x)
    length = count if _length(x) < count else max(1, BLOCK[x.device.type] // max(1, x[:1].numel()))
    for low in reversed(range(0, count, length)) if backward else range(0, count, length):
        yield slice(low, min(low + length, count))


def _edge(count: int, backward: bool) -> tuple[int, slice]:
    """The first position of the recurrence, and the others."""
    return (count - 1, slice(0, count - 1)) if backward else (0, slice(1, count))


def _moved(states: Tensor, start: Tensor | None, backward: bool) -> Tensor:
    """The states before each position: `start`, or zero, before the first one."""
    out = torch.empty_like(states)
    out[-1 if backward else 0] = 0 if start is None else start
    into, source = (out[:-1], states[1:]) if backward else (out[1:], states[:-1])
    into.copy_(source)
    return out


def _follow(a: Tensor, b: Tensor, out: Tensor, state: Tensor, backward: bool) -> Iterator[tuple[slice, Tensor]]:
    """Write the first state and those that follow from it to `out`; yields each block of the positions that follow, as
    soon as it is done, and its states in the dtype of accumulation.
    """
    edge, rest = _edge(len(out), backward)
    out[edge] = state
    direct = out.dtype == state.dtype and not 0 < out.stride(0) < NEAR
    for part in _parts(b, backward):
        x, y = _near(a[part]), _near(b[part])
        # The state before each position, and after the last one.
        states = out[part.start : part.stop + 1] if direct else y.new_empty(len(y) + 1, *y.shape[1:])
        edge, own = _edge(len(states), backward)
        if not direct:
            states[edge] = state
        _states(x, y, states, backward)
        block_states = states[own]
        if not direct:
            out[rest][part] = block_states
        state = block_states[0 if backward else -1]
        yield part, block_states


def _states(a: Tensor, b: Tensor, states: Tensor, backward: bool) -> None:
    """Write the states after all positions of the first dimension. `states` has one more: the first is given."""
    count, length = len(b), _length(b)
    if length == count:
        _loop(a.unbind(), b.unbind(), states.unbind(), backward)
        return
    chunks = count // length
    whole = chunks * length
    # What is left over is at the end of the recurrence.
    low, body, tail = 0, slice(whole), slice(whole, count)
    if backward:
        low, body, tail = count - whole, slice(count - whole, count), slice(count - whole)
    x, y = (_divided(each[body], length) for each in (a, b))
    factors, terms = x.unbind(1), y.unbind(1)
    between = states[low : low + whole + 1 : length]
    _states(_bounded(x.prod(1)), _last(factors, terms, backward), between, backward)
    # The states of all chunks after each of their positions; before the first are those between chunks.
    first, others = (1, slice(low, low + whole)) if backward else (0, slice(1, whole + 1))
    rows = [*_divided(states[others], length).unbind(1)]
    rows.insert(length if backward else 0, between[first : first + chunks])
    _loop(factors, terms, rows, backward)
    if whole < count:
        _loop(a[tail].unbind(), b[tail].unbind(), states[tail.start or 0 : tail.stop + 1].unbind(), backward)


def _length(b: Tensor) -> int:
    """Of which length chunks of the positions are best; all of them if they are not divided."""
    count, size, device = len(b), max(1, b[:1].numel()), b.device.type
    chunks = 1 if size > WIDE[device] else min(count // LENGTH, ENOUGH[device] // size)
    if chunks < CHUNKS:
        return count
    length = count // chunks
    return length - (length % 2 == 0)


def _last(factors: Sequence[Tensor], terms: Sequence[Tensor], backward: bool) -> Tensor:
    """The state after all positions, from zero."""
    steps = list(zip(factors, terms, strict=True))
    if backward:
        steps.reverse()
    state = steps[0][1].clone(memory_format=torch.contiguous_format)
    for factor, term in steps[1:]:
        torch.addcmul(term, factor, state, out=state)
    return state


def _loop(factors: Sequence[Tensor], terms: Sequence[Tensor], states: Sequence[Tensor], backward: bool) -> None:
    """One position after the other."""
    steps = list(zip(factors, terms, pairwise(states), strict=True))
    for factor, term, (before, after) in reversed(steps) if backward else steps:
        if backward:
            before, after = after, before
        torch.addcmul(term, factor, before, out=after)


def _reduced(a: Tensor, b: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    """All positions of the first dimension as one step h → a·h + b."""
    count, length = len(b), _length(b)
    if length == count:
        return _bounded(a.prod(0)), _last(a.unbind(), b.unbind(), backward)
    whole = count // length * length
    # What is left over is at the end of the recurrence.
    body, tail = (
        (slice(count - whole, count), slice(count - whole)) if backward else (slice(whole), slice(whole, count))
    )
    x, y = (_divided(each[body], length).movedim(1, 0) for each in (a, b))
    reduced = _reduced(*_reduced(x, y, backward), backward)
    return _joined(reduced, _reduced(a[tail], b[tail], backward)) if whole < count else reduced


def _joined(one: tuple[Tensor, Tensor], next: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two steps as one."""
    (a, b), (factor, term) = one, next
    return _bounded(a * factor), torch.addcmul(term, factor, b)


def _bounded(product: Tensor) -> Tensor:
    limit = torch.finfo(product.dtype).max
    return product.clamp_(-limit, limit)
