"""One operation on several ranks: operands cut as layouts say, the operation on each part, the parts joined again.

`ways` speak of one mesh axis; layouts of several. A value that is partial is cut into random parts of the sum, or
into parts of which a different one attains the maximum at each element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch

from partita.compiler.layout import (
    MAX,
    SUM,
    Flat,
    Layout,
    State,
    global_type,
    is_split,
    layout_of,
    local_type,
    split_axes,
)
from partita.compiler.ops.op import Argument, Op, ShardingRule
from partita.dsl.types import Type
from partita.runtime import kernels
from partita.runtime.context import Context
from tests.compiler.ops.own import FUNCTIONS

Sizes = Mapping[str, int]
Parts = list[torch.Tensor]

SCOPE = {"torch": torch, "kernels": kernels}


def ranks(sizes: Sizes) -> list[dict[str, int]]:
    """Coordinates of all ranks, the last mesh axis varying fastest."""
    return [dict(zip(sizes, c, strict=True)) for c in product(*(range(n) for n in sizes.values()))]


def layouts(rules: Sequence[ShardingRule], sizes: Sizes) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Of operands and of results, where each mesh axis has its way."""

    def columns(states: Sequence[Sequence[State]]) -> tuple[Layout, ...]:
        return tuple(layout_of(zip(sizes, column, strict=True)) for column in zip(*states, strict=True))

    return columns([rule.operands for rule in rules]), columns([rule.results for rule in rules])


def cut(x: torch.Tensor, type: Type, layout: Layout, sizes: Sizes, generator: np.random.Generator) -> Parts:
    """What each rank holds of a tensor."""
    if layout.flat is not None:
        own = Layout(tuple(each for each in layout.states if each[1] != layout.flat.axis))
        held = zip(cut(x, type, own, sizes, generator), ranks(sizes), strict=True)
        return [_flat_part(part, layout, layout.flat, sizes, at) for part, at in held]
    parts = [x]
    for over, count in sizes.items():
        parts = [part for held in parts for part in _cut(held, type, layout.state(over), count, generator)]
    return [part.clone() for part in parts]


