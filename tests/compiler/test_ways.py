"""The tables of ways are sound and complete: what they allow holds, and what holds is allowed.

Soundness: every way of every case, in two parts and in three, and every pair of ways on two mesh axes, where both may
cut one axis; numbers are small integers, so that arithmetic comes out to the bit. Completeness: all placements of
the operands are tried with random numbers; one whose parts make up the result must follow from the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
import torch

from partita.compiler.layout import is_split, layout_of, local_type
from partita.compiler.ops.op import MAX, SUM, Op, State, Way
from partita.compiler.ops.pointwise import Pointwise
from partita.dsl.types import Type
from tests.compiler.op_cases import CASES, Case
from tests.compiler.placing import cut, equal, join, layouts, on_ranks, run

BY_NAME = {case.name: case for case in CASES}

# Operations that only move, add, multiply and compare: on integers their parts make up the result to the bit.
EXACT = frozenset(
    "cast detach dot reduce argmax first_index arrange rename split merge expand slice pad concat gather scatter_add "
    "pick iota random "
    "add subtract multiply negate maximum minimum where relu abs relu_gradient abs_gradient "
    "less less_equal greater greater_equal equal not_equal".split()
)


def tolerance(op: Op) -> float:
    name = op.function if isinstance(op, Pointwise) else op.name
    return 0.0 if name in EXACT else 1e-12


def feeds(case: Case, types: Sequence[Type], generator: np.random.Generator, integers: bool) -> list[torch.Tensor]:
    """Random operands; `integers`: floats are small integers, too."""

    def tensor(type: Type) -> torch.Tensor:
        if type.dtype == "bool":
            mask = generator.random(type.shape) < 0.5
            mask[..., 0] = True  # a softmax over nothing has no value
            return torch.from_numpy(mask)
        if type.dtype in ("i64", "i32"):
            dtype = torch.int64 if type.dtype == "i64" else torch.int32
            return torch.from_numpy(np.asarray(generator.integers(0, case.limit, type.shape))).to(dtype)
        x = generator.integers(-2, 3, type.shape).astype(float) if integers else generator.normal(size=type.shape)
        return torch.from_numpy(np.asarray(np.abs(x) + 1 if case.positive else x))

    tensors = [tensor(type) for type in types]
    if case.op.name in ("first_index", "exp_sum"):
        # Their second operand is the maximum of the first.
        over = types[0].position(case.op.over)  # type: ignore[attr-defined]
        names = [name for name in types[0].names if name in types[1].names]
        tensors[1] = tensors[0].amax(over).permute([names.index(name) for name in types[1].names])
    return tensors


def holds(case: Case, types: Sequence[Type], ways: Sequence[Way], sizes: dict[str, int], seed: int) -> None:
    """The parts, computed where the ways of all mesh axes say, make up the whole results."""
    generator = np.random.default_rng(seed)
    operands = feeds(case, types, generator, integers=True)
    results = case.op.infer(*types)
    whole = run(case.op, types, [x.clone() for x in operands], {})
    before, after = layouts(ways, sizes)
    parts = [cut(x, type, at, sizes, generator) for x, type, at in zip(operands, types, before, strict=True)]
    found = on_ranks(case.op, types, results, [*before, *after], sizes, parts)
    for expected, type, at, pieces in zip(whole, results, after, found, strict=True):
        local = local_type(type, at, sizes)
        assert all(tuple(piece.shape) == local.shape for piece in pieces), f"{ways}: {pieces[0].shape} of {type}"
        joined = join(pieces, type, at, sizes)
        assert joined is not None, f"{ways}: ranks differ"
        assert equal(joined, expected, tolerance(case.op)), f"{ways}: {joined} is not {expected}"


def all_ways(op: Op, types: Sequence[Type]) -> tuple[Way, ...]:
    results = op.infer(*types)
    return (Way((None,) * len(types), (None,) * len(results)), *op.ways(types, results))


@pytest.mark.parametrize("name", BY_NAME)
def test_every_way_is_sound(name: str):
    """In two parts and in three, with the operands' axes in several orders."""
    case = BY_NAME[name]
    for order in (0, 5, 11):
        types = case.types(order)
        ways = all_ways(case.op, types)
        assert len(set(ways)) == len(ways)
        for way in ways:
            assert len(way.operands) == len(types)
            for parts in (2, 3):
                holds(case, types, [way], {"x": parts}, order)


