"""Learning rates: their formulas' fixed points, monotony and bounds."""

from __future__ import annotations

from itertools import pairwise
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.dsl.spec import Call
from partita.runtime.learning_rates import LEARNING_RATES, learning_rate

DECAYING = ("linear", "cosine", "wsd")


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = DECAYING) -> Call:
    name = draw(st.sampled_from(names))
    warmup = draw(st.integers(0, 50))
    total = warmup + draw(st.integers(1, 200))
    peak = draw(st.floats(1e-6, 1.0))
    arguments = {"peak": peak, "warmup": warmup, "total": total, "floor": peak * draw(st.floats(0, 1))}
    if name == "wsd":
        arguments["decay"] = draw(st.integers(1, 300))
    return Call(name, arguments)


def test_all_names_are_covered() -> None:
    assert set(LEARNING_RATES) == {"constant", *DECAYING, "inverse_sqrt", "stepwise"}


@given(schedules())
def test_warm_up_is_linear_to_the_peak_and_the_rest_falls_to_the_floor(call: Call) -> None:
    peak, warmup, total, floor = (call.arguments[key] for key in ("peak", "warmup", "total", "floor"))
    for step in range(1, warmup + 1):
        assert isclose(learning_rate(call, step), peak * step / warmup, rel_tol=1e-12)
    after = [learning_rate(call, step) for step in range(max(1, warmup), total + 3)]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(after)), after
    assert all(floor * (1 - 1e-12) <= rate <= peak * (1 + 1e-12) for rate in after), after
    assert isclose(learning_rate(call, total), floor, abs_tol=1e-15)
    assert learning_rate(call, total + 10**9) == learning_rate(call, total)


@pytest.mark.parametrize(
    ("name", "quarter", "half"),
    [("linear", 0.775, 0.55), ("cosine", 0.8681980515339464, 0.55), ("wsd", 1.0, 1.0)],
)
def test_values_on_the_way(name: str, quarter: float, half: float) -> None:
    arguments = {"peak": 1.0, "warmup": 100, "total": 500, "floor": 0.1}
    call = Call(name, {**arguments, "decay": 200} if name == "wsd" else arguments)
    assert isclose(learning_rate(call, 200), quarter)
    assert isclose(learning_rate(call, 300), half)
    if name == "wsd":
        assert isclose(learning_rate(call, 400), 0.55)


def test_the_inverse_square_root_halves_from_a_step_to_four_times_it() -> None:
    call = Call("inverse_sqrt", {"peak": 0.8, "warmup": 100, "floor": 0.15})
    rates = {50: 0.4, 100: 0.8, 400: 0.4, 1600: 0.2, 6400: 0.15}
    assert {step: round(learning_rate(call, step), 12) for step in rates} == rates


def test_a_rate_falls_stepwise_by_its_factor() -> None:
    call = Call("stepwise", {"peak": 1.0, "warmup": 2, "every": 3, "factor": 0.1, "floor": 0.005})
    rates = [round(learning_rate(call, step), 12) for step in range(1, 13)]
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.005]
    assert learning_rate(call, 10**9) == 0.005


@given(st.integers(1, 10**9))
def test_constant(step: int) -> None:
    assert learning_rate(Call("constant", {"value": 0.3}), step) == 0.3


def test_no_warm_up_starts_at_or_just_below_the_peak() -> None:
    call = Call("linear", {"peak": 1.0, "warmup": 0, "total": 10, "floor": 0.0})
    assert [round(learning_rate(call, step), 12) for step in (1, 5, 10)] == [0.9, 0.5, 0.0]
