"""The published figures on zero bubbles (arXiv 2401.10241v1, tables 5 and 9), to the last printed digit."""

from __future__ import annotations

import json

import pytest

from partita.compiler.schedules.communication import default_messages
from partita.compiler.schedules.conditions import Conditions, Memory
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.simulator import Costs, equal_costs
from partita.compiler.schedules.timeline import Timeline
from partita.testing import assert_lawful
from tests.files import GOLDEN
from tests.marks import every, soak

ZERO_BUBBLE = json.loads((GOLDEN / "zero_bubble.json").read_text())
rows = pytest.mark.parametrize(
    "row", every(3, ZERO_BUBBLE["rows"]), ids=lambda row: f"{row['model']}-{row['microbatches']}"
)


def costs(row: dict, chunks: int = 1) -> Costs:
    """The row's times: of a rank's microbatch, in equal parts for its chunks."""
    return equal_costs(*(row[key] / chunks for key in ("T_F", "T_B", "T_W")), row["T_comm"])


@pytest.mark.few(1)
@rows
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "zb_h2"])
def test_published_bubbles(row, name):
    timeline = assert_lawful(make(name, row["stages"], 1, row["microbatches"]), costs(row))
    assert round(timeline.bubble, 4) == row["bubble"][name]


@pytest.mark.few(1)
@rows
def test_the_published_bubble_of_interleaving_is_near(row):
    """The paper's chunks have one layer each, and its first and last stage one layer less; here they are equal, the
    embedding and the head counting as a layer each.
    """
    chunks, rest = divmod(row["layers"] + 2, row["stages"])
    assert rest == 0
    timeline = assert_lawful(make("interleaved_1f1b", row["stages"], chunks, row["microbatches"]), costs(row, chunks))
    assert timeline.bubble == pytest.approx(row["bubble"]["interleaved_1f1b"], abs=0.005)


def searched(row: dict, microbatches_in_memory: int) -> tuple[Timeline, float]:
    """What `auto` finds where each rank's memory holds so many microbatches, and the bubble of the lower bound."""
    ranks = row["stages"]
    memory = Memory((float(microbatches_in_memory),) * ranks, (1.0,) * ranks, (row["M_W"],) * ranks)
    conditions = Conditions(costs(row), default_messages(ranks), lambda placement: memory)
    schedule = make("auto", ranks, 1, row["microbatches"], conditions=conditions)
    assert memory.fits(schedule)
    timeline = assert_lawful(schedule, costs(row))
    assert timeline.cost == schedule.search.cost
    return timeline, 1 - max(timeline.busy) / schedule.search.least


@pytest.mark.few(1)
@rows
@pytest.mark.parametrize(("name", "times"), [("zb_1p", 1), *soak(("zb_2p", 2))])
def test_auto_is_no_worse_than_the_published_search(row, name, times):
    """It even meets the lower bound in every row: no schedule whatever has a smaller bubble in this memory."""
    timeline, least = searched(row, times * row["stages"])
    assert round(timeline.bubble, 4) <= row["bubble"][name]
    assert timeline.bubble == pytest.approx(least, abs=1e-9)
    # Handcrafted schedules that fit: ZB-H1 holds P microbatches, ZB-H2 2P−1.
    fitting = ["zb_h1", "zb_h2"][:times]
    assert round(timeline.bubble, 4) <= min(row["bubble"][each] for each in fitting)


@pytest.mark.few(1)
@rows
def test_the_published_search_in_the_memory_of_1f1b_was_optimal(row):
    _, least = searched(row, row["stages"])
    assert round(least, 4) == row["bubble"]["zb_1p"]
