"""The text form of schedules: printing and parsing are inverse, and mistakes are told at their place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.cli.main import main
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.one_by_one import one_by_one
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import v_placement
from partita.compiler.schedules.simulator import simulate
from partita.compiler.schedules.text import parse_actions, read, write
from partita.dsl.diagnostic import Refused
from partita.dsl.source import Source
from partita.testing import assert_lawful, costs, named_schedules, schedules, shapes


@given(schedules(shapes(4, 3, 5)))
def test_a_printed_schedule_reads_back(schedule):
    again = read(Source("mine.sched", str(schedule)), schedule.placement)
    assert again == evolve(schedule, name="mine.sched", pairs=())
    assert_lawful(again)


@given(schedules(shapes(4, 3, 5)), st.data())
def test_a_written_schedule_reads_back_whole(schedule, data):
    """Its placement, whatever it is, and what overlaps: so it takes as long."""
    again = read(Source("mine.sched", write(schedule)))
    assert again == evolve(schedule, name="mine.sched")
    assert again.spans[-1][-1].text.startswith(str(schedule.actions[-1][-1]))
    made = make("from_file", again.ranks, again.chunks, again.microbatches, path=Source("mine.sched", write(schedule)))
    assert made == again
    given_costs = evolve(data.draw(costs(schedule.stages)), pair=lambda *_: 2.5)
    messages = default_messages(schedule.stages)
    times = [simulate(communicate(each, messages, overlap=True), given_costs) for each in (schedule, again)]
    assert times[0] == times[1]


@given(shapes(4, 3, 4), st.randoms())
def test_any_placement_is_written(shape, random):
    stages = list(range(shape.ranks * shape.chunks))
    random.shuffle(stages)
    placement = tuple(tuple(stages[i :: shape.ranks]) for i in range(shape.ranks))
    schedule = evolve(one_by_one(placement, shape.microbatches), name="mine.sched")
    assert read(Source("mine.sched", write(schedule))) == schedule


def test_the_form():
    assert write(make("one_f_one_b", 2, 1, 2)) == "F0.0 F0.1 BW0.0 BW0.1\nF0.0 BW0.0 F0.1 BW0.1\n"
    assert write(make("looped_bfs", 1, 2, 1)) == "placement = loop\nF0.0 F1.0 BW1.0 BW0.0\n"
    assert write(make("zb_v", 2, 2, 1)).startswith("placement = v\nF0.0 ")
    assert "F1.2+ BW0.0" in write(make("dualpipe_v", 2, 2, 4))
    text = "# mine\n placement =1,2  0,3 # as I like it\nF0.0 F1.0 BW1.0 BW0.0\nF0.0 F1.0 BW1.0 BW0.0"
    assert read(Source("mine.sched", text)).placement == ((1, 2), (0, 3))


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("placement = w\nF0.0 BW0.0", "1:13", "`w` is not a placement"),
        ("placement =\nF0.0 BW0.0", "1:12", "is not a placement"),
        ("placement = 0,1 2\nF0.0 BW0.0", "1:13", "not every one of 1 stages"),
        ("placement = 0,0\nF0.0 F1.0 BW1.0 BW0.0", "1:13", "not every one of 2 stages"),
        ("placement = v\nplacement = v\nF0.0 BW0.0", "2:1", "`placement` is not an action"),
        ("F0.0 BW0.0\nplacement = v", "2:1", "`placement` is not an action"),
        ("F0.0+ B0.0 W0.0", "1:1", "`F0.0+` is not a forward followed by a full backward"),
        ("F0.0 BW0.0+", "1:6", "`BW0.0+` is not a forward"),
    ],
)
def test_wrong_placements_and_pairs_are_told_at_their_place(text, place, words):
    with pytest.raises(Refused) as refused:
        read(Source("mine.sched", text))
    first = refused.value.diagnostics[0]
    assert (first.code, first.span.place) == ("E0506", f"mine.sched:{place}")
    assert words in first.message


def test_what_names_a_file_may_not_say_otherwise():
    source = Source("mine.sched", write(make("zb_v", 2, 2, 3)))
    assert make("from_file", 2, 2, 3, path=source, placement="v").placement == v_placement(2)
    with pytest.raises(Refused) as refused:
        make("from_file", 2, 2, 3, path=source, placement="loop")
    assert refused.value.diagnostics[0].message == "`mine.sched` places its stages differently from `loop`"
    assert refused.value.diagnostics[0].span.text == "v"


@given(named_schedules(shapes(4, 3, 6)))
@settings(max_examples=30)
def test_a_schedule_by_itself_goes_to_a_file_and_back(schedule):
    """`schedule NAME … -o mine.sched`, then `schedule 'from_file("mine.sched")'`: the same timeline, by its JSON."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mine.sched"
        path.write_text(write(schedule))
        there = Path.cwd()
        try:
            os.chdir(folder)
            again, written = Path("again.sched"), Path("again.json")
            assert main(["schedule", 'from_file("mine.sched")', "-o", str(again)]) == 0
            assert again.read_text() == path.read_text()
            assert main(["schedule", 'from_file("again.sched")', "--json", "-o", str(written)]) == 0
            found = json.loads(written.read_text())
        finally:
            os.chdir(there)
    assert found["placement"] == [list(stages) for stages in schedule.placement]
    assert found["actions"] == [line.split() for line in str(schedule).splitlines()]
    # Times are of one microbatch on a rank, of all its chunks.
    assert found["makespan"] * schedule.chunks == pytest.approx(assert_lawful(schedule).makespan)


def test_comments_and_empty_lines_do_not_count():
    text = "# two ranks\n\nF0.0 F0.1  # warm-up\t\n\r\n F0.0   BW0.0\r\n"
    parsed = parse_actions(Source("s", text))
    assert [" ".join(map(str, line)) for line, _ in parsed] == ["F0.0 F0.1", "F0.0 BW0.0"]
    assert [[span.text for span in spans] for _, spans in parsed] == [["F0.0", "F0.1"], ["F0.0", "BW0.0"]]


def test_every_wrong_word_is_told_at_its_place():
    with pytest.raises(Refused) as refused:
        read(Source("mine.sched", "F0.0 X0.0 BW0.0\n\nF0 # F1\n  F0.-1"))
    assert [(d.code, d.span.place) for d in refused.value.diagnostics] == [
        ("E0506", "mine.sched:1:6"),
        ("E0506", "mine.sched:3:1"),
        ("E0506", "mine.sched:4:3"),
    ]
    assert refused.value.diagnostics[0].render() == (
        "error[E0506]: `X0.0` is not an action\n"
        "  --> mine.sched:1:6\n"
        "   |\n"
        "1  | F0.0 X0.0 BW0.0\n"
        "   |      ^^^^\n"
        "   help: a kind (F, B, W, BW), a chunk and a microbatch, as in `F0.12`"
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "F999999.0", "F0.999999", "F0.1234567", "F0.٣"])
def test_texts_that_are_no_schedule_are_refused(text):
    with pytest.raises(Refused) as refused:
        read(Source("mine.sched", text))
    assert {each.code for each in refused.value.diagnostics} == {"E0506"}


@given(st.text(alphabet="FBW0.12 \n#x"))
def test_any_text_is_a_schedule_or_refused(text):
    try:
        schedule = read(Source("mine.sched", text))
    except Refused:
        return
    assert tuple(line for line, _ in parse_actions(Source("again", str(schedule)))) == schedule.actions
