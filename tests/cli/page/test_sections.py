"""What each section of a run's page shows, and how: what its reader sees first, and what is compared with what."""

from __future__ import annotations

import itertools
import re
from math import dist
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from partita.cli.page import sections
from partita.cli.page.head import head
from partita.cli.page.listing import highlighted
from partita.cli.page.markup import Markup, prose, text
from partita.cli.page.run import Run
from partita.cli.pictures.picture import COLOURS, colour
from partita.compiler.schedules.schedule import Action
from partita.runtime.run_directory import RunDirectory
from tests.cli.page.runs import PIPE, TEXT, append, step, written

ROW = re.compile(r"<tr>(.*?)</tr>")
CELL = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>")
TABLE = re.compile(r"<table>.*?</table>")
WORDS = re.compile(r"<[^>]*>")


def rows(table: str) -> list[list[str]]:
    """The cells of a table's rows, without their markup."""
    return [[WORDS.sub("", cell) for cell in CELL.findall(row)] for row in ROW.findall(table)]


def run_of(path: Path) -> Run:
    run = Run(path)
    run.refresh()
    return run


def shown(section: Markup | None) -> Markup:
    assert section is not None
    return section


# ---------------------------------------------------------------- the head


ENDED = [step(number, unix_time=1000.0 + number) for number in range(1, 7)]
FAULT = {"cause": "the loss of step 4 is nan; see `bad_steps`", "ranks": []}


@pytest.mark.parametrize(
    ("records", "fault", "lock", "expected"),
    [
        (ENDED, None, False, "finished"),
        (ENDED[:4], None, False, "stopped"),
        (ENDED[:4], None, True, "running"),
        (ENDED[:4], FAULT | {"unix_time": 1004.5}, False, "failed"),
        (ENDED[:4], FAULT | {"unix_time": 1001.5}, False, "stopped"),  # resumed since
        (ENDED[:4], FAULT, False, "failed"),
        (ENDED, FAULT | {"unix_time": 1007.0}, False, "failed"),  # after its last step
        (ENDED, FAULT | {"unix_time": 1002.0}, False, "finished"),
    ],
)
def test_a_pill_says_how_the_run_stands(
    tmp_path: Path, records: list[dict[str, Any]], fault: dict[str, Any] | None, lock: bool, expected: str
) -> None:
    path = written(tmp_path, records=records, fault=fault)
    with RunDirectory.open(path) as directory:
        assert not lock or directory.lock() is None
        found = head(run_of(path))
    assert f'<span class="pill {expected}">{expected}</span>' in found
    assert ("see <code>bad_steps</code>" in found) == (expected == "failed")


def test_the_head_says_when_it_began_and_how_long_it_takes_still(tmp_path: Path) -> None:
    path = written(tmp_path, records=[step(n, unix_time=1.7e9 + 13 * n) for n in (1, 2, 3)], fault=None)
    with RunDirectory.open(path) as directory:
        assert directory.lock() is None
        (when,) = re.findall(r'<p class="when">(.*?)</p>', head(run_of(path)))
    assert WORDS.sub("", when) == "started 2023-11-14 22:13 UTC · 26s · 39s left"
    assert "left" not in head(run_of(path))  # nobody runs it


@given(st.lists(st.tuples(st.text(st.characters(exclude_characters="`")), st.booleans())))
def test_what_a_message_quotes_is_code(parts: list[tuple[str, bool]]) -> None:
    found = prose("".join(f"`{word}`" if code else word for word, code in parts))
    assert found == "".join(f"<code>{text(word)}</code>" if code else text(word) for word, code in parts)
    assert prose("a ` alone") == "a ` alone"


# ---------------------------------------------------------------- charts


def test_the_loss_is_large_and_what_changes_little_is_small(tmp_path: Path) -> None:
    found = shown(sections.charts(run_of(written(tmp_path))))
    titles = re.findall(r'<figure class="chart ?(\w*)"><figcaption><b>([\w ,]+)', found)
    assert titles[0] == ("large", "loss")
    assert [size for size, _ in titles].count("large") == 1
    assert {name.partition(",")[0] for size, name in titles if size == "small"} == {"learning rate", "peak memory"}


