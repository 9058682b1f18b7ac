"""The written forms of schedules: writing and reading are inverse, and mistakes are told at their place."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.cli.main import main
from partita.compiler.schedules.communication import communicate, default_messages
from partita.compiler.schedules.forms import WRITERS, read, torch_csv
from partita.compiler.schedules.forms.json_form import as_json
from partita.compiler.schedules.forms.text import parse, write
from partita.compiler.schedules.one_by_one import one_by_one
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.schedule import SharedVocabulary, ranks_of, v_placement
from partita.compiler.schedules.simulator import equal_costs, simulate
from partita.compiler.schedules.vocab_parallel import with_spread
from partita.dsl.diagnostic import Refused
from partita.dsl.syntax.source import Source
from partita.testing import (
    assert_lawful,
    costs,
    descending_orders,
    named_schedules,
    schedules,
    shapes,
    shared_schedules,
)
from tests.marks import examples


@examples(20)
@given(schedules(shapes(4, 3, 5)))
def test_a_printed_schedule_reads_back(schedule):
    again = read(Source("mine.sched", str(schedule)), schedule.placement)
    assert again == evolve(schedule, name="mine.sched", pairs=())
    assert_lawful(again)


@examples(20)
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


@given(schedules(shapes(4, 3, 5)) | descending_orders() | shared_schedules(shapes(4, 3, 5)))
def test_every_form_reads_back_whole(schedule):
    """Placement, what overlaps, the order of summation, and what all ranks share; from the text and from JSON."""
    for name, form in (("mine.sched", write(schedule)), ("mine.json", json.dumps(as_json(schedule), indent=2))):
        again = read(Source(name, form))
        assert again == evolve(schedule, name=name)
        words = [span.text.rstrip("+") for line in again.spans for span in line]
        assert words == [str(action) for line in schedule.actions for action in line]


@settings(max_examples=25)
@given(schedules(shapes(4, 3, 5)) | descending_orders())
def test_torchs_orders_go_there_and_back(schedule):
    """What we write is what torch's parser reads; and comes back, with the chunks in the order of their stages."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    written = torch_csv.write(schedule)
    rows = [[theirs._Action.from_str(cell) for cell in row] for row in csv.reader(written.splitlines())]
    stage_ranks = theirs._validate_schedule(
        dict(enumerate(rows)), schedule.ranks, schedule.stages, schedule.microbatches
    )
    assert stage_ranks == ranks_of(schedule.placement)
    assert "\n".join(",".join(map(str, row)) for row in rows) + "\n" == written
    for row, actions, stages in zip(rows, schedule.actions, schedule.placement, strict=True):
        parts = [part for each in row for part in (each.sub_actions or (each,))]
        assert [(kinds[each.computation_type.name], each.stage_index, each.microbatch_index) for each in parts] == [
            (action.kind, stages[action.chunk], action.microbatch) for action in actions
        ]
    again = read(Source("mine.csv", written), ascending=schedule.ascending)
    renumbered = []
    for actions, stages in zip(schedule.actions, schedule.placement, strict=True):
        order = sorted(stages)
        renumbered.append(tuple(evolve(action, chunk=order.index(stages[action.chunk])) for action in actions))
    placement = tuple(tuple(sorted(stages)) for stages in schedule.placement)
    assert again == evolve(schedule, name="mine.csv", placement=placement, actions=tuple(renumbered))
    assert_lawful(again)


@pytest.mark.parametrize(("name", "chunks"), [("zb_v", 2), ("dualpipe_v", 2), ("interleaved_1f1b", 3)])
def test_torchs_own_schedules_are_read(name, chunks):
    """With their gaps and communication: theirs are those that we have."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    kind = {
        "zb_v": theirs.ScheduleZBVZeroBubble,
        "dualpipe_v": theirs.ScheduleDualPipeV,
        "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    }[name]
    ranks, microbatches = 3, 6
    size = SimpleNamespace(pp_group_size=ranks, num_stages=ranks * chunks, _n_microbatches=microbatches)
    size.n_local_stages, size.microbatches_per_round = chunks, ranks
    rows = {rank: kind._calculate_single_rank_operations(size, rank) for rank in range(ranks)}
    stage_ranks = theirs._validate_schedule(rows, ranks, ranks * chunks, microbatches)
    communicating = theirs._add_send_recv(
        {rank: [each for each in row if each is not None] for rank, row in rows.items()},
        stage_to_rank=stage_ranks.__getitem__,
        num_stages=ranks * chunks,
    )
    assert any("SEND" in str(each) for each in communicating[0])
    for orders in (rows, communicating):
        lines = [",".join("" if each is None else str(each) for each in orders[rank]) for rank in range(ranks)]
        assert read(Source("theirs.csv", "\r\n".join(lines))) == evolve(
            make(name, ranks, chunks, microbatches), name="theirs.csv"
        )


LOOPED = "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\n,1F0,1F1,3F0,3F1,,3B1,3B0,1B1,1B0\n"


def test_looped_bfs_as_torch_runs_it_needs_consent():
    """It sums gradients from the last microbatch on."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules").ScheduleLoopedBFS
    size = SimpleNamespace(pp_group_size=2, _stages=(0, 0), _n_microbatches=2)
    lines = [theirs._calculate_single_rank_operations(size, rank) for rank in range(2)]
    text = "\n".join(",".join("" if each is None else str(each) for each in line) for line in lines)
    assert [[cell for cell in line.split(",") if cell] for line in text.splitlines()] == [
        [cell for cell in line.split(",") if cell] for line in LOOPED.splitlines()
    ]
    with pytest.raises(Refused) as refused:
        assert_lawful(make("from_file", 2, 2, 2, path=Source("looped.csv", text)))
    first = refused.value.diagnostics[0]
    assert (first.code, first.span.text) == ("E0501", "2B0")
    assert first.message == "rank 0 of schedule `looped.csv` runs BW1.0 after BW1.1"
    assert "summation = any" in first.help
    schedule = make("from_file", 2, 2, 2, path=Source("looped.csv", text), summation="any")
    assert_lawful(schedule)
    assert str(schedule) == ("F0.0 F0.1 F1.0 F1.1 BW1.1 BW1.0 BW0.1 BW0.0\nF0.0 F0.1 F1.0 F1.1 BW1.1 BW1.0 BW0.1 BW0.0")
    again = make("from_file", 2, 2, 2, path=Source("again.sched", write(schedule)))
    assert_lawful(again)
    with pytest.raises(Refused):  # forwards ascend in any case
        assert_lawful(read(Source("looped.csv", text.replace("0F0,0F1", "0F1,0F0")), ascending=False))


