"""Finds where a partitioned program first differs from the single-device one: both are traced, value by value.

A traced program passes every value it makes to `c.record`. A value of the model is assembled from the ranks' shards, by
its layout, and from the microbatches, and compared with the value of the same name in the single-device program, in the
order of that program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from attrs import define, field, frozen

from partita.compiler.codegen.writer import Probe
from partita.compiler.graph import Node, Phase, Value
from partita.compiler.layout import MAX, SUM, global_type
from partita.compiler.mesh import Mesh
from partita.compiler.ops.grouped import ROWS
from partita.compiler.ops.runs import zigzag_runs
from partita.compiler.passes.padded import padded_sizes
from partita.compiler.pipeline import assembled
from partita.compiler.state import Compilation
from partita.dsl.check.divisibility import ranks_in_zigzag
from partita.dsl.types import Type
from partita.runtime.context import Context
from partita.runtime.kernels.positions import take_runs
from partita.runtime.regions import region_of, whole_region

# Shards of a value, by microbatch and slice, and by rank.
Parts = dict[tuple[int, int], dict[int, torch.Tensor]]
Differs = Callable[[torch.Tensor, torch.Tensor], bool]


@frozen(eq=False)
class Culprit:
    """The first value that differs: its node and value in the partitioned program, and in which copy."""

    node: Node
    value: Value
    where: str


@define(eq=False)
class Recorder:
    """Collects the values that the ranks of a run make, by name."""

    made: dict[str, Parts] = field(factory=dict)

    def of(self, rank: int, context: Context) -> Callable[[str, torch.Tensor], None]:
        """The `record` function for the context of a rank."""

        def record(name: str, tensor: torch.Tensor) -> None:
            part = context.microbatch, context.slice
            self.made.setdefault(name, {}).setdefault(part, {})[rank] = tensor.detach().clone()

        return record


class Recorded(Probe):
    """A `Probe` that passes every value of a microbatch to `c.record`, by its name."""

    def after(self, node: Node, added: bool, names: Sequence[str]) -> list[str]:
        """A call for each value."""
        if added or node.phase in (Phase.FINISH, Phase.UPDATE):
            return []
        if any(value.type.has(ROWS) for value in node.outputs):
            return []  # one device has its rows in another order
        return [f"c.record({value.name!r}, {name})" for value, name in zip(node.outputs, names, strict=True)]


def traced(state: Compilation) -> Compilation:
    """A compilation whose program records its values."""
    return assembled(state, Recorded())


def first_difference(
    state: Compilation,
    actual: Mapping[str, Parts],
    single: Compilation,
    expected: Mapping[str, Parts],
    differs: Differs,
) -> Culprit | None:
    """The first value that differs, in the order of the single-device program; in whichever order an axis is."""
    values = _values(state)
    orders = ranks_in_zigzag(state.spec)
    sizes = padded_sizes(state.joint)
    for _, reference in _nodes(single):
        if reference.name not in actual or reference.name not in expected or reference.name not in values:
            continue
        node, value = values[reference.name]
        whole = next(iter(expected[reference.name].values()))[0]
        for where, possible in _wholes(value, actual[reference.name], state.mesh, reference.type, state.batch, sizes):
            wholes = list(_orders(whole, reference.type, orders))
            real = whole_region(reference.type.shape)
            if all(differs(candidate[real], each) for candidate in possible for each in wholes):
                return Culprit(node, value, where)
    return None


def _orders(whole: torch.Tensor, type: Type, orders: Mapping[str, int]) -> Iterator[torch.Tensor]:
    """A value in its own order, and in zigzag order along the axes that are."""
    yield whole
    for axis, ranks in orders.items():
        if type.has(axis):
            size = type.axis(axis).size
            whole = take_runs(whole, type.position(axis), zigzag_runs(0, size, size, ranks))
    yield whole


def _nodes(state: Compilation) -> Iterator[tuple[Node, Value]]:
    for stage in state.partitioned.stages:
        for node in stage.nodes:
            for value in node.outputs:
                yield node, value


def _values(state: Compilation) -> dict[str, tuple[Node, Value]]:
    """Values by name, without those that stages hold in different layouts."""
    values: dict[str, tuple[Node, Value]] = {}
    unclear = set()
    for node, value in _nodes(state):
        _, other = values.setdefault(value.name, (node, value))
        if (other.layout, other.type) != (value.layout, value.type):
            unclear.add(value.name)
    return {name: pair for name, pair in values.items() if name not in unclear}


def _wholes(
    value: Value, parts: Parts, mesh: Mesh, target: Type, batch: str, sizes: Mapping[str, int]
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """What the full value may be from each set of ranks that holds a copy of it, with axes padded to some `sizes`;
    nothing if it cannot be assembled.
    """
    for name in target.names:
        target = target.resized(name, sizes.get(name, target.axis(name).size))
    type = global_type(value.type, value.layout, mesh.sizes)
    if sorted(type.names) != sorted(target.names):
        return
    cut = [name for name in target.names if name != batch and type.axis(name) != target.axis(name)]
    count = 1 + max(own for _, own in parts)
    if len(cut) > 1 or any(type.axis(name).size * count != target.axis(name).size for name in cut):
        return
    order = [type.position(name) for name in target.names]
    microbatches: dict[int, list[dict[str, torch.Tensor]]] = {}
    for (microbatch, _), by_rank in sorted(parts.items()):
        microbatches.setdefault(microbatch, []).append(_copies(value, type, by_rank, mesh))
    split = batch if target.has(batch) and type.axis(batch) != target.axis(batch) else None
    for where in next(iter(microbatches.values()))[0]:
        own = [
            _joined([each[where].permute(order) for each in slices if where in each], target, cut[0] if cut else None)
            for slices in microbatches.values()
        ]
        yield where, [whole for parts in zip(*own, strict=True) for whole in _joined(parts, target, split)]


def _joined(tensors: Sequence[torch.Tensor], target: Type, axis: str | None) -> list[torch.Tensor]:
    """What a value may be, of its parts over time: these along an axis, or all alike, or terms of a sum."""
    if axis is not None:
        return [torch.cat(list(tensors), target.position(axis))]
    total = torch.stack(list(tensors)).sum(0)
    alike = all(torch.equal(tensors[0], other) for other in tensors[1:])
    return [tensors[0] if alike else total, total]


def _copies(value: Value, type: Type, by_rank: Mapping[int, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """The full tensors of one microbatch's value, by the coordinates along the mesh axes on which it is replicated."""
    states = dict(value.layout.states)
    copies: dict[str, torch.Tensor] = {}
    for rank, part in by_rank.items():
        coordinates = mesh.coordinates(rank)
        where = " ".join(f"{name} = {i}" for name, i in coordinates.items() if name not in states)
        region = region_of(type, value.layout, mesh.sizes, coordinates)
        if MAX in states.values():
            whole = copies.setdefault(where, part.new_full(type.shape, float("-inf")))
            whole[region] = torch.maximum(whole[region], part)
        elif SUM in states.values() and part.dtype is not torch.bool:
            whole = copies.setdefault(where, part.new_zeros(type.shape))
            whole[region] += part
        else:
            whole = copies.setdefault(where, part.new_zeros(type.shape))
            whole[region] = part
    return copies