# ---------------------------------------------------------------- evaluations and samples


@pytest.mark.parametrize("best", [3, 37, 40])
def test_the_last_five_evaluations_and_the_best_are_there_and_all_are_folded(tmp_path: Path, best: int) -> None:
    losses = [(n, 1.0 if n == best else 3.0 - n / 100) for n in range(1, 41)]
    path = written(tmp_path, records=[{"step": n, "eval_loss": loss, "eval_size": n / 3} for n, loss in losses])
    found = shown(sections.evaluations(run_of(path)))
    first, folded = (rows(each)[1:] for each in TABLE.findall(found))
    last = [str(n) for n in range(40, 35, -1)]
    assert [row[0] for row in first] == (last if best > 35 else [*last, str(best)])
    assert [row[0] for row in folded] == [str(n) for n in range(40, 0, -1)]
    for table in (first, folded):
        assert [row[0] for row in table if row[-1] == "best"] == [str(best)]
        assert all(re.fullmatch(r"\d+\.\d{4}", number) for row in table for number in row[1:-1])
    assert found.index("<details><summary>all 40</summary>") < found.rindex("<table>")


# ---------------------------------------------------------------- timelines


def measured(run: Run, times: float) -> Run:
    """The run with a measured step that is so many times as long as the prediction."""
    assert run.compiled is not None
    timeline = run.compiled.summary.prediction.timeline
    longer = tuple(
        tuple(evolve(each, start=each.start * times, end=each.end * times) for each in line)
        for line in timeline.actions
    )
    timeline = evolve(timeline, actions=longer)
    run.measured = SimpleNamespace(typical=SimpleNamespace(timeline=timeline, number=7), simulated=timeline)  # type: ignore[assignment]
    return run


AXIS = re.compile(r'<div class="x">(.*?)</div>')


@pytest.mark.parametrize(("times", "scales"), [(65.0, 2), (0.1, 2), (2.0, 1)])
def test_timelines_that_differ_much_have_scales_of_their_own(tmp_path: Path, times: float, scales: int) -> None:
    run = measured(run_of(written(tmp_path, text=PIPE, cores=2)), times)
    found = shown(sections.timelines(run))
    axes = AXIS.findall(found)
    assert len(axes) == 3
    assert len(set(axes)) == scales
    # The longest row of each scale spans it.
    ends = [
        max(float(x) + float(w) for x, w in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", svg))
        for svg in re.findall(r"<svg.*?</svg>", found)
    ]
    assert [end > 900 for end in ends] == [True, True, scales == 2]
    said = re.findall(r"≈([\d.]+)× the prediction; 4 ranks on 2 cores; each has its own scale[.]", found)
    assert said == ([f"{times:g}"] if scales == 2 else [])


def test_bars_have_the_numbers_of_their_microbatches(tmp_path: Path) -> None:
    run = run_of(written(tmp_path, text=PIPE))
    found = shown(sections.timelines(run))
    (numbers,) = re.findall(r'<div class="numbers"[^>]*>(.*?)</div>', found)
    places = re.findall(r'<span style="left:([\d.]+)%;top:(\d+)px;width:([\d.]+)%">(\d+)</span>', numbers)
    assert {number for *_, number in places} == {"0", "1", "2", "3"}
    for row in {top for _, top, *_ in places}:
        own = sorted((float(left), float(width)) for left, top, width, _ in places if top == row)
        assert all(a + width <= b + 0.02 for (a, width), (b, _) in itertools.pairwise(own))
    assert "numbers: microbatch; lighter: later chunks" in found


# What somebody sees who lacks one kind of cones (Machado, Oliveira and Fernandes, 2009), of linear red, green and blue.
SIGHTS = (
    ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
)
CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
OTHERS = {"P", "R", "S", "U"}  # what is no computation is gray


def linear(shade: tuple[int, int, int]) -> tuple[float, ...]:
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (each / 255 for each in shade))


def product(matrix: tuple[tuple[float, ...], ...], vector: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sum(x * y for x, y in zip(row, vector, strict=True)) for row in matrix)


