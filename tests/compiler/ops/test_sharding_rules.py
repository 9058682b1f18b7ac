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

from partita.compiler.layout import MAX, SUM, State, layout_of, local_type
from partita.compiler.ops.op import Op, ShardingRule
from partita.compiler.ops.optimizer import Update
from partita.compiler.ops.pointwise import FUNCTIONS, Pointwise
from partita.dsl.types import Type
from tests.compiler.ops.op_cases import CASES, Case, fitted
from tests.compiler.ops.placing import cut, equal, join, layouts, local_op, on_ranks, run
from tests.marks import soak

BY_NAME = {case.name: case for case in CASES}
COMPARISONS = [name for name, function in FUNCTIONS.items() if function.boolean]

# Operations that only move, add, multiply and compare: on integers their parts make up the result to the bit.
EXACT = {
    *("cast", "detach", "dot", "reduce", "argmax", "first_index", "arrange", "rename", "split", "merge", "expand"),
    *("slice", "pad", "concat", "gather", "scatter_add", "scatter_max", "pick", "iota", "random"),
    *("microbatch", "top_k", "routed_dot", "routed_outer", "slot_index", "dispatch", "collect", "load"),
    *("slice", "pad", "shift", "concat", "gather", "scatter_add", "pick", "iota", "random"),
    *("microbatch", "states_before", "linear_scan", "linear_scan_blocks", "linear_scan_gradient", "block_ends"),
    *("delta_scan", "delta_scan_blocks", "delta_rule", "flip", "rotate"),
    *("coalesce", "merge_rows", "distinct_ids", "look_up_entries", "take_entries"),
    *("cumsum", "block_sums", "one_hot", "stack", "unstack", "to_float8", "float8_dot"),
    *("add", "subtract", "multiply", "negate", "maximum", "minimum", "where", "relu", "abs"),
    *("relu_gradient", "abs_gradient", *COMPARISONS),
}


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
        if type.dtype == "u8":
            return torch.from_numpy(generator.integers(0, 256, type.shape, dtype=np.uint8))
        # Quarters are equal often enough for comparisons to tell something.
        x = (
            generator.integers(-2, 3, type.shape).astype(float)
            if integers
            else generator.integers(-9, 9, type.shape) / 4
        )
        return torch.from_numpy(np.asarray(np.abs(x) + 1 if case.positive else x))

    tensors = [tensor(type) for type in types]
    return fitted(case, types, tensors)


def holds(case: Case, types: Sequence[Type], rules: Sequence[ShardingRule], sizes: dict[str, int], seed: int) -> None:
    """The parts, computed where the ways of all mesh axes say, make up the whole results."""
    generator = np.random.default_rng(seed)
    operands = feeds(case, types, generator, integers=True)
    results = case.op.infer(*types)
    whole = run(case.op, types, [x.clone() for x in operands], {})
    before, after = layouts(rules, sizes)
    parts = [cut(x, type, at, sizes, generator) for x, type, at in zip(operands, types, before, strict=True)]
    found = on_ranks(case.op, types, results, [*before, *after], sizes, parts)
    for expected, type, at, pieces in zip(whole, results, after, found, strict=True):
        local = local_type(type, at, sizes)
        assert all(tuple(piece.shape) == local.shape for piece in pieces), f"{rules}: {pieces[0].shape} of {type}"
        joined = join(pieces, type, at, sizes)
        assert joined is not None, f"{rules}: ranks differ"
        assert equal(joined, expected, tolerance(case.op)), f"{rules}: {joined} is not {expected}"


def all_ways(op: Op, types: Sequence[Type]) -> tuple[ShardingRule, ...]:
    results = op.infer(*types)
    return (ShardingRule((None,) * len(types), (None,) * len(results)), *op.sharding_rules(types, results))