@pytest.mark.parametrize(
    ("name", "text", "place", "words"),
    [
        ("a.csv", "0F0,0X0\n", "1:5", "`0X0` is not an action"),
        ("a.csv", "0F0, (0F1;0I0)OVERLAP_F_B,0I1\n", "1:7", "only a forward and a full backward after it overlap"),
        ("a.csv", "0F0,0B0\n0F1\n", "2:1", "stage 0 is on rank 0 and on rank 1"),
        ("a.csv", "0F0,2F0\n1F0\n", "2:1", "rank 1 has 1 stages, and rank 0 has 2"),
        ("a.csv", "0F0\n2F0\n", "1:1", "stage 1 is on no rank"),
        ("a.csv", ",,\n", "1:1", "holds no actions"),
        ("a.json", "{", "1:1", "is not JSON"),
        ("a.json", "[" * 100_000, "1:1", "is not JSON"),
        ("a.json", '{"actions": [["F0.0"]], "placement": [[0, 0.5]]}', "1:1", "is not the object of a schedule"),
        ("a.json", '{"actions": [["F0.0", "X0.0"]], "placement": [[0]]}', "1:24", "`X0.0` is not an action"),
        ("a.json", '{"actions": [[]], "placement": [[0]]}', "1:1", "is not the object of a schedule"),
        ("a.json", '{"actions": [["F0.0"]], "placement": [[1]]}', "1:1", "does not have each stage once"),
        ("a.json", '{"actions": [["F0.0"]], "placement": [[0]], "pairs": [[0]]}', "1:1", "`pairs`"),
        ("a.json", '{"actions": [["F2.0"]], "placement": [[0]]}', "1:1", "schedules 1 ranks of 3 stages, not 1 of 1"),
        ("a.sched", "summation = none\nF0.0 BW0.0", "1:13", "`none` is not an order of summation"),
        ("a.sched", "shared = outs\nF0.0 BW0.0", "1:10", "`outs` is nothing that ranks share"),
        ("a.sched", "shared = outputs\nF0.0 BW0.0", "1:1", "no actions of stages of its own"),
    ],
)
def test_what_is_wrong_in_a_form_is_told_at_its_place(name, text, place, words):
    with pytest.raises(Refused) as refused:
        read(Source(name, text))
    first = refused.value.diagnostics[0]
    assert (first.code, first.span.place) == ("E0506", f"{name}:{place}")
    assert words in first.message


def test_torch_has_no_passes_over_a_shared_vocabulary():
    with pytest.raises(Refused, match="torch's pipelining has no passes"):
        torch_csv.write(
            with_spread(make("one_f_one_b", 2, 1, 2), SharedVocabulary(2, 2, outputs=True), equal_costs().action)
        )


@examples(20)
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
@examples(8)
def test_a_schedule_by_itself_goes_to_a_file_and_back(schedule):
    """`schedule NAME … -o mine.sched`, then `schedule 'from_file("mine.sched")'`: the same timeline, by its JSON, which
    is read as well, and so is torch's form.
    """
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
            for suffix in WRITERS:
                assert main(["schedule", 'from_file("again.json")', "-o", f"more{suffix}"]) == 0
                assert read(Source(f"m{suffix}", Path(f"more{suffix}").read_text())) == evolve(
                    schedule, name=f"m{suffix}"
                )
        finally:
            os.chdir(there)
    assert found["placement"] == [list(stages) for stages in schedule.placement]
    assert found["actions"] == [line.split() for line in str(schedule).splitlines()]
    # Times are of one microbatch on a rank, of all its chunks.
    assert found["makespan"] * schedule.chunks == pytest.approx(assert_lawful(schedule).makespan)


def test_comments_and_empty_lines_do_not_count():
    text = "# two ranks\n\nF0.0 F0.1  # warm-up\t\n\r\n F0.0   BW0.0\r\n"
    parsed = parse(Source("s", text)).lines
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
        "   help: a kind (F, B, W, BW, O, L), a chunk and a microbatch, as in `F0.12`"
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "F999999.0", "F0.999999", "F0.1234567", "F0.٣"])
def test_texts_that_are_no_schedule_are_refused(text):
    with pytest.raises(Refused) as refused:
        read(Source("mine.sched", text))
    assert {each.code for each in refused.value.diagnostics} == {"E0506"}


@examples(20)
@given(st.text(alphabet="FBW0.12 \n#x"))
def test_any_text_is_a_schedule_or_refused(text):
    try:
        schedule = read(Source("mine.sched", text))
    except Refused:
        return
    assert tuple(line for line, _ in parse(Source("again", str(schedule))).lines) == schedule.actions
