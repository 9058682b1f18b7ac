"""Initial values: functions of (seed, name, coordinates), with the promised distributions."""

from __future__ import annotations

from math import prod, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.dsl.spec import Call
from partita.dsl.types import Axis, Type
from partita.runtime import initial as module
from partita.runtime.initial import FIXED, RANDOM, initial
from partita.runtime.philox import below, stream, words

CALLS = {
    "zeros": Call("zeros", {}),
    "ones": Call("ones", {}),
    "constant": Call("constant", {"value": 0.25}),
    "uniform": Call("uniform", {"bound": 0.5}),
    "normal": Call("normal", {"deviation": 0.02}),
    "xavier": Call("xavier", {}),
    "kaiming": Call("kaiming", {}),
}


def tensor(*sizes: int, dtype: str = "f32") -> Type:
    return Type(dtype, tuple(Axis(f"a{i}", size) for i, size in enumerate(sizes)))


@st.composite
def regions(draw: st.DrawFn) -> tuple[Type, tuple[slice, ...]]:
    sizes = draw(st.lists(st.integers(0, 12), max_size=4))
    cuts = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in sizes]
    dtype = draw(st.sampled_from(["f32", "f64", "bf16"]))
    return tensor(*sizes, dtype=dtype), tuple(slice(start, stop) for start, stop in cuts)


def test_every_distribution_is_covered() -> None:
    assert set(CALLS) == {*RANDOM, *FIXED, "constant"}


@pytest.mark.parametrize("slab", [1, 8, 1 << 18])
@given(case=regions(), name=st.sampled_from(sorted(CALLS)), seed=st.integers(0, 1 << 40))
def test_a_region_equals_the_slice_of_the_whole(
    slab: int, case: tuple[Type, tuple[slice, ...]], name: str, seed: int
) -> None:
    type, region = case
    before, module.SLAB = module.SLAB, slab
    try:
        part = initial(CALLS[name], type, seed, "gpt.w", (3, 5), region)
    finally:
        module.SLAB = before
    whole = initial(CALLS[name], type, seed, "gpt.w", (3, 5))
    assert whole.shape == type.shape
    assert part.dtype == whole.dtype == (np.float64 if type.dtype == "f64" else np.float32)
    np.testing.assert_array_equal(part, whole[region])


def test_large_regions_equal_slices_too() -> None:
    # More than one slab, along the first axis and along the last.
    for sizes, region in [
        ((700, 999), (slice(13, 650), slice(400, 900))),
        ((3, 400_001), (slice(1, 3), slice(5, None))),
    ]:
        whole = initial(CALLS["normal"], tensor(*sizes), 1, "w")
        np.testing.assert_array_equal(initial(CALLS["normal"], tensor(*sizes), 1, "w", region=region), whole[region])


@given(start=st.integers(0, 1 << 70), count=st.integers(0, 40), skip=st.integers(0, 40))
def test_words_are_addressed_by_their_place(start: int, count: int, skip: int) -> None:
    key = stream(3, "test", 0)
    np.testing.assert_array_equal(words(key, start, skip + count)[skip:], words(key, start + skip, count))


def test_the_stream_does_not_change_between_versions() -> None:
    # Written down when the format was made: saved runs depend on it.
    assert [int(word) for word in words(stream(0, "initial", 0, "tiny.wte"), 0, 2)] == [
        12830619794889308418,
        10697954538072763618,
    ]


@given(word=st.integers(0, (1 << 64) - 1), limit=st.integers(1, 1 << 62))
def test_below_stays_below(word: int, limit: int) -> None:
    assert 0 <= below(word, limit) < limit
    assert below(0, limit) == 0
    assert below((1 << 64) - 1, limit) == limit - 1


def test_seed_and_name_make_another_stream() -> None:
    type = tensor(64)
    drawn = [
        initial(CALLS["normal"], type, 0, "a"),
        initial(CALLS["normal"], type, 1, "a"),
        initial(CALLS["normal"], type, 0, "b"),
    ]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            assert not np.any(a == b)


@pytest.mark.parametrize(
    ("name", "deviation", "bound"),
    [
        ("normal", 0.02, None),
        ("uniform", 0.5 / sqrt(3), 0.5),
        ("xavier", sqrt(2 / 40), sqrt(6 / 40)),
        ("kaiming", sqrt(2 / 30), None),
    ],
)
def test_distributions_are_what_they_say(name: str, deviation: float, bound: float | None) -> None:
    type = tensor(300, 400, dtype="f64")
    values = initial(CALLS[name], type, 5, "w", (30, 10)).ravel()
    count = prod(type.shape)
    # Five standard errors: the draw is fixed, so this either always holds or never.
    assert abs(values.mean()) < 5 * deviation / sqrt(count)
    assert abs(values.std() / deviation - 1) < 5 / sqrt(count)
    if bound is not None:
        assert values.min() >= -bound
        assert values.max() < bound
    else:
        inside = [(np.abs(values) < k * deviation).mean() for k in (1, 2, 3)]
        np.testing.assert_allclose(inside, [0.682689, 0.954500, 0.997300], atol=0.006)
    # Neighbours are uncorrelated, within a counter's words and across counters.
    for lag in (1, 2, 3, 4, 400):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 5 / sqrt(count)


def test_fixed_values() -> None:
    type = tensor(2, 3)
    assert np.all(initial(CALLS["zeros"], type, 0, "w") == 0)
    assert np.all(initial(CALLS["ones"], type, 0, "w") == 1)
    assert np.all(initial(CALLS["constant"], type, 0, "w") == np.float32(0.25))
    assert initial(CALLS["normal"], tensor(), 0, "w").shape == ()


def test_f32_is_the_rounded_f64() -> None:
    narrow = initial(CALLS["normal"], tensor(1000), 0, "w")
    wide = initial(CALLS["normal"], tensor(1000, dtype="f64"), 0, "w")
    np.testing.assert_array_equal(narrow, wide.astype(np.float32))
    assert np.any(narrow != wide)


def test_threads_draw_what_one_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    type = tensor(7, 300, 5)
    whole = initial(CALLS["normal"], type, 3, "w")
    monkeypatch.setattr(module, "SLAB", 64)
    monkeypatch.setattr(module, "MANY", 1)
    monkeypatch.setattr(module, "_threads", lambda: 3)
    assert np.array_equal(initial(CALLS["normal"], type, 3, "w"), whole)
