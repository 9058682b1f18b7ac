"""Orders of slices of the sequence: their laws in every shape, and the closed forms of Seq1F1B (arXiv 2406.03488)."""

from __future__ import annotations

import itertools
import json
from itertools import product

import pytest
from attrs import evolve
from hypothesis import given

from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.forms import json_form, text, torch_csv
from partita.compiler.schedules.from_file import from_file
from partita.compiler.schedules.invariants import check_program, check_schedule
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import Action, Schedule, peak_live
from partita.compiler.schedules.simulator import equal_costs, simulate
from partita.compiler.schedules.timeline import Timeline
from partita.dsl.diagnostic import Refused
from partita.dsl.syntax.source import Source
from partita.testing import assert_lawful, random_orders, shapes
from tests.marks import examples, soak

SLICED = {"gpipe": (1,), "one_f_one_b": (1,), "interleaved_1f1b": (1, 2, 3)}
SHAPES = [(name, chunks, P) for name, several in SLICED.items() for chunks in several for P in range(1, 6)]
# Of those with several chunks, `make test` tries some.
FEW = [shape for shape in SHAPES if shape[1] == 1 or shape[1] + shape[2] == 5]


def run(schedule: Schedule) -> Timeline:
    check_schedule(schedule)
    programs = communicate(schedule, default_messages(schedule.stages))
    check_program(programs)
    return simulate(programs, equal_costs())


@pytest.mark.parametrize(("name", "chunks", "ranks"), [*FEW, *soak(*(each for each in SHAPES if each not in FEW))])
def test_every_order_is_lawful_and_holds_what_it_declares(name: str, chunks: int, ranks: int) -> None:
    for microbatches, slices in product(range(1, 7), range(1, 5)):
        schedule = make(name, ranks, chunks, microbatches, slices=slices)
        timeline = run(schedule)
        assert (schedule.microbatches, schedule.slices) == (microbatches * slices, slices)
        assert timeline.peak_live == schedule.bound == tuple(map(peak_live, schedule.actions))
        if chunks == 1:
            # So many slices' forwards and backwards are lost, and not so many microbatches'.
            assert timeline.makespan == 3 * (microbatches * slices + ranks - 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_memory_falls_as_the_paper_says(ranks: int) -> None:
    """With 1F1B, rank r holds P−r microbatches; with S slices of each, P−r+S−1 of these, 1/S as large. In the limit of
    many slices it is one microbatch, for however many ranks.
    """
    for slices in (1, 2, 4, 16):
        whole = make("one_f_one_b", ranks, 1, 2 * ranks)
        sliced = run(make("one_f_one_b", ranks, 1, 2 * ranks, slices=slices))
        for rank, (before, live) in enumerate(zip(whole.bound, sliced.peak_live, strict=True)):
            assert (before, live) == (ranks - rank, ranks - rank + slices - 1)
            assert live / slices - 1 == (before - 1) / slices


def test_the_order_of_the_paper() -> None:
    """Two slices on three ranks: the queue of backwards is first in, first out of microbatches, and last in, first out
    of the slices of one.
    """
    assert str(make("one_f_one_b", 3, 1, 2, slices=2)).splitlines() == [
        "F0.0 F0.1 F0.2 F0.3 BW0.1 BW0.0 BW0.3 BW0.2",
        "F0.0 F0.1 F0.2 BW0.1 F0.3 BW0.0 BW0.3 BW0.2",
        "F0.0 F0.1 BW0.1 F0.2 BW0.0 F0.3 BW0.3 BW0.2",
    ]


@given(random_orders(shapes(3, 2, 3, max_slices=3)))
@examples(12)
def test_any_order_that_takes_slices_in_turn_is_lawful(schedule: Schedule) -> None:
    assert_lawful(schedule)


@pytest.mark.parametrize("kind", ["F", "BW"])
@pytest.mark.parametrize("name", sorted(SLICED))
def test_two_slices_that_change_places_are_refused(name: str, kind: str) -> None:
    """On all ranks, so that no rank waits for another: nothing else is wrong."""
    schedule = make(name, 2, 1, 2, slices=2)
    places = {Action(kind, 0, 2): Action(kind, 0, 3), Action(kind, 0, 3): Action(kind, 0, 2)}
    swapped = tuple(tuple(places.get(action, action) for action in line) for line in schedule.actions)
    with pytest.raises(Refused) as refused:
        check_schedule(evolve(schedule, actions=swapped))
    assert "invariant 6" in str(refused.value.diagnostics[-1].notes)
    with pytest.raises(Refused, match="invariant 6"):  # nor are backwards in ascending order those of slices
        check_schedule(evolve(make(name, 2, 1, 4), slices=2, bound=(4, 4)))


def test_an_order_that_is_written_down_reads_back() -> None:
    for name, several in SLICED.items():
        for chunks in several:
            schedule = make(name, 2, chunks, 3, slices=2)
            texts = {"mine.sched": text.write(schedule), "mine.json": json.dumps(json_form.as_json(schedule))}
            for source in itertools.starmap(Source, texts.items()):
                back = from_file(2, chunks, 3, source, slices=2)
                assert evolve(back, name=name, spans=()) == schedule
                with pytest.raises(ValueError, match="say so by `slices = 2`"):
                    from_file(2, chunks, 3, source)
    with pytest.raises(Refused, match="torch's pipelining has no slices"):
        torch_csv.write(schedule)


def test_a_file_has_all_slices_of_each_part() -> None:
    with pytest.raises(Refused, match="no parts of 2 slices") as refused:
        from_file(1, 1, 1, Source("mine.sched", "slices = 2\nF0.0 F0.1 F0.2 BW0.1 BW0.0 BW0.2\n"), slices=2)
    assert refused.value.diagnostics[0].code == "E0506"
