"""Cuts are balanced: the dearest stage is as cheap as any cut could make it."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from partita.compiler.lowering.placement import balance, matches


@st.composite
def costs_and_parts(draw):
    costs = draw(st.lists(st.integers(0, 50).map(float), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@given(costs_and_parts())
@example(([2.0, 3.0, 2.0, 5.0, 1.0, 6.0], 5))
def test_balance_is_optimal(case):
    costs, parts = case
    counts = balance(costs, parts)
    assert len(counts) == parts
    assert sum(counts) == len(costs)
    assert min(counts) >= 1

    def worth(bounds):
        edges = [0, *bounds, len(costs)]
        sums = [sum(costs[a:b]) for a, b in pairwise(edges)]
        return max(sums), sum(s * s for s in sums)

    best = min(worth(bounds) for bounds in combinations(range(1, len(costs)), parts - 1))
    edges = [sum(counts[: i + 1]) for i in range(parts - 1)]
    assert worth(edges) == best


@given(st.integers(1, 12), st.integers(1, 12))
def test_equal_costs_are_cut_evenly(parts, each):
    counts = balance([1.0] * (parts * each), parts)
    assert counts == (each,) * parts


def test_a_path_is_the_tail_without_turns():
    assert matches(("layer", "mlp", "up"), "gpt.layer.3.mlp.up")
    assert matches(("up",), "gpt.layer.3.mlp.up")
    assert not matches(("layer", "up"), "gpt.layer.3.mlp.up")
