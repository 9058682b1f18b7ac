"""`partita.testing` as users meet it: the example of docs/schedules.md runs, and finds a mistake."""

from __future__ import annotations

import re

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from partita.cli.pictures.terminal import draw
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import FORWARD, FULL_BACKWARD
from partita.compiler.schedules.simulator import Costs, equal_costs
from partita.dsl.diagnostic import Refused
from partita.testing import assert_lawful, dependency_bound, messages, mutants, random_orders, shapes
from tests.files import ROOT

PAGE = (ROOT / "docs" / "schedules.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
FIRST = settings(
    max_examples=2000, phases=[Phase.generate], deadline=None
)  # the first one that is found, however large


def test_the_example_of_the_page_passes():
    names = {}
    exec(EXAMPLE, names)
    names["test_one_at_a_time_is_lawful"]()


@pytest.mark.soak
def test_the_example_with_a_mistake_fails():
    names = {}
    exec(EXAMPLE.replace('("F", "B", "W")', '("F", "W", "B")'), names)
    with pytest.raises(Refused, match=r"rank 0 of schedule `one_at_a_time` runs W0\.0 before B0\.0"):
        names["test_one_at_a_time_is_lawful"]()


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches", "columns"),
    [
        ("gpipe", 4, 1, 4, 63),
        ("one_f_one_b", 4, 1, 4, 63),
        ("interleaved_1f1b", 2, 2, 4, 81),
        ("zb_h1", 4, 1, 4, 60),
        ("zb_h2", 3, 1, 6, 80),
        ("zb_v", 2, 2, 3, 95),
        ("dualpipe_v", 2, 2, 4, 100),
    ],
)
def test_pictures_of_the_page_are_what_is_drawn(name, ranks, chunks, microbatches, columns):
    schedule = make(name, ranks, chunks, microbatches)
    picture = draw(schedule, assert_lawful(schedule), 7 + columns).plain
    assert picture in PAGE, picture


@pytest.mark.soak
def test_random_orders_reach_what_no_named_schedule_has():
    """Placements in a V, split and whole backwards side by side, a W that is left for long."""

    def kinds(schedule):
        return {action.kind for line in schedule.actions for action in line}

    sizes = st.builds(shapes, st.just(3), st.just(2), st.just(4)).flatmap(lambda s: s)
    find(random_orders(sizes), lambda s: s.placement == ((0, 3), (1, 2)))
    find(random_orders(sizes), lambda s: kinds(s) == {"F", "B", "W", "BW"})
    find(random_orders(sizes), lambda s: s.microbatches == 4 and max(s.bound) == 4 * s.chunks)


@pytest.mark.soak
@pytest.mark.parametrize("code", ["E0504", "E0501", "E0502", None])
def test_mutants_break_every_law_and_none(code):
    def broken(mutant):
        original, changed, _ = mutant
        try:
            check_schedule(changed)
            check_program(communicate(changed, default_messages(changed.stages)))
        except Refused as refused:
            return refused.diagnostics[0].code == code
        return code is None and changed != original

    find(mutants(), broken, settings=FIRST)


@given(shapes(), st.data())
def test_the_bound_by_dependencies_is_reached_by_one_microbatch(shape, data):
    """Alone in the pipeline, a microbatch waits for nothing but what it needs."""
    schedule = make("looped_bfs", shape.ranks, shape.chunks, 1)
    chain = default_messages(schedule.stages)
    prices = equal_costs(2.0, 3.0, 1.5, data.draw(st.sampled_from((0.0, 0.5, 9.0))))
    timeline = assert_lawful(schedule, prices)
    assert timeline.makespan == pytest.approx(dependency_bound(schedule, prices, chain))


@given(st.data())
def test_messages_go_onward_and_back(data):
    stages = data.draw(st.integers(1, 6))
    for message in data.draw(messages(stages)):
        assert (message.direction == "forward") == (message.source < message.destination)
    assert equal_costs().action(0, FULL_BACKWARD) == 2 * equal_costs().action(0, FORWARD)


def test_the_longest_path_takes_the_quickest_backward_of_each_stage():
    """With one microbatch, `dualpipe_v` has whole backwards on some stages only; these may be the quicker ones."""
    hasty = Costs(lambda stage, kind: 0.5 if kind == "BW" else 1.0, lambda message: 0.0)
    timeline = assert_lawful(make("dualpipe_v", 4, 2, 1), hasty)
    assert timeline.makespan < 16