@pytest.mark.parametrize(("order", "parts"), [(11, 2), *soak((0, 2), (0, 3), (11, 3))])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_way_is_sound(name: str, order: int, parts: int):
    """In two parts and in three, with the operands' axes in several orders."""
    case = BY_NAME[name]
    types = case.types(order)
    rules = all_ways(case.op, types)
    assert len(set(rules)) == len(rules)
    for rule in rules:
        assert len(rule.operands) == len(types)
        holds(case, types, [rule], {"x": parts}, order)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*BY_NAME])
def test_ways_on_two_mesh_axes_are_sound(name: str):
    """Any two together, also on one axis, where the first mesh axis cuts the larger parts.

    None make a value partial as a sum and as a maximum at once: it would matter which of them comes first.
    """
    case = BY_NAME[name]
    types = case.types(7)
    for pair in product(all_ways(case.op, types), repeat=2):
        for states in zip(*((*rule.operands, *rule.results) for rule in pair), strict=True):
            assert not {SUM, MAX} <= set(states), pair
        holds(case, types, pair, {"x": 2, "y": 3}, 7)


# ---------------------------------------------------------------- completeness

# Above this many combinations of the operands' states, they are tried one axis at a time.
FEW = 400


class Trial:
    """One drawing of random operands of a case, the results that belong to them, and the operands in parts."""

    def __init__(self, case: Case, parts: int, seed: int) -> None:
        self.case, self.types, self.sizes = case, case.operands, {"x": parts}
        self.results = case.op.infer(*case.operands)
        self.generator = np.random.default_rng(seed)
        self.operands = feeds(case, self.types, self.generator, integers=False)
        self.whole = run(case.op, self.types, [x.clone() for x in self.operands], {})
        self.parts: dict[tuple[int, State], list[torch.Tensor]] = {}

    def cut(self, i: int, state: State) -> list[torch.Tensor]:
        if (i, state) not in self.parts:
            at = layout_of([("x", state)])
            self.parts[i, state] = cut(self.operands[i], self.types[i], at, self.sizes, self.generator)
        return self.parts[i, state]

    def holding(self, before: tuple[State, ...], made: str | None) -> list[set[State]]:
        """For each result the states in which its parts make it up; nothing where they cannot be computed."""
        after = [made if made in result.names else None for result in self.results]
        placed = [layout_of([("x", state)]) for state in (*before, *after)]
        op = local_op(self.case.op, [*self.types, *self.results], placed, self.sizes)
        local = [local_type(type, at, self.sizes) for type, at in zip(self.types, placed, strict=False)]
        try:
            options = [self.fitting(*pair) for pair in zip(self.results, op.infer(*local), strict=True)]
            if made is not None and not any(made in fitting for fitting in options):
                return []
            if not all(options):
                return []
            parts = [self.cut(i, state) for i, state in enumerate(before)]
            found = on_ranks(self.case.op, self.types, self.results, placed, self.sizes, parts)
        except (AssertionError, IndexError, KeyError, RuntimeError, ValueError):
            return []
        for fitting, expected, type, pieces in zip(options, self.whole, self.results, found, strict=True):
            for state in tuple(fitting):
                joined = join(pieces, type, layout_of([("x", state)]), self.sizes)
                if joined is None or not equal(joined, expected, 1e-9):
                    fitting.discard(state)
            if None in fitting:
                fitting.discard(MAX)  # a whole value is a maximum in parts as well
        return options if all(options) else []

    def fitting(self, type: Type, local: Type) -> set[State]:
        """States in which a rank holds that much of a result."""
        states: tuple[State, ...] = (None, *(() if type.dtype == "bool" else (SUM, MAX)), *type.names)
        return {state for state in states if local_type(type, layout_of([("x", state)]), self.sizes) == local}


def placements(case: Case) -> Iterator[tuple[State, ...]]:
    """States of the operands: whole, in parts of a sum (or maximum, for maxima), or split along any axis."""
    types = case.operands
    partial = (MAX,) if getattr(case.op, "function", "") == "max" or case.op.name == "scatter_max" else ()

    def states(type: Type, axes: Sequence[str]) -> list[State]:
        return [None, *(() if type.dtype == "bool" else (SUM, *partial)), *(a for a in type.names if a in axes)]

    every = [states(type, type.names) for type in types]
    if prod(map(len, every)) <= FEW:
        yield from product(*every)
        return
    axes = dict.fromkeys(name for type in types for name in type.names)
    one = (found for axis in axes for found in product(*(states(type, [axis]) for type in types)))
    yield from dict.fromkeys(one)


