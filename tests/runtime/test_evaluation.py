"""The evaluation of several batches: their mean, and the first round in which something is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan
from types import SimpleNamespace
from typing import Any, cast

import pytest

from partita.runtime.evaluation import Evaluated, evaluation


class Losses:
    """An executor of one batch a round that has found these losses."""

    program = SimpleNamespace(rounds=1, guards=())

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def run(self, number: int, batches: object) -> Iterator[None]:
        self.round = -number
        yield

    def named_step_metrics(self) -> dict[str, float]:
        return {"loss": self.losses[self.round]}


def evaluated(losses: list[float]) -> Evaluated:
    running = evaluation(cast(Any, Losses(losses)), len(losses), lambda index: {})
    while True:
        try:
            next(running)
        except StopIteration as end:
            return cast(Evaluated, end.value)


@pytest.mark.parametrize(
    ("losses", "first"), [([1.0, 3.0], None), ([nan, 1.0], 0), ([1.0, nan, 2.0, inf], 1), ([1.0, 2.0, inf], 2)]
)
def test_the_first_round_that_is_not_finite_is_known(losses: list[float], first: int | None):
    found = evaluated(losses)
    assert found.unsound_from == first
    assert first is not None or found.result == (2.0, {}, {})
