"""Zigzag order: every position once, the same work on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.ops.runs import Runs, joined, seen, zigzag_runs


def positions(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [position for start, count in runs for position in range(start, start + count)]


@given(half=st.integers(1, 4), ranks=st.integers(1, 6), parts=st.integers(1, 12))
def test_shards_have_every_position_once_whatever_they_divide_into(half: int, ranks: int, parts: int):
    length = 2 * half * ranks
    whole = positions(zigzag_runs(0, length, length, ranks))
    assert sorted(whole) == list(range(length))
    if length % parts == 0:
        size = length // parts
        shards = [zigzag_runs(start, size, length, ranks) for start in range(0, length, size)]
        assert positions([run for runs in shards for run in runs]) == whole
    # Opposite ends: parts r and 2N−1−r.
    for rank in range(ranks):
        ends = (rank * half, half), ((2 * ranks - 1 - rank) * half, half)
        assert zigzag_runs(2 * half * rank, 2 * half, length, ranks) == joined(ends)


runs = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=3).map(tuple)


@given(queries=runs, keys=runs, causal=st.booleans(), window=st.none() | st.integers(1, 6))
def test_pairs_that_see_each_other_are_counted(queries: Runs, keys: Runs, causal: bool, window: int | None):
    def weight(distance: int) -> int:  # of a pair, twice: half of one where a limit cuts through it
        own = (distance > 0) + (distance >= 0) if causal else 2
        if window is None:
            return own
        far = (distance > window) + (distance >= window)
        near = 2 if causal else (distance > -window) + (distance >= -window)
        return (own if causal else near) - far

    expected = sum(weight(q - k) for q in positions(queries) for k in positions(keys))
    assert seen(queries, keys, causal, window) == expected


@given(half=st.integers(1, 64), ranks=st.integers(1, 16))
def test_causal_queries_see_as_many_keys_on_every_rank(half: int, ranks: int):
    size, length = 2 * half, 2 * half * ranks
    keys = ((0, length),)
    each = {seen(zigzag_runs(start, size, length, ranks), keys, True, None) for start in range(0, length, size)}
    assert each == {length * length // ranks}
