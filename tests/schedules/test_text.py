"""The text form of schedules: printing and parsing are inverse, and mistakes are told at their place."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from partita.compiler.schedules.text import parse_actions, read
from partita.dsl.diagnostic import Refused
from partita.dsl.source import Source
from partita.testing import assert_lawful, schedules, shapes


@given(schedules(shapes(4, 3, 5)))
def test_a_printed_schedule_reads_back(schedule):
    again = read(Source("mine.sched", str(schedule)), schedule.placement)
    assert again == evolve(schedule, name="mine.sched", pairs=())
    assert_lawful(again)


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
