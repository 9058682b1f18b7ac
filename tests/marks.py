"""Cases that `make test` leaves to `make soak`, or to `make gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

LONGER = 10  # times as many random examples in long runs


def soak(*values: Any) -> list[Any]:
    """Parameters of a test that are tried in long runs only. Several to a case stand in a tuple."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.soak) for each in values]


def every(n: int, values: Sequence[Any], first: int = 0) -> list[Any]:
    """Parameters of a test, of which `make test` tries each n-th from a `first` on."""
    return [each for i, value in enumerate(values) for each in ([value] if i % n == first else soak(value))]


def examples(few: int, **more: Any) -> settings:
    """Settings of a property whose examples are slow: `make test` tries few, the same ones each time, and `make soak`
    ten times as many, which are new.
    """
    return settings(max_examples=few * (LONGER if settings.get_current_profile_name() == "new" else 1), **more)


# The devices of a test of `make gpu`, which compares one with the CPU. On the CPU itself `make test` tries its code.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The same of a test that starts processes.
DEVICES_OF_RUNS = [pytest.param("cpu", marks=pytest.mark.soak), pytest.param("cuda", marks=pytest.mark.gpu)]
