"""Changes of layout: every path leads where it should, with the types it says, and moves what rings move."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType

import numpy as np
import pytest
import torch

from partita.compiler.costs.links import Link
from partita.compiler.layout import MAX, SUM, Flat, Layout, State, layout_of, local_type
from partita.compiler.mesh import Mesh
from partita.compiler.ops import OPS
from partita.compiler.ops.collective import (
    LOCAL_SECONDS,
    TRANSITIONS,
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Flatten,
    ReduceScatter,
    Reshard,
    Unflatten,
    kind_of,
    transition,
)
from partita.compiler.ops.sparse import SparseAllToAll
from partita.compiler.passes.shard.resharding import IMPOSSIBLE, Resharding
from partita.dsl.types import Axis, Type
from tests.compiler.ops.placing import cut, join, ranks, run

SIZES = {"x": 2, "y": 3}
TYPE = Type("f64", (Axis("a", 6), Axis("b", 12)))
LINK = Link("wire", 1e9, 1e-6)


def resharding() -> Resharding:
    return Resharding(Mesh(tuple(SIZES.items()), None, tuple((name, LINK) for name in SIZES)))


def moved(
    op: Reshard, type: Type, parts: list[torch.Tensor], sizes: Mapping[str, int] = MappingProxyType(SIZES)
) -> list[torch.Tensor]:
    """The operation on what every rank holds."""
    if not isinstance(op, Collective):
        return [run(op, [type], [part], at)[0] for part, at in zip(parts, ranks(sizes), strict=True)]
    results = list(parts)
    places = ranks(sizes)
    for i, at in enumerate(places):
        group = [k for k, other in enumerate(places) if {**other, op.over: 0} == {**at, op.over: 0}]
        held = [parts[k] for k in group]
        own = group.index(i)
        if isinstance(op, AllGather):
            results[i] = torch.cat(held, type.position(op.axes[0]))
        elif isinstance(op, ReduceScatter):
            results[i] = torch.stack(held).sum(0).chunk(op.parts, type.position(op.axes[0]))[own]
        elif isinstance(op, AllToAll):
            pieces = [part.chunk(op.parts, type.position(op.axes[0]))[own] for part in held]
            results[i] = torch.cat(pieces, type.position(op.source[0]))
        else:
            assert isinstance(op, AllReduce)
            stacked = torch.stack(held)
            results[i] = stacked.amax(0) if op.maximum else stacked.sum(0)
    return results


def every_layout() -> list[Layout]:
    states = (None, SUM, MAX, "a", "b")
    found = [layout_of(zip(SIZES, pair, strict=True)) for pair in product(states, repeat=2)]
    return [at for at in found if not {SUM, MAX} <= {state for _, state in at.states}]


def flat_layouts() -> list[Layout]:
    """With zeros at the end and without: over one mesh axis or both, split along others or in parts of a sum."""
    found = []
    for pair, parts in product(product((None, SUM, "a", "b", "flat"), repeat=2), (6, 30)):
        kept = tuple(name for name in TYPE.names if name in pair)
        found.append(layout_of(zip(SIZES, pair, strict=True), Flat(TYPE.axes, parts, kept)))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("source", [*every_layout(), *flat_layouts()], ids=str)
def test_every_path_leads_to_its_layout(source: Layout):
    """From any layout to any that is not a maximum in parts: the ranks then hold the same tensor, laid out so."""
    generator = np.random.default_rng(1)
    x = torch.from_numpy(generator.integers(-9, 10, TYPE.shape)).to(torch.float64)
    for target in [*every_layout(), *flat_layouts()]:
        if target != source and any(state == MAX for _, state in target.states):
            continue
        parts = cut(x, TYPE, source, SIZES, generator)
        type = local_type(TYPE, source, SIZES)
        for step in resharding().path(type, source, target):
            parts = moved(step.op, type, parts)
            (type,) = step.op.infer(type)
            assert type == step.type == local_type(TYPE, step.layout, SIZES)
            joined = join(parts, TYPE, step.layout, SIZES)
            assert joined is not None
            assert torch.equal(joined, x)
        assert type == local_type(TYPE, target, SIZES)


def test_elements_are_in_the_order_of_the_form():
    """Whatever the order of the axes of what is made flat."""
    x = torch.arange(6.0).view(2, 3)
    op = Flatten("flat", ("b", "a"), 6, 8)
    (found,) = run(op, [Type("f32", (Axis("a", 2), Axis("b", 3)))], [x], {})
    assert found.tolist() == [0, 3, 1, 4, 2, 5, 0, 0]


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_a_rank_sends_what_a_ring_sends(parts: int):
    """Parts go round the ring, N−1 times; what is summed goes round a second time to be spread."""
    part = TYPE.bytes / parts
    assert AllGather("x", parts, ("a",)).moved([TYPE]) == (parts - 1) * TYPE.bytes
    assert ReduceScatter("x", parts, ("a",)).moved([TYPE]) == pytest.approx((parts - 1) * part)
    assert AllReduce("x", parts).moved([TYPE]) == pytest.approx(2 * (parts - 1) * part)
    assert AllToAll("x", parts, ("a",), ("b",)).moved([TYPE]) == pytest.approx((parts - 1) * part)


@pytest.mark.parametrize(
    "op",
    [AllGather("x", 2, ("a",)), ReduceScatter("x", 2, ("b",)), AllReduce("x", 2), AllToAll("x", 2, ("a",), ("b",))],
    ids=lambda op: op.name,
)
def test_a_bucket_is_its_tensors(op: Collective):
    """Together they have the types of each, and move as much."""
    other = Type("f32", (Axis("b", 4), Axis("a", 2)))
    both = op.together([op, op])
    assert both.count == 2
    assert both.infer(TYPE, other) == (*op.infer(TYPE), *op.infer(other))
    assert both.moved([TYPE, other]) == op.moved([TYPE]) + op.moved([other])


def test_every_change_of_layout_is_on_some_path():
    used = {
        type(step.op)
        for source, target in product([*every_layout(), flat_layouts()[-1]], repeat=2)
        if source == target or not any(state == MAX for _, state in target.states)
        for step in resharding().path(local_type(TYPE, source, SIZES), source, target)
    }
    assert used == {op for op in OPS.values() if issubclass(op, Reshard) and op.reshards} - {
        SparseAllToAll
    }  # of sparse gradients


# ---------------------------------------------------------------- single steps

STATES = (None, SUM, MAX, "a", "b")


@pytest.mark.parametrize(("before", "after"), list(product(STATES, repeat=2)), ids=str)
def test_a_single_step_leads_where_it_says(before: State, after: State):
    op = transition("x", 2, before, after)
    if op is None:
        assert before == after or (kind_of(before), kind_of(after)) not in TRANSITIONS
        return
    assert op.ends == ((before, after),)
    source, target = layout_of([("x", before)]), layout_of([("x", after)])
    sizes = {"x": 2}
    generator = np.random.default_rng(2)
    x = torch.from_numpy(generator.integers(-9, 10, TYPE.shape)).to(torch.float64)
    type = local_type(TYPE, source, sizes)
    parts = moved(op, type, cut(x, TYPE, source, sizes, generator), sizes)
    assert op.infer(type) == (local_type(TYPE, target, sizes),)
    joined = join(parts, TYPE, target, sizes)
    assert joined is not None
    assert torch.equal(joined, x)


def test_the_table_has_every_change_of_layout():
    assert {*TRANSITIONS.values(), Flatten, Unflatten, SparseAllToAll} == {
        op for op in OPS.values() if issubclass(op, Reshard) and op.reshards
    }


def test_a_bucket_is_of_one_kind():
    """Collectives whose buckets are equal are of one class, axis and kind of sum."""
    steps = [transition(over, 2, *ends) for over in ("x", "y") for ends in product(STATES, repeat=2)]
    collectives = [op for op in steps if isinstance(op, Collective)]
    for one, other in product(collectives, repeat=2):
        alike = type(one) is type(other) and one.over == other.over
        sums = getattr(one, "maximum", None) == getattr(other, "maximum", None)
        assert (one.bucket == other.bucket) == (alike and sums)
        if one.bucket == other.bucket:
            assert one.together([one, other]).ends == (*one.ends, *other.ends)


@pytest.mark.parametrize(("before", "after"), list(product(STATES, (None, "a", "b"))), ids=str)
@pytest.mark.parametrize("default", [None, "a", "b"])
def test_a_change_is_estimated_by_the_steps_that_there_are(before: State, after: State, default: State):
    """The cheapest path is no dearer, and as dear where it takes the one step that there is."""
    axis = Resharding(Mesh((("x", 2),), None, (("x", LINK),)))
    source, target = layout_of([("x", before)]), layout_of([("x", after)])
    type = local_type(TYPE, source, {"x": 2})
    path = axis.path(type, source, target)
    estimate = axis.change_seconds(TYPE.bytes, "x", before, after, default)
    cheapest = sum(step.seconds for step in path)
    assert cheapest <= estimate + LOCAL_SECONDS
    if len(path) <= 1 and (before != SUM or default == after):
        assert estimate == pytest.approx(cheapest, abs=1.5 * LOCAL_SECONDS)


def test_parts_of_a_sum_cannot_be_had():
    axis = Resharding(Mesh((("x", 2),), None, (("x", LINK),)))
    for before, after in product(STATES, (SUM, MAX)):
        expected = 0.0 if before == after else IMPOSSIBLE
        assert axis.change_seconds(TYPE.bytes, "x", before, after, None) == expected
