"""Cases that `make test` leaves to `make soak`."""

from __future__ import annotations

from typing import Any

import pytest


def soak(*values: Any) -> list[Any]:
    """Parameters of a test that are tried in long runs only. Several to a case stand in a tuple."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.soak) for each in values]
