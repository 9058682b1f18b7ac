"""The page of a run says what the run's directory has, and nothing in that becomes more than text."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita import train
from partita.cli.main import main
from partita.cli.page.chart import FAR, LARGEST, MOST_POINTS, Chart, Line, points
from partita.cli.page.document import document
from partita.cli.page.head import fault_of
from partita.cli.page.history import History, Series
from partita.cli.page.markup import Markup, joined, tag, text
from partita.cli.page.run import Run
from partita.cli.page.sections import content
from partita.cli.page.timeline import ticks
from partita.runtime.bad_steps import BadStep
from tests.cli.page.runs import SCRIPT, TEXT, append, step, written
from tests.commands import here, partita, records
from tests.files import SPECS

TAGS = {
    *("html", "head", "meta", "link", "title", "style", "script", "noscript", "body", "main", "header", "section"),
    *("figure", "figcaption", "h1", "h2", "p", "a", "b", "i", "div", "span", "small", "time", "dl", "dt", "dd"),
    *("svg", "path", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "code"),
}  # fmt: skip


class Elements(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.shown = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.shown += data


def page_of(path: Path) -> Elements:
    run = Run(path)
    run.refresh()
    found = Elements(document(run, live=False))
    assert found.open == []
    return found


@given(st.text(), st.text())
def test_text_stays_text(word: str, other: str) -> None:
    element = tag("p", word, title=other)
    found = Elements(element)
    assert [name for name, _ in found.found] == ["p"]
    assert set(found.found[0][1]) == {"title"}
    assert text(Markup(element)) == element
    assert joined(None, element) == element


def test_a_page_has_all_that_is_known_of_a_run(tmp_path: Path) -> None:
    shown = page_of(written(tmp_path)).shown
    for each in (
        *("step", "4 of 6", "tokens per second", "learning rate", "size", "MFU is left out", "started 2023-11-14"),
        *("Evaluations", "1.25", "predicted on cpu", "--trace DIR", "300.0 MiB", "290.0 MiB", "the whole process"),
        *("m.par:4", "all_reduce", "left out: the loss of step 3 is nan", "its batch: item 3", "back to step 0"),
        *("rank 1 is slow in F of stage 0", "cost 25% of the time", "the last failure", "with train.steps=6"),
        "param w: [embed] ~ normal(1.0)",
    ):
        assert each in shown, each


@pytest.mark.parametrize("file", ["m.par", SCRIPT.replace("/", ""), '"><svg onload="x">.par', "javascript:x\u202e"])
def test_nothing_in_a_run_becomes_more_than_text(tmp_path: Path, file: str) -> None:
    found = page_of(written(tmp_path, name=SCRIPT.replace("/", ""), file=file))
    assert {name for name, _ in found.found} <= TAGS
    assert [name for name, _ in found.found].count("script") == 1
    for _, attributes in found.found:
        assert not any(name.startswith("on") or name in ("src", "srcset", "action") for name in attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    assert found.shown.count("window.taken = 1") >= 6
    assert "\u202e" not in found.shown


def begun_as(**command: object) -> bytes:
    record = {
        "run": "x",
        "files": {"/a.par": "axis"},
        "command": {"file": "/a.par", "overrides": [], "gpu": False} | command,
    }
    return json.dumps(record).encode()


HUGE = b"1" + b"0" * 400


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("run.json", b"{"),
        ("run.json", begun_as()),
        ("run.json", begun_as(file="\0", overrides=["\ud800"])),
        ("run.json", begun_as(file="/etc/passwd", gpu=True)),
        ("run.json", begun_as(overrides="x")),
        ("fault.json", b"[[[" * 100_000),
        ("fault.json", b"\xff\xfe"),
        ("metrics.jsonl", b""),
        ("metrics.jsonl", b'{"step": 1, "loss": 1e999, "a": 1e308, "b": -1e308, "unix_time": 1e300}\n'),
        ("metrics.jsonl", b'{"step": 1, "loss": NaN}\n{"step": ' + HUGE + b'}\n{"step": 3, "loss": ' + HUGE + b"}\n"),
        ("metrics.jsonl", b'{"step": 1, "eval_loss": ' + HUGE + b', "peak_memory_by_rank": [-1]}\n'),
        ("metrics.jsonl", b'{"step": 1, "slow_ranks": [3, {}], "bad": 3, "rows": 4, "rewound_to": "x"}\n'),
    ],
)
def test_any_directory_gives_a_page(tmp_path: Path, name: str, data: bytes) -> None:
    path = written(tmp_path)
    (path / name).write_bytes(data)
    shown = page_of(path).shown
    assert "root:" not in shown
    if name == "run.json":
        assert "Left out is what the compiler says, because" in shown
        assert "back to step 0" in shown


def test_a_run_is_read_on_as_it_grows(tmp_path: Path) -> None:
    path = written(tmp_path)
    run = Run(path)
    version = run.refresh()
    assert run.refresh() == version
    append(path, step(5))
    assert run.refresh() == version + 1
    assert (run.history.step, len(run.history.series["loss"].steps)) == (5, 5)
    # Resumed after step 2: a new file with fewer lines.
    new = path / "new"
    new.write_text("".join(json.dumps(step(number)) + "\n" for number in (1, 2, 3)))
    new.rename(path / "metrics.jsonl")
    assert run.refresh() == version + 2
    assert list(run.history.series["loss"].steps) == [1, 2, 3]


# ---------------------------------------------------------------- numbers


def series(*values: float) -> Series:
    found = Series()
    for number, value in enumerate(values, 1):
        found.add(number, value)
    return found


def test_many_values_are_groups_that_lose_no_extreme() -> None:
    values = [math.sin(i) for i in range(10_000)]
    values[1234], values[777] = 99.0, -99.0
    found = points(series(*values, math.nan))
    assert len(found) == MOST_POINTS
    assert (min(p.least for p in found), max(p.most for p in found)) == (-99.0, 99.0)
    assert all(p.least <= p.value <= p.most for p in found)
    assert [p.value for p in points(series(1.0, math.inf, 2.0))] == [1.0, 2.0]


@given(st.lists(st.floats(), min_size=1, max_size=8), st.floats())
def test_any_values_give_a_chart_or_none(values: list[float], level: float) -> None:
    chart = Chart("loss", [Line("training", series(*values))], str, level=("predicted", level))
    fit = [value for value in values if abs(value) <= LARGEST]
    assert bool(chart.points) == bool(fit)
    if fit:
        (data,) = [json.loads(a["data-chart"] or "") for _, a in Elements(chart.figure()).found if "data-chart" in a]
        ((label, steps, drawn),) = data["lines"]
        assert (label, drawn) == ("training", pytest.approx(fit, rel=1e-5))
        assert [values[step - 1] for step in steps] == fit
        assert data["logarithmic"] in ((True, False) if min(fit) > 0 else (None,))
        # A level far from all values would flatten them.
        assert ("level" in data) == (min(fit) / FAR <= level <= max(fit) * FAR)


def test_an_axis_counts_in_the_largest_unit_that_is_full() -> None:
    chart = Chart("time", [Line("training", series(0.25, 1.5))], str, [("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)])
    assert "<b>time, s</b>" in chart.figure()
    small = Chart("time", [Line("training", series(0.25, 0.5))], str, [("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)])
    assert "<b>time, ms</b>" in small.figure()
    assert "[250.0,500.0]" in small.figure().replace("&quot;", '"')


@pytest.mark.parametrize(
    ("end", "expected"),
    [(1.0, [0.0, 0.5, 1.0]), (0.11, [0.0, 0.05, 0.1]), (3.0, [0.0, 1.0, 2.0, 3.0]), (4.5, [0.0, 2.0, 4.0])],
)
def test_ticks_are_round(end: float, expected: list[float]) -> None:
    assert ticks(end) == pytest.approx(expected)


def test_usual_values_are_medians_of_the_last_finite_ones() -> None:
    history = History()
    history.add({"step": i, "step_seconds": 9.0 if i < 50 else float(i % 3)} for i in range(1, 200))
    assert history.series["step_seconds"].usual == 1.0
    assert series(math.nan).usual is None
    assert series(1.0, math.nan).last is None


# ---------------------------------------------------------------- the command


def test_report_of_a_run_that_was_done(tmp_path: Path) -> None:
    (tmp_path / "m.par").write_text(TEXT)
    assert here("run", "m.par", "--transport", "virtual", cwd=tmp_path).returncode == 0
    (tmp_path / "m.par").unlink()  # the page has it from the run's directory
    done = here("report", "runs/m", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote m.html\n", "")
    found = Elements((tmp_path / "m.html").read_text())
    assert "8 of 8" in found.shown
    last = records(tmp_path / "runs" / "m")[-1]
    assert f"{last['eval_loss']:.4g}"[:5] in found.shown
    assert "or all ranks share one process" in found.shown
    assert here("report", "runs/m", "-o", "no/such/place.html", cwd=tmp_path).stderr.startswith("partita: cannot write")


FAILS = TEXT.replace("mean(x * w)", "mean(log(-1.0 * abs(x * w)))")


@pytest.mark.soak
@pytest.mark.parametrize("where", ["virtual", "ranks", "python"])
def test_a_run_that_fails_says_why(tmp_path: Path, where: str) -> None:
    """However it is run, and in the words that it ended with."""
    path = tmp_path / "m.par"
    path.write_text(FAILS)
    if where == "python":
        with pytest.raises(BadStep) as failed:
            train(path, run_dir=tmp_path / "runs" / "m")
        said = str(failed.value)
    else:
        command = ["run", "m.par", *(["--transport", "virtual"] if where == "virtual" else [])]
        done = (here if where == "virtual" else partita)(*command, cwd=tmp_path)
        assert done.returncode == 3
        said = done.stderr
    run = Run(tmp_path / "runs" / "m")
    run.refresh()
    fault = fault_of(run)
    assert fault is not None
    assert "not finite" in fault.cause or "nan" in fault.cause
    assert fault.cause in re.sub(r"^rank \d+: ", "", said, flags=re.MULTILINE)
    if where != "python":  # whose directory does not say how many steps there are
        assert '<span class="pill failed">' in content(run)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/x", "there is no directory runs/x"),
        ("m.par", "m.par is a file: RUN is the directory of a run, runs/m unless --run-dir names another"),
        ("notes", "notes is not a directory"),
        ("runs", "runs is not the directory of a run: did you mean runs/m?"),
        ("runs/m/checkpoints", "is not the directory of a run; it has neither run.json nor metrics.jsonl"),
        ("a\0b", "has no NUL character"),
    ],
)
@pytest.mark.parametrize("command", ["report", "watch"])
def test_what_is_no_run_is_said(tmp_path: Path, command: str, name: str, message: str) -> None:
    for each in ("m.par", "notes"):
        (tmp_path / each).write_text("")
    written(tmp_path / "runs", "m")
    (tmp_path / "runs" / "m" / "checkpoints").mkdir()
    done = here(command, name, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_both_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "report" in out
    assert "watch" in out


@pytest.mark.soak
def test_a_traced_run_has_its_measured_timeline(tmp_path: Path) -> None:
    small = ["batch=8", "seq=16", "train.steps=6", "train.eval=none", "laptop.device=cpu"]
    done = partita("run", str(SPECS / "tiny.par"), *small, "--trace", "trace", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "runs" / "tiny")
    run.refresh()
    shown = Elements(content(run)).shown
    for each in ("measured: ", "simulated from its action costs", "predicted on cpu", "MFU"):
        assert each in shown
    assert "MFU is left out" not in shown
    (tmp_path / "trace" / "rank-0.npz").write_bytes(b"PK\x03\x04")
    run.refresh()
    assert "the trace cannot be read" in Elements(content(run)).shown