def oklab(light: tuple[float, ...]) -> tuple[float, ...]:
    """Where a color is in a space whose distances are those that people see (Ottosson, 2020)."""
    return product(LAB, tuple(each ** (1 / 3) for each in product(CONES, tuple(max(0.0, min(1.0, c)) for c in light))))


@pytest.mark.parametrize("sight", SIGHTS, ids=["all cones", "no red", "no green", "no blue"])
def test_each_kind_of_action_has_a_colour_of_its_own(sight: tuple[tuple[float, ...], ...]) -> None:
    seen = {kind: oklab(product(sight, linear(shade))) for kind, shade in COLOURS.items()}
    kinds = [*sorted(set(COLOURS) - OTHERS), "U"]
    for one, other in itertools.combinations(kinds, 2):
        assert dist(seen[one], seen[other]) > 0.08, (one, other)


def test_black_numbers_can_be_read_on_every_colour() -> None:
    """With the contrast that WCAG 2.1 wants of text (1.4.3)."""
    for kind in ("F", "B", "W", "BW"):
        for chunk in range(4):
            (luminance,) = product(((0.2126, 0.7152, 0.0722),), linear(colour(Action(kind, chunk, 0), 4)))
            assert (luminance + 0.05) / 0.05 > 4.5


# ---------------------------------------------------------------- memory and collectives


def widths(found: str) -> list[list[float]]:
    """The bars of each column, in percent."""
    return [[float(w) for w in re.findall(rf'width:([\d.]+)%" class="c{i}"', found)] for i in (0, 1)]


@pytest.mark.parametrize("gpu", [False, True])
def test_bounds_of_tensors_have_a_scale_beside_peaks_of_processes(tmp_path: Path, gpu: bool) -> None:
    found = shown(sections.memory(run_of(written(tmp_path, gpu=gpu))))
    bound, peak = widths(found)
    assert peak == pytest.approx([100, 100 * 290 / 300], abs=0.01)
    if gpu:
        assert max(bound) < 1  # both are of tensors: one scale
    else:
        assert max(bound) == 100
        assert "Each has its own scale." in found


def test_collectives_are_one_table_in_which_equal_rows_are_one(tmp_path: Path) -> None:
    found = shown(sections.collectives(run_of(written(tmp_path, text=PIPE))))
    (table,) = TABLE.findall(found)
    assert table.count("<thead>") == 1
    assert table.count("m.par:4") == 1
    (both,) = [row for row in rows(table) if len(row) > 3 and {"d(u)", "d(w)"} <= set(row[3].split(", "))]
    assert both[:3] == ["reduce", "all_reduce", "data"]
    assert "Where a row names several tensors, the numbers are of each." in found
    alone = shown(sections.collectives(run_of(written(tmp_path / "alone"))))
    assert "Where a row names" not in alone


# ---------------------------------------------------------------- the file


def test_the_file_is_highlighted_and_has_all_its_lines(tmp_path: Path) -> None:
    lines = highlighted(TEXT)
    assert [WORDS.sub("", line) for line in lines] == [text(line) for line in TEXT.rstrip("\n").split("\n")]
    found = shown(sections.files(run_of(written(tmp_path))))
    for each in ('<i class="k">model</i>', '<i class="m">0.1</i>', '<i class="c1"># '):
        assert each in found


@given(st.text())
def test_any_text_is_highlighted_without_loss(written: str) -> None:
    assert "\n".join(WORDS.sub("", line) for line in highlighted(written)).rstrip("\n") == text(written).rstrip("\n")


def test_a_run_that_goes_on_is_read_on(tmp_path: Path) -> None:
    path = written(tmp_path, records=ENDED[:4], fault=None)
    run = Run(path)
    with RunDirectory.open(path) as directory:
        assert directory.lock() is None
        version = run.refresh()
        assert run.held
        assert run.refresh() == version
    assert run.refresh() == version + 1  # its end is news
    assert run.held is False
    append(path, *ENDED[4:])
    run.refresh()
    assert "pill finished" in head(run)
