"""A schedule that is searched for fits as a whole, or the search is repeated."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from partita.compiler.fit import schedule
from partita.compiler.pipeline import schedule_spec
from partita.compiler.program import RankPlan
from partita.compiler.schedules.conditions import Conditions, Memory, Placement
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Schedule
from partita.compiler.state import Scheduled
from tests.compiler.analysis.test_memory import FILE
from tests.files import checked

LIMIT = 1 << 30


def test_a_search_whose_program_needs_more_is_repeated_with_that_much_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the first that is found needed 1000 bytes more than there are."""
    room: list[tuple[float, ...]] = []
    peaks = [LIMIT + 1000.0, LIMIT - 1.0, LIMIT - 1.0, LIMIT - 1.0]

    def watched(*arguments: Any, conditions: Conditions, **settings: Any) -> Schedule:
        within = conditions.memory
        assert within is not None

        def memory(placement: Placement) -> Memory:
            found = within(placement)
            if found.limit not in room:
                room.append(found.limit)
            return found

        return make(*arguments, conditions=evolve(conditions, memory=memory), **settings)

    def peak(state: Scheduled, rank: RankPlan) -> float:
        return peaks.pop(0)

    monkeypatch.setattr(schedule, "make", watched)
    monkeypatch.setattr(schedule, "peak_memory", peak)
    text = FILE.format(schedule="auto(microbatches = 4, memory = 1GiB)", rules="").replace("pipe = 1", "pipe = 2")
    schedule_spec(checked(text, "net.par"))
    first, second = room
    assert second == pytest.approx([each - 1000 for each in first])
    assert not peaks
