"""Pictures of timelines in files: every action is there, where and when it runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cli.main import main
from partita.cli.pictures import Picture, save
from partita.cli.pictures.chrome import events
from partita.cli.pictures.picture import colour
from partita.compiler.schedules.registry import make
from partita.compiler.schedules.simulator import equal_costs
from partita.testing import assert_lawful, costs, schedules, shapes
from tests.files import SPECS

TINY = SPECS / "tiny.par"
SVG = "{http://www.w3.org/2000/svg}"


@given(schedules(shapes(4, 3, 6)), st.data())
def test_live_activations_have_the_peak_that_the_schedule_states(schedule, data):
    timeline = assert_lawful(schedule, data.draw(costs(schedule.stages)))
    for rank, peak in enumerate(timeline.peak_live):
        counts = timeline.live(rank)
        assert max(number for _, number in counts) == peak
        assert counts[-1][1] == 0
        assert all(before[0] <= after[0] for before, after in pairwise(counts))


@pytest.mark.soak
@given(schedules(shapes(4, 3, 6)), st.data())
def test_a_trace_has_every_action_and_transfer_when_it_runs(schedule, data):
    timeline = assert_lawful(schedule, data.draw(costs(schedule.stages)))
    found = json.loads(json.dumps(list(events([Picture("title", timeline, schedule)]))))
    rows = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    slices: dict[str, list[dict]] = {name: [] for name in rows.values()}
    for event in found:
        if event["ph"] == "X":
            slices[rows[event["tid"]]].append(event)
    for row in slices.values():
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(row)), "slices overlap"
    near = pytest.approx
    for rank, line in enumerate(timeline.actions):
        own = slices[f"rank {rank}"]
        assert [event["name"] for event in own] == [str(interval.work) for interval in line]
        assert [event["ts"] / 1e6 for event in own] == near([interval.start for interval in line], abs=1e-6)
        assert [event["dur"] / 1e6 for event in own] == near([interval.duration for interval in line], abs=1e-6)
    for channel, line in timeline.transfers.items():
        assert [event["name"] for event in slices[str(channel)]] == [each.work.message.value for each in line]
    arrows = {(event["ph"], event["id"]): event for event in found if event["ph"] in "sf"}
    assert len(arrows) == 2 * sum(map(len, timeline.transfers.values()))
    for (phase, number), event in arrows.items():
        (there,) = [own for own in slices[rows[event["tid"]]] if own["ts"] <= event["ts"] < own["ts"] + own["dur"]]
        if phase == "f":
            made = arrows["s", number]
            (maker,) = [own for own in slices[rows[made["tid"]]] if own["ts"] <= made["ts"] < own["ts"] + own["dur"]]
            assert maker["args"]["microbatch"] == there["args"]["microbatch"]
            assert maker["name"][0] == there["name"][0]  # B and BW are both backward
            assert maker["ts"] + maker["dur"] <= there["ts"], "a message is needed before it is made"


def test_actions_that_touch_touch_in_the_nanoseconds_of_a_viewer():
    schedule = make("gpipe", 1, 1, 50)
    timeline = assert_lawful(schedule, equal_costs(0.1 / 3, 0.1 / 7, 0.1 / 11))
    own = [event for event in events([Picture("title", timeline, schedule)]) if event["ph"] == "X"]
    assert len(own) == 100
    times = [(int(event["ts"] * 1000), int(event["dur"] * 1000)) for event in own]
    assert all(start + duration == after for (start, duration), (after, _) in pairwise(times))


def test_pictures_of_one_title_are_one_process():
    schedule = make("one_f_one_b", 2, 1, 2)
    timeline = assert_lawful(schedule)
    steps = [Picture("measured", timeline, schedule, f"step {i}", 100.0 * i) for i in range(3)]
    found = list(events([*steps, Picture("simulated", timeline, schedule, start=100.0)]))
    assert len({event["pid"] for event in found}) == 2
    ids = Counter(event["id"] for event in found if event["ph"] == "s")
    assert set(ids.values()) == {1}
    assert [(e["name"], e["ts"]) for e in found if e.get("cat") == "step"] == [(f"step {i}", i * 1e8) for i in range(3)]


@pytest.mark.soak
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_svg_has_every_action_in_its_colour(tmp_path, chunks):
    schedule = make("interleaved_1f1b", 2, chunks, 4)
    picture = Picture("a $title$ & <more>", assert_lawful(schedule, equal_costs(1e-3, 1e-3, 1e-3)), schedule)
    save([picture, picture], tmp_path / "a.svg")
    save([picture, picture], tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = Counter("".join(element.itertext()) for element in root.iter(f"{SVG}text"))
    assert texts["a $title$ & <more>"] == 2
    assert texts["rank 1"] == 2
    for line in schedule.actions:
        for action in line:
            label = str(action) if chunks > 1 else f"{action.kind}{action.microbatch}"
            assert texts[label] == 2 * 2, "on each rank of each picture"
    # The rectangles of one colour in a row are one path; each begins with an M.
    corners: Counter[str] = Counter()
    defined = {path.get("id"): path for path in root.iter(f"{SVG}path") if path.get("id")}
    for use in root.iter(f"{SVG}use"):
        path = defined.get((use.get("{http://www.w3.org/1999/xlink}href") or "").removeprefix("#"))
        fill = re.search(r"fill: (#\w+)", use.get("style") or "")
        if path is not None and fill:
            corners[fill[1]] += path.get("d", "").count("M")
    expected = Counter("#{:02x}{:02x}{:02x}".format(*colour(a, chunks)) for line in schedule.actions for a in line)
    assert {shade: corners[shade] for shade in expected} == {shade: 2 * count for shade, count in expected.items()}


@pytest.mark.soak
def test_nothing_to_draw_is_drawn_too(tmp_path):
    schedule = make("gpipe", 1, 1, 1)
    save([Picture("", assert_lawful(schedule, equal_costs(0.0, 0.0, 0.0)), schedule)], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


# ---------------------------------------------------------------- the command


@pytest.mark.soak
def test_the_command_writes_what_the_name_of_the_file_says(tmp_path, capsys):
    begins = {".svg": b"<?xml", ".png": b"\x89PNG", ".json": b'{"traceEvents"'}
    for suffix, start in begins.items():
        out = tmp_path / f"out{suffix}"
        assert main(["schedule", str(TINY), "-o", str(out)]) == 0
        assert out.read_bytes().startswith(start)
    assert main(["schedule", str(TINY), "--json", "-o", str(tmp_path / "plain.json")]) == 0
    assert set(json.loads((tmp_path / "plain.json").read_text())) == {
        "bubble",
        "makespan",
        "peak_live",
        "placement",
        "actions",
        "queues",
        "step_time",
    }
    assert capsys.readouterr().out == ""
    assert "forward" in (tmp_path / "out.json").read_text()


@pytest.mark.soak
def test_what_cannot_be_drawn_is_said(tmp_path, capsys, monkeypatch):
    for name, problem in {
        "out.pdf": "must end in .svg, .png, .json",
        "out": "must end in",
        "no/out.svg": "cannot write",
    }.items():
        assert main(["schedule", str(TINY), "-o", str(tmp_path / name)]) == 2
        assert problem in capsys.readouterr().err
    monkeypatch.setattr("partita.cli.extras.find_spec", lambda name: None)
    assert main(["schedule", str(TINY), "-o", str(tmp_path / "out.svg")]) == 2
    assert "pip install 'partita[plot]'" in capsys.readouterr().err
    assert main(["schedule", str(TINY), "-o", str(tmp_path / "out.json")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_times_without_a_unit_get_none(tmp_path):
    schedule = make("zb_h1", 2, 1, 4)
    timeline = assert_lawful(schedule)
    for timed, end in ((True, "10 s"), (False, "10")):
        save([Picture("title", timeline, schedule, timed=timed)], tmp_path / "out.svg")
        texts = {each.text for each in ElementTree.parse(tmp_path / "out.svg").iter(f"{SVG}text")}
        assert end in texts
