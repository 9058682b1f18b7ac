"""What `partita schedule` prints: the picture says what runs when, in any width."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from partita.cli.pictures.terminal import FILLS, IDLE, as_json, draw, legend, rank_table
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.simulator import equal_costs
from partita.testing import assert_lawful, costs, schedules, shapes


def test_a_picture():
    schedule = make("one_f_one_b", 3, 1, 4)
    picture = draw(schedule, assert_lawful(schedule), 7 + 54).plain
    assert picture.splitlines() == [
        "rank 0 F0─F1─F2─············BW0═══F3─BW1═══···BW2═══···BW3═══",
        "rank 1 ···F0─F1─······BW0═══F2─BW1═══F3─BW2═══···BW3═══······",
        "rank 2 ······F0─BW0═══F1─BW1═══F2─BW2═══F3─BW3═══············",
    ]
    assert legend(schedule).plain == "F─ forward   BW═ full backward   · idle   numbers: microbatch"


@pytest.mark.soak
@given(schedules(shapes(4, 3, 6)), st.integers(1, 200), st.data())
def test_each_column_shows_what_runs_at_its_middle(schedule, width, data):
    timeline = assert_lawful(schedule, data.draw(costs(schedule.stages)))
    columns = max(10, width - len(f"rank {schedule.ranks - 1} "))
    rows = draw(schedule, timeline, width).plain.splitlines()
    assert len(rows) == schedule.ranks
    for row, line in zip(rows, timeline.actions, strict=True):
        row = row.removeprefix(row[: len(row) - columns])
        for column in range(columns):
            middle = (column + 0.5) * timeline.makespan / columns
            near = 1e-9 * timeline.makespan
            running = [i.work for i in line if i.start <= middle + near and middle - near < i.end]
            borders = len(running) > 1 or any(abs(middle - t) <= near for i in line for t in (i.start, i.end))
            if not borders:
                assert (row[column] == IDLE) == (not running)
                if running:
                    assert row[column] in f"{running[0]}{FILLS[running[0].kind]}"


def test_the_table_of_ranks():
    schedule = make("interleaved_1f1b", 2, 2, 4)
    buffer = io.StringIO()
    timeline = assert_lawful(schedule, equal_costs(0.1, 0.1, 0.1))
    Console(file=buffer, width=80).print(rank_table(schedule, timeline))
    assert [line.rstrip() for line in buffer.getvalue().splitlines()] == [
        " rank  stages    busy   idle  peak live  bound",
        " 0     0, 2    2.40 s  11.1%          5      5",
        " 1     1, 3    2.40 s  11.1%          3      3",
    ]


@pytest.mark.soak
@given(schedules(shapes(4, 3, 6)))
def test_json_is_that_of_the_contract(schedule):
    timeline = assert_lawful(schedule)
    given = json.loads(json.dumps(as_json(schedule, timeline)))
    stable = {
        "bubble": timeline.bubble,
        "makespan": timeline.makespan,
        "peak_live": list(schedule.bound),
        "placement": [list(stages) for stages in schedule.placement],
        "actions": [line.split() for line in str(schedule).splitlines()],
    }
    assert {key: given.pop(key) for key in stable} == stable
    if schedule.pairs:
        assert list(map(frozenset, given.pop("pairs"))) == list(schedule.pairs)
    searched = {"found", "cost", "least_cost", "least_bubble", "minimize"}
    assert given.keys() == (set() if schedule.search is None else searched)
