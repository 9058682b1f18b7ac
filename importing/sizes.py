"""Numbers that a module computes from sizes: a sum divided by the size of the batch, for instance.

A graph is that of one size of each dimension. The module is captured a second time, with a larger batch and longer
sequences; a number that differs is written as what it is of sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, nn

from partita.importing.capture import capture
from partita.importing.graph import Captured, NotUnderstood, order

LONGER = (1, 4)  # how much larger batches, and longer sequences, are
POWERS = (1.0, -1.0, 0.5, -0.5)
# Arguments that are places and sizes of views; what is wrong with those, dimensions and the proof find.
PLACES = {"dim", "dim0", "dim1", "dims", "start", "end", "step", "index", "size", "shape", "split_size", "split_sizes"}
PLACES |= {"chunks", "repeats", "start_dim", "end_dim", "sizes", "k", "output_size", "normalized_shape", "dimension"}


class Sized(float):
    """A number that is a coefficient times a power of a product of sizes, of dimensions of inputs."""

    coefficient: float
    power: float
    dims: tuple[tuple[str, int], ...]

    def __new__(cls, value: float, coefficient: float, power: float, dims: tuple[tuple[str, int], ...]) -> Sized:
        """The number, which is known, and what it is."""
        made = super().__new__(cls, value)
        made.coefficient, made.power, made.dims = coefficient, power, dims
        return made


def sized(module: nn.Module, inputs: Mapping[str, Tensor], graph: Captured) -> None:
    """Replace numbers of a graph that depend on sizes. Raises NotUnderstood where operations differ between sizes."""
    free = _free(inputs)
    if not free:
        return
    larger = {name: _longer(each, name, free) for name, each in inputs.items()}
    try:
        other = capture(module, larger)
    except NotUnderstood:
        return  # the module takes these sizes alone
    ours, theirs = (sorted(order(each.outputs), key=lambda value: value.position) for each in (graph, other))
    if [value.op for value in ours] != [value.op for value in theirs]:
        sizes = " and ".join(str(list(each[name].shape)) for each in (inputs, larger) for name in list(inputs)[:1])
        raise NotUnderstood(f"operations differ between inputs of {sizes}: a loop of Python over a dimension?")
    before, after = ({dim: each[dim[0]].shape[dim[1]] for dim in free} for each in (inputs, larger))
    for value, twin in zip(ours, theirs, strict=True):
        value.twin = twin.shape
        for name, given in value.args.items():
            if name not in PLACES and isinstance(given, int | float) and not isinstance(given, bool):
                found = _of_sizes(given, twin.args[name], before, after)
                if found is None:
                    raise value.refuse(f"the number {given} depends on sizes")
                value.args[name] = found


def _free(inputs: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """The batch, and the length of ids: dimensions that are likely to be of any size. Each by one that has it."""
    batches = {each.shape[0] for each in inputs.values() if each.dim()}
    found = [(name, 0) for name, each in inputs.items() if each.dim()][:1] if len(batches) == 1 else []
    ids = [name for name, each in inputs.items() if each.dim() == 2 and each.dtype == torch.int64]
    if ids and len({inputs[name].shape[1] for name in ids}) == 1:
        found.append((ids[0], 1))
    return found


def _longer(tensor: Tensor, name: str, free: Iterable[tuple[str, int]]) -> Tensor:
    dims = {dim for _, dim in free}
    for dim in range(tensor.dim()):
        if dim in dims and (dim == 0 or (tensor.dim() == 2 and tensor.dtype == torch.int64)):
            tensor = torch.cat([tensor, tensor.narrow(dim, 0, 1).expand(*_sizes(tensor, dim, LONGER[dim]))], dim)
    return tensor


def _sizes(tensor: Tensor, dim: int, size: int) -> list[int]:
    return [size if i == dim else each for i, each in enumerate(tensor.shape)]


def _of_sizes(
    number: float, other: Any, before: Mapping[tuple[str, int], int], after: Mapping[tuple[str, int], int]
) -> float | None:
    """The number, as what it is of sizes; itself if it does not depend on them."""
    if number == other:
        return number
    for count in (1, 2):
        for dims in combinations_with_replacement(before, count):
            for power in POWERS:
                one, two = (float(_product(sizes[dim] for dim in dims)) ** power for sizes in (before, after))
                coefficient = number / one
                if abs(coefficient * two - other) <= 1e-9 * abs(other):
                    return Sized(number, coefficient, power, dims)
    return None


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
