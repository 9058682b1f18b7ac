"""The certificate: a change of layout that it lets pass makes, of any tensor, what the layouts say.

All steps between all layouts of a small tensor, by hand on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from partita.compiler.graph import Value
from partita.compiler.layout import MAX, SUM, Layout, layout_of, local_type
from partita.compiler.mesh import Mesh
from partita.compiler.ops.collective import AllGather, AllReduce, AllToAll, KeepOnFirst, Part, ReduceScatter, Reshard
from partita.compiler.verify.rules import Rules, Violation
from partita.dsl.types import Axis, Type

MESH = Mesh((("a", 2), ("b", 3)))
TYPE = Type("i64", (Axis("x", 12), Axis("y", 18)))
STATES = (None, SUM, MAX, *TYPE.names)
LAYOUTS = [layout_of(zip(MESH.sizes, states, strict=True)) for states in product(STATES, repeat=2)]
# What each rank has, by its coordinates along the mesh axes.
Held: TypeAlias = dict[tuple[int, ...], Tensor]


def steps(over: str, parts: int) -> Iterator[Reshard]:
    """Every change of layout of one tensor along a mesh axis."""
    yield from (AllReduce(over, parts, maximum=maximum) for maximum in (False, True))
    yield KeepOnFirst(over, parts)
    for axis in TYPE.names:
        yield from (AllGather(over, parts, (axis,)), ReduceScatter(over, parts, (axis,)), Part(over, parts, axis))
        yield from (AllToAll(over, parts, (axis,), (other,)) for other in TYPE.names if other != axis)


def dealt(whole: Tensor, layout: Layout) -> Held:
    """A tensor on the ranks: shards, the outermost mesh axis first; terms of a sum; or what it is the maximum of."""
    held = {(): whole}
    for over, count in MESH.sizes.items():
        state, found = layout.state(over), dict[tuple[int, ...], Tensor]()
        for at, own in held.items():
            if state == SUM:
                others = [torch.randint(-99, 99, own.shape) for _ in range(count - 1)]
                parts = [own - sum(others), *others]
            elif state == MAX:
                most = torch.randint(count, own.shape)
                parts = [own - torch.randint(1, 99, own.shape) * (most != rank) for rank in range(count)]
            else:
                parts = [own] * count if state is None else list(own.chunk(count, TYPE.position(state)))
            found |= {(*at, rank): part for rank, part in enumerate(parts)}
        held = found
    return held


def stepped(held: Held, op: Reshard) -> Held:
    """What a change of layout makes on each rank of what its ranks have."""
    dim = list(MESH.sizes).index(op.over)
    found = {}
    for at in held:
        ranks = [held[*at[:dim], rank, *at[dim + 1 :]] for rank in range(op.parts)]
        own, here = at[dim], held[at]
        match op:
            case AllReduce(maximum=maximum):
                found[at] = torch.stack(ranks).amax(0) if maximum else sum(ranks)
            case AllGather(axes=(axis,)):
                found[at] = torch.cat(ranks, TYPE.position(axis))
            case ReduceScatter(axes=(axis,)):
                found[at] = sum(ranks).chunk(op.parts, TYPE.position(axis))[own]
            case AllToAll(source=(old,), axes=(new,)):
                given = [each.chunk(op.parts, TYPE.position(new))[own] for each in ranks]
                found[at] = torch.cat(given, TYPE.position(old))
            case Part(axis=axis):
                found[at] = here.chunk(op.parts, TYPE.position(axis))[own]
            case KeepOnFirst():
                found[at] = here if own == 0 else torch.zeros_like(here)
    return found


def joined(held: Held, layout: Layout) -> Tensor | None:
    """The tensor that ranks hold in a layout; None if what should be equal differs."""
    for over, count in reversed(MESH.sizes.items()):
        state, found = layout.state(over), dict[tuple[int, ...], Tensor]()
        for at in {at[:-1]: None for at in held}:
            ranks = [held[*at, rank] for rank in range(count)]
            if state is None and not all(each.equal(ranks[0]) for each in ranks):
                return None
            if state in (None, SUM, MAX):
                found[at] = {None: lambda x: x[0], SUM: lambda x: x.sum(0), MAX: lambda x: x.amax(0)}[state](
                    torch.stack(ranks)
                )
            else:
                found[at] = torch.cat(ranks, TYPE.position(state))
        held = found
    return held[()]


def certified(op: Reshard, before: Layout, after: Layout, type: Type = TYPE) -> bool:
    """Whether the rules let a step pass from one layout of a tensor to another."""
    source = Value("x", local_type(type, before, MESH.sizes), before)
    try:
        (made,) = op.infer(source.type)
        Rules(MESH).reshard(op, [source], [Value("y", made, after)])
    except Violation:
        return False
    return True


def test_what_is_certified_makes_what_the_layouts_say():
    torch.manual_seed(0)
    whole = torch.randint(-99, 99, TYPE.shape)
    found: Counter[str] = Counter()
    for over, parts in MESH.sizes.items():
        for op, before, after in product(steps(over, parts), LAYOUTS, LAYOUTS):
            if certified(op, before, after):
                found[op.name] += 1
                made = joined(stepped(dealt(whole, before), op), after)
                assert made is not None, f"{op}: {before} to {after}"
                assert made.equal(whole), f"{op}: {before} to {after}"
    # Whatever is along the other mesh axis: but maxima beside sums, and, further inside, the axis that is changed.
    assert found == {
        "all_reduce": 2 * (4 + 4),
        "once": 2 * 4,
        "all_gather": 2 * (4 + 5),
        "part": 2 * (4 + 5),
        "reduce_scatter": 2 * (3 + 4),
        "all_to_all": 2 * (3 + 5),
    }


def test_shards_are_of_one_size():
    """Seven elements in two parts are not three each."""
    odd = TYPE.resized("x", 7)
    for op, before, after in ((Part("a", 2, "x"), None, "x"), (ReduceScatter("a", 2, ("x",)), SUM, "x")):
        assert certified(op, layout_of([("a", before)]), layout_of([("a", after)]))
        assert not certified(op, layout_of([("a", before)]), layout_of([("a", after)]), odd)
