"""Cases that `make test` leaves to `make soak`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def soak(*values: Any) -> list[Any]:
    """Parameters of a test that are tried in long runs only. Several to a case stand in a tuple."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.soak) for each in values]


def every(n: int, values: Sequence[Any]) -> list[Any]:
    """Parameters of a test, of which `make test` tries each n-th."""
    return [each for i, value in enumerate(values) for each in ([value] if i % n == 0 else soak(value))]