def found_ways(case: Case) -> Iterator[ShardingRule]:
    """All placements that hold with random numbers, in two parts and in three."""
    trials = [Trial(case, 2, 1), Trial(case, 3, 2), Trial(case, 2, 3)]
    axes = dict.fromkeys(name for result in trials[0].results for name in result.names)
    for before in placements(case):
        # Axes that the operation makes are cut beside those of its operands.
        for made in (None, *(axis for axis in axes if axis not in before)):
            options: list[set[State]] = []
            for trial in trials:
                found = trial.holding(before, made)
                options = [a & b for a, b in zip(options, found, strict=True)] if options and found else found
                if not options:
                    break
            for after in product(*options) if options else ():
                if made is None or made in after:
                    yield ShardingRule(before, tuple(after))


ALL = ()

# Legal placements that the tables leave out on purpose: the operation, the operands that are sums, and why.
LEFT_OUT = {
    ("attend", (2,)): "values are no larger than what is attended: nothing is saved by adding them up later",
    ("attend_gradient", (2, -3)): "the same, for values and the attended together",
    ("attend_block", (2,)): "the same, in a turn",
    ("attend_block_gradient", (2, -3)): "the same",
    ("normalize_gradient", (2,)): "a rate is a root: it comes whole",
    ("layer_norm_gradient", (3,)): "so does a scale: parameters are no sums",
    ("layer_norm_gradient", (2,)): "the same, for the rate",
    ("layer_norm_scale_gradient", (3,)): "the same",
    ("layer_norm_scale_gradient", (2,)): "the same",
    ("rms_norm_gradient", (3,)): "the same",
    ("rms_norm_gradient", (2,)): "the same",
    ("custom_gradient", (2,)): "a gradient that is whole must be the same on all ranks to the bit",
    ("land", (0,)): "what has landed is what was copied: both are sums, or neither",
    ("land", (1,)): "the same",
    ("gather_slices", ALL): "what is gathered is read whole in every slice: each is added up once",
    ("running_mean", ALL): "states of an optimizer are no sums",
    ("momentum", ALL): "the same",
    ("four_bits", (2, 3)): "factors and the offset are those of a stored weight: they come whole",
    ("sum_of_groups", ALL): "copies of parameters are no sums",
    ("outer_sgd", ALL): "nor are anchors",
    ("outer_nesterov", ALL): "nor their momentum",
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [*BY_NAME])
def test_no_way_is_missing(name: str):
    """What holds is in the table, but for what is left out on purpose; all of which is found."""
    case = BY_NAME[name]
    found, table = set(found_ways(case)), set(all_ways(case.op, case.operands))
    if case.op.label in ("floor", "round"):
        # Linear for parts that are whole numbers, as parts of sums may be here.
        found = {rule for rule in found if SUM not in rule.operands}
    if isinstance(case.op, Update):
        # Parameters and states in parts of sums would have to be added up before they are used.
        found = {rule for rule in found if SUM not in rule.operands}
    assert table <= found, f"not found: {table - found}"
    summed = {rule: tuple(i for i, state in enumerate(rule.operands) if state == SUM) for rule in found - table}
    count = len(case.operands)
    left_out = [tuple(i % count for i in at or range(count)) for op, at in LEFT_OUT if op == case.op.name]
    assert sorted(summed.values()) == sorted(left_out), f"legal placements are missing: {set(summed)}"


def test_zeros_in_a_loop_are_partial_sums():
    """What flows back through `where` in a scan has zeros where the other operand was chosen."""
    case = BY_NAME["scan-chosen"]
    assert ShardingRule((SUM, None), (SUM, SUM)) in all_ways(case.op, case.operands)
