"""Numbers that a module computes from sizes: a sum divided by the size of the batch, for instance.

A graph is that of one size of each dimension. The module is captured a second time, with a larger batch and longer
sequences; a number that differs is written as what it is of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, combinations, count
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from partita.importing.capture import capture
from partita.importing.graph import LEAVES, Captured, NotUnderstood, Value, order
from partita.importing.graph import number as number_of
from partita.importing.normal.arguments import known

# How much larger batches, and longer sequences, are. At one length a table may be read as a whole, which is another
# operation than to read a part.
LARGER = ((1, 4, 5, 6), (1, 3, 4, 5), (1, 2, 3, 4), (2, 1, 3, 4))
Dim: TypeAlias = tuple[str, int]  # of an input
POWERS = (1.0, -1.0, 0.5, -0.5)
# Arguments that are places and sizes of views; what is wrong with those, dimensions and the proof find.
PLACES = {"dim", "dim0", "dim1", "dims", "start", "end", "step", "index", "size", "shape", "split_size", "split_sizes"}
PLACES |= {"chunks", "repeats", "start_dim", "end_dim", "sizes", "k", "output_size", "normalized_shape", "dimension"}


class Sized(float):
    """A number that is a coefficient times a power of a product of sizes, of dimensions of inputs, and an offset."""

    coefficient: float
    power: float
    dims: tuple[Dim, ...]
    offset: float

    def __new__(cls, value: float, coefficient: float, power: float, dims: tuple[Dim, ...], offset: float) -> Sized:
        """The number, which is known, and what it is."""
        made = super().__new__(cls, value)
        made.coefficient, made.power, made.dims, made.offset = coefficient, power, dims, offset
        return made


def sized(
    module: nn.Module, inputs: Mapping[str, Tensor], graph: Captured, solved: Callable[[], list[list[Dim]]]
) -> Captured | None:
    """Replace numbers of a graph that depend on sizes; the graph at larger ones, if there is one. `solved` says which
    dimensions of inputs are one axis, which takes another capture. Raises NotUnderstood where operations differ
    between sizes.
    """
    ours, different, unknown, failed = _operations(graph), None, None, False
    solved = cache(solved)
    for free, likely in _with_others(_ways(inputs, solved), inputs, solved):
        for more in LARGER if len(free) > 1 else LARGER[:1]:
            larger = {name: _longer(each, name, free, _apart(free, inputs, more)) for name, each in inputs.items()}
            try:
                twin = capture(module, larger, graph.loss_alone, graph.rolled)
            except NotUnderstood:
                failed = True
                continue
            theirs = _operations(twin)
            if [value.op for value in ours] == [value.op for value in theirs]:
                try:
                    _compare(ours, theirs, inputs, larger, [dims[0] for dims in free if dims])
                except NotUnderstood as error:
                    unknown = unknown or error
                    break
                of_batch = failed and len(free) == 1  # the module takes no other lengths, as far as is known
                graph.lengths_fixed = unknown is not None or different is not None or of_batch
                return twin
            different = different or larger
        columns = [inputs[name] for dims in free[1:] for name, _ in dims]  # or lengths, if ids or vectors have them
        if (
            likely
            and different is not None
            and not all(each.dim() == 2 and each.is_floating_point() for each in columns)
        ):
            sizes = " and ".join(str(list(each[name].shape)) for each in (inputs, different) for name in [*inputs][:1])
            raise NotUnderstood(f"operations differ between inputs of {sizes}: a loop of Python over a dimension?")
    if unknown is not None:
        raise unknown
    return None


def _with_others(
    ways: Iterator[tuple[list[list[Dim]], bool]], inputs: Mapping[str, Tensor], solved: Callable[[], list[list[Dim]]]
) -> Iterator[tuple[list[list[Dim]], bool]]:
    """Each way with all other dimensions that are one axis by what is computed, before it is tried without these."""
    every = {(name, dim) for name, each in inputs.items() for dim, size in enumerate(each.shape) if size > 1}
    for free, likely in ways:
        if likely and len(free) > 1 and not every <= {each for dims in free for each in dims}:
            others = [dims for dims in solved() if not any(each in own for own in free for each in dims)]
            if others:
                yield [*free, *others], False
        yield free, likely


def _apart(free: Sequence[Sequence[Dim]], inputs: Mapping[str, Tensor], more: Sequence[int]) -> list[int]:
    """How much larger dimensions are, so that none grows by the ratio of another, or of one without its ends: which of
    them a number follows would not be known.
    """
    found: list[int] = []
    ratios: list[set[float]] = [set(), set()]  # of dimensions, and of these with a few positions more and less
    for dims, extra in zip(free, chain(more, count(more[-1] + 1)), strict=False):
        size = inputs[dims[0][0]].shape[dims[0][1]] if dims else 1
        while True:
            own, others = {(size + extra) / size}, {(each + extra) / each for each in range(max(1, size - 2), size + 3)}
            if not own & ratios[1] and not others & ratios[0]:
                break
            extra += 1
        ratios = [ratios[0] | own, ratios[1] | others]
        found.append(extra)
    return found


def _compare(
    ours: list[Value],
    theirs: list[Value],
    inputs: Mapping[str, Tensor],
    larger: Mapping[str, Tensor],
    free: Sequence[Dim],
) -> None:
    """Say of each value the shape that it has where inputs are larger, and of each number what it is of sizes. Raises
    NotUnderstood where a number is of none, and changes nothing then.
    """
    before, after = ({dim: each[dim[0]].shape[dim[1]] for dim in free} for each in (inputs, larger))
    names = known() | {*LEAVES, "constant"}
    understood = all(value.op in names for value in ours)  # what is not is refused for that
    numbers: list[tuple[Value, str, float | list[float]]] = []

    def formula(value: Value, given: float, other: Any) -> float:
        found = of_sizes(given, other, before, after)
        if found is None and understood:
            raise value.refuse(f"the number {given} depends on sizes")
        return given if found is None else found

    for value, twin in zip(ours, theirs, strict=True):
        for name, given in value.args.items():
            if name == "shifts":
                each = zip(given, twin.args[name], strict=True)
                numbers.append((value, name, [formula(value, own, other) for own, other in each]))
            elif name not in PLACES and isinstance(given, int | float) and not isinstance(given, bool):
                numbers.append((value, name, formula(value, given, twin.args[name])))
    for value, twin in zip(ours, theirs, strict=True):
        value.twin = twin.shape
        value.varies = value.is_float and bool(value.inputs) and number_of(value) != number_of(twin)
    for value, name, number in numbers:
        value.args[name] = number


def _ways(
    inputs: Mapping[str, Tensor], solved: Callable[[], list[list[Dim]]]
) -> Iterator[tuple[list[list[Dim]], bool]]:
    """Dimensions that are likely to be of any size: the batch, and the length of sequences, each with all inputs that
    have it. Where other dimensions are as long as sequences, it is tried with these and without; then with those that
    are one axis by what is computed, of which some may not be of any size (False); and at last with the batch alone.
    """
    dims = [(name, dim) for name, each in inputs.items() for dim in range(each.dim())]
    batch = [dim for dim in dims if dim[1] == 0]
    batch = batch if len({inputs[name].shape[0] for name, _ in batch}) == 1 else []
    ids = [name for name, each in inputs.items() if each.dim() == 2 and each.dtype == torch.int64]
    of_rank = {rank: [name for name, each in inputs.items() if each.dim() == rank] for rank in (3, 2)}
    long = {(name, 1): inputs[name].shape[1] for name in ids or of_rank[3] or of_rank[2]}
    ways: list[list[list[Dim]]] = []
    for others in (dims, [dim for dim in dims if dim[1] == 1], []):
        groups = [batch]
        for size in dict.fromkeys(long.values()):
            own = [dim for dim in long if long[dim] == size]
            more = [(name, dim) for name, dim in others if dim and inputs[name].shape[dim] == size]
            groups.append(list(dict.fromkeys([*own, *more])))
        if long and groups not in ways:
            ways.append(groups)
    yield from ((way, True) for way in ways)
    groups = solved()
    whole = dict.fromkeys(each for dims in groups if {*batch} & {*dims} for each in dims)
    if whole:  # all inputs have one batch, also where nothing says so
        groups = [[*dict.fromkeys([*batch, *whole])], *(dims for dims in groups if not {*batch} & {*dims})]
    if len(groups) > 1 and groups not in ways:
        yield groups, False
    if batch:
        yield [batch], True
    same: dict[int, list[Dim]] = {}  # a batch that comes behind another dimension
    for name, each in inputs.items():
        for dim, size in enumerate(each.shape):
            same.setdefault(size, []).append((name, dim))
    yield from (([dims], False) for dims in same.values() if [name for name, _ in dims] == [*inputs])


def _operations(graph: Captured) -> list[Value]:
    return sorted(order(graph.written), key=lambda value: value.position)


def _longer(tensor: Tensor, name: str, free: Sequence[Sequence[Dim]], more: Sequence[int]) -> Tensor:
    for dims, extra in zip(free, more, strict=False):
        for dim in range(tensor.dim()):
            if (name, dim) in dims:
                shape = [extra if i == dim else size for i, size in enumerate(tensor.shape)]
                tensor = torch.cat([tensor, tensor.narrow(dim, 0, 1).expand(shape)], dim)
    return tensor


def of_sizes(number: float, other: Any, before: Mapping[Dim, int], after: Mapping[Dim, int]) -> float | None:
    """The number, as what it is of sizes; itself if it does not depend on them."""
    if number == other or number != number:
        return number
    found = [
        Sized(number, number / one, power, dims, 0.0)
        for dims in chain(combinations(before, 1), combinations(before, 2), ((dim, dim) for dim in before))
        for power in POWERS
        for one, two in [[float(prod(sizes[dim] for dim in dims)) ** power for sizes in (before, after)]]
        if abs(number / one * two - other) <= 1e-9 * abs(other)
    ]
    found += [
        Sized(number, 1.0, 1.0, (dim,), number - size)
        for dim, size in before.items()
        if other - number == after[dim] - size
    ]
    return min(found, key=_length, default=None)


def _length(number: Sized) -> int:
    """How much there is to say of what a number is of sizes: of several that it may be, the shortest is meant."""
    return (number.coefficient != 1) + (abs(number.power) != 1) + (number.offset != 0) + len(number.dims)