def _flat_part(x: torch.Tensor, layout: Layout, flat: Flat, sizes: Sizes, at: Mapping[str, int]) -> torch.Tensor:
    """A rank's part of its shard, once that is flat."""
    padded = torch.zeros(-(-x.numel() // flat.parts) * flat.parts, dtype=x.dtype)
    padded[: x.numel()] = x.reshape(-1)
    for over in layout.over(flat.axis):
        padded = padded.chunk(sizes[over])[at[over]]
    return padded.reshape(-1, *(1 for _ in flat.kept))


def _cut(x: torch.Tensor, type: Type, state: State, count: int, generator: np.random.Generator) -> Parts:
    if is_split(state):
        return list(x.chunk(count, type.position(str(state))))
    if state == SUM:
        parts = [_numbers(x, generator) for _ in range(count - 1)]
        return [*parts, x - sum(parts)]
    if state == MAX:
        owner = torch.from_numpy(np.asarray(generator.integers(0, count, x.shape)))
        return [torch.where(owner == k, x, x - 1 - _numbers(x, generator).abs()) for k in range(count)]
    return [x] * count


def _numbers(x: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Small integers, as x's elements are in these tests, so that sums of them are exact."""
    return torch.from_numpy(np.asarray(generator.integers(-4, 5, x.shape))).to(x.dtype)


def join(parts: Parts, type: Type, layout: Layout, sizes: Sizes) -> torch.Tensor | None:
    """The whole tensor; None where ranks that should hold the same do not, or hold more than zeros behind it."""
    if layout.flat is not None:
        flat = global_type(local_type(type, layout, sizes), layout, sizes)
        found = join(parts, flat, Layout(layout.states), sizes)
        return None if found is None else _with_axes(found, type, layout, layout.flat, sizes)
    for over, count in reversed(sizes.items()):
        groups = [parts[i : i + count] for i in range(0, len(parts), count)]
        state = layout.state(over)
        if state is None and not all(equal(part, group[0]) for group in groups for part in group):
            return None
        parts = [_join(group, type, state) for group in groups]
    return parts[0]


def _with_axes(x: torch.Tensor, type: Type, layout: Layout, flat: Flat, sizes: Sizes) -> torch.Tensor | None:
    """A tensor from its flat shards; None if they do not end with zeros."""
    own = Layout(tuple(each for each in layout.states if each[1] in flat.kept))
    shard = local_type(type, own, sizes)
    held = []
    for at in ranks(sizes):
        index = [0] * len(flat.kept)
        for over, state in own.states:
            index[flat.kept.index(state)] = index[flat.kept.index(state)] * sizes[over] + at[over]
        elements = x[(slice(None), *index)]
        if elements[shard.elements :].any():
            return None
        held.append(elements[: shard.elements].reshape(shard.shape))
    return join(held, type, own, sizes)


def _join(group: Parts, type: Type, state: State) -> torch.Tensor:
    if is_split(state):
        return torch.cat(group, type.position(str(state)))
    if state == SUM:
        return torch.stack(group).sum(0)
    if state == MAX:
        return torch.stack(group).amax(0)
    return group[0]


def equal(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> bool:
    """Whether two tensors are the same, to a tolerance relative to the largest finite number."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or not tolerance:
        return torch.equal(a, b)
    largest = float(b.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest)  # NaN equals nothing


def local_op(op: Op, types: Sequence[Type], placed: Sequence[Layout], sizes: Sizes) -> Op:
    """The operation on what one rank holds. `types` and layouts are the operands', then the results'."""
    for over, count in sizes.items():
        for axis in split_axes(layout.state(over) for layout in placed):
            type, layout = next((t, at) for t, at in zip(types, placed, strict=True) if at.state(over) == axis)
            op = op.sharded(axis, local_type(type, layout, dict(sizes)).axis(axis).size, over, count)
    return op


@lru_cache(maxsize=4096)
def compiled(op: Op, operands: tuple[Type, ...], results: tuple[Type, ...]) -> Callable[..., Any]:
    """The emitted source of an operation as a function of its operands (a sequence) and the context."""
    text = op.emit([Argument(f"x[{i}]", type) for i, type in enumerate(operands)], results)
    return eval(compile(f"lambda x, c: {text}", text, "eval"), SCOPE)  # type: ignore[no-any-return]


def run(op: Op, types: Sequence[Type], operands: Sequence[torch.Tensor], at: Mapping[str, int]) -> Parts:
    """Results of an operation on the rank at some coordinates."""
    results = op.infer(*types)
    context = Context(
        seed=3, device=torch.device("cpu"), step=2, update=2, rates=(0.5,), coordinates=at, functions=FUNCTIONS
    )
    found = compiled(op, tuple(types), results)(operands, context)
    tensors = list(found) if len(results) > 1 else [found]
    for type, tensor in zip(results, tensors, strict=True):
        assert tuple(tensor.shape) == type.shape, f"{op}: {tuple(tensor.shape)} is not {type}"
    return tensors


def on_ranks(
    op: Op,
    types: Sequence[Type],
    results: Sequence[Type],
    placed: Sequence[Layout],
    sizes: Sizes,
    operands: Sequence[Parts],
) -> list[Parts]:
    """For each result what each rank computes. `placed` are the layouts of operands, then results."""
    local = local_op(op, [*types, *results], placed, sizes)
    inputs = [local_type(type, layout, dict(sizes)) for type, layout in zip(types, placed, strict=False)]
    found = [run(local, inputs, [parts[i].clone() for parts in operands], at) for i, at in enumerate(ranks(sizes))]
    return [[tensors[k] for tensors in found] for k in range(len(results))]