@pytest.mark.parametrize("name", BY_NAME)
def test_ways_on_two_mesh_axes_are_sound(name: str):
    """Any two together, also on one axis, where the first mesh axis cuts the larger parts.

    But no value is partial as a sum and as a maximum at once: which of them comes first would matter.
    """
    case = BY_NAME[name]
    types = case.types(7)
    for pair in product(all_ways(case.op, types), repeat=2):
        states = list(zip(*((*way.operands, *way.results) for way in pair), strict=True))
        if not any({SUM, MAX} <= set(state) for state in states):
            holds(case, types, pair, {"x": 2, "y": 3}, 7)


# ---------------------------------------------------------------- completeness

# Above this many combinations of the operands' states, they are tried one axis at a time.
FEW = 700


def placements(case: Case) -> Iterator[tuple[State, ...]]:
    """States of the operands: whole, in parts of a sum (or maximum, for maxima), or split along any axis."""
    types = case.operands
    partial = (MAX,) if getattr(case.op, "function", "") == "max" else ()

    def states(type: Type, axes: Sequence[str]) -> list[State]:
        return [None, *(() if type.dtype == "bool" else (SUM, *partial)), *(a for a in type.names if a in axes)]

    every = [states(type, type.names) for type in types]
    if prod(map(len, every)) <= FEW:
        yield from product(*every)
        return
    seen = set()
    for axis in dict.fromkeys(name for type in types for name in type.names):
        for found in product(*(states(type, [axis]) for type in types)):
            if found not in seen:
                seen.add(found)
                yield found


def found_ways(case: Case) -> Iterator[Way]:
    """All placements that hold with random numbers, in two parts and in three."""
    types = case.operands
    results = case.op.infer(*types)
    axes = dict.fromkeys(name for result in results for name in result.names)
    for before in placements(case):
        # Axes that the operation makes are cut beside those of its operands.
        for made in (None, *(axis for axis in axes if axis not in before)):
            options = holding(case, types, results, before, made, {"x": 2}, 1)
            for sizes, seed in (({"x": 2}, 2), ({"x": 3}, 3)):
                if options:
                    again = holding(case, types, results, before, made, sizes, seed)
                    options = [a & b for a, b in zip(options, again, strict=True)] if again else []
            for after in product(*options) if options else ():
                if made is None or made in after:
                    yield Way(before, tuple(after))


def holding(
    case: Case,
    types: Sequence[Type],
    results: Sequence[Type],
    before: tuple[State, ...],
    made: str | None,
    sizes: dict[str, int],
    seed: int,
) -> list[set[State]]:
    """For each result the states in which the parts make it up; nothing where they cannot be computed."""
    generator = np.random.default_rng(seed)
    operands = feeds(case, types, generator, integers=False)
    placed = [layout_of([("x", state)]) for state in before]
    after = [layout_of([("x", made if made in result.names else None)]) for result in results]
    parts = [cut(x, type, at, sizes, generator) for x, type, at in zip(operands, types, placed, strict=True)]
    try:
        found = on_ranks(case.op, types, results, [*placed, *after], sizes, parts)
    except (AssertionError, IndexError, KeyError, RuntimeError, ValueError):
        return []
    whole = run(case.op, types, operands, {})
    options: list[set[State]] = []
    for expected, type, pieces in zip(whole, results, found, strict=True):
        possible: list[State] = [None, *(() if type.dtype == "bool" else (SUM, MAX)), *type.names]
        good = set()
        for state in possible:
            at = layout_of([("x", state)])
            if tuple(pieces[0].shape) == local_type(type, at, sizes).shape:
                joined = join(pieces, type, at, sizes)
                if joined is not None and equal(joined, expected, 1e-9):
                    good.add(state)
        options.append(good)
    return options if all(options) else []


def follows(way: Way, table: Sequence[Way]) -> bool:
    """Whether a placement is in the table, or has less to offer: a whole value is a maximum in parts as well."""
    return any(
        all(a == b or (a is None and b == MAX) for a, b in zip(way.operands, known.operands, strict=True))
        and all(a == b or (b is None and a == MAX) for a, b in zip(way.results, known.results, strict=True))
        for known in table
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_no_way_is_missing(name: str):
    case = BY_NAME[name]
    table = all_ways(case.op, case.operands)
    missing = [way for way in found_ways(case) if not follows(way, table)]
    assert not missing, f"a legal placement is missing: {missing}"
