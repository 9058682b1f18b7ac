"""The sections of a run's page, in order. Each is None if there is nothing to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import PurePath

from partita.cli.number_format import bytes_text, count_text, plain_text, seconds_text
from partita.cli.page.chart import Line, chart
from partita.cli.page.history import EVAL, History
from partita.cli.page.markup import Markup, joined, tag
from partita.cli.page.run import Compiled, Run
from partita.cli.page.timeline import legend, timeline, with_ends
from partita.cli.traffic import BUSIEST, MOVED, RINGS, mesh_text, moved_row, short_names
from partita.runtime.metrics import number_of

MOST_ROWS = 256
MOST_EVALUATIONS = 500
MOST_SAMPLES = 20
PROCESS = "measured is the whole process, including Python and its libraries: on CPUs torch does not count tensors"


def head(run: Run) -> Markup:
    """Name, mesh, progress."""
    words = []
    if run.compiled is not None:
        summary = run.compiled.summary
        words.append(f"{count_text(summary.parameters)} parameters; {mesh_text(summary.mesh)}")
        words.append(f"schedule {run.compiled.state.schedule.name}")
    steps = _steps(run)
    if steps:
        bar = tag("div", tag("div", style=f"width:{min(100.0, 100 * run.history.step / steps):.1f}%"), class_="bar")
    else:
        bar = None
    return tag("header", tag("h1", run.name), tag("p", "; ".join(words)) if words else None, bar, _when(run.history))


def _steps(run: Run) -> int | None:
    return run.compiled.state.train.steps if run.compiled is not None else None


def _when(history: History) -> Markup | None:
    if history.began is None or history.last is None:
        return None
    return tag("p", f"first line {_time(history.began)}, last line {_time(history.last)}", class_="when")


def _time(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "at no time"


def tiles(run: Run) -> Markup:
    """The numbers of now."""
    history, steps = run.history, _steps(run)
    found = [("step", f"{history.step:,}" + (f" of {steps:,}" if steps else ""))]
    for label, name, written in (
        ("loss", "loss", _short),
        ("eval loss", "eval_loss", _short),
        ("tokens/s", "tokens_per_second", count_text),
        ("step time", "step_seconds", seconds_text),
        ("MFU", "mfu", _percent),
        ("peak memory", "peak_memory", bytes_text),
    ):
        series = history.series.get(name)
        value = (
            (series.usual if name in ("tokens_per_second", "step_seconds", "mfu") else series.last) if series else None
        )
        if series is not None:
            found.append((label, written(value) if value is not None else "not finite"))
    if run.compiled is not None:
        found.append(("predicted step", seconds_text(run.compiled.summary.prediction.step_time)))
    return tag("dl", *(tag("div", tag("dt", label), tag("dd", value)) for label, value in found), class_="tiles")


def charts(run: Run) -> Markup | None:
    """A chart for each number."""
    history = run.history
    prediction = run.compiled.summary.prediction if run.compiled is not None else None
    levels = {} if prediction is None else {
        f"{prediction.unit}_per_second": prediction.rate,
        "step_seconds": prediction.step_time,
    }  # fmt: skip
    names = history.names
    first = [name for name in ("loss", "tokens_per_second") if name in names]
    drawn = []
    for name in [*first, *(name for name in names if name not in first)]:
        lines = [Line("training", history.series.get(name)), Line("evaluation", history.series.get(EVAL + name))]
        if name in levels:
            lines.append(Line("predicted", level=levels[name]))
        unit = 1024.0 if name in IN_BYTES else 1000.0
        drawn.append(chart(TITLES.get(name, name), lines, WRITTEN.get(name, _short), unit))
    found = [each for each in drawn if each is not None]
    notes = []
    if found and "mfu" not in names:
        notes.append(
            "MFU is left out: it needs a mesh that names the device on which the run computes, and ranks that are "
            "processes."
        )
    return _section("Training", *(tag("div", *found, class_="charts"),), *_notes(notes)) if found else None


def events(run: Run) -> Markup | None:
    """Steps that were left out, slow ranks, the last failure."""
    rows = [(f"{event.step:,}", event.text) for event in run.history.events]
    parts = [_table(("step", "what happened"), rows, right={0})] if rows else []
    if run.history.left_out:
        parts.append(tag("p", f"and {run.history.left_out:,} more"))
    if run.fault is not None:
        parts.append(_fault(run.fault))
    return _section("Events", *parts) if parts else None


def _fault(text: str) -> Markup:
    """The cause of the last failure, and what each rank was doing."""
    try:
        found = json.loads(text)
        rows = [(str(each["rank"]), str(each["step"]), str(each["doing"])) for each in found["ranks"]]
        shown = tag("p", f"the last failure: {found['cause']}")
    except (ValueError, RecursionError, KeyError, TypeError):
        return tag("pre", text)
    return joined(shown, _table(("rank", "step", "doing"), rows[:MOST_ROWS], right={0, 1}))


def timelines(run: Run) -> Markup | None:
    """The predicted timeline of a step, below the measured one if there is one."""
    if run.compiled is None:
        return None
    summary, chunks = run.compiled.summary, run.compiled.state.schedule.chunks
    prediction = summary.prediction
    predicted = with_ends(prediction.timeline.actions, prediction.ends)
    shown = [(f"predicted on {run.compiled.state.device.name}: {seconds_text(prediction.step_time)}", predicted)]
    notes = [run.unmeasured] if run.unmeasured else []
    if run.measured is not None:
        typical, simulated = run.measured.typical.timeline, run.measured.simulated
        shown = [
            (f"measured: {seconds_text(typical.makespan)}, step {run.measured.typical.number}", list(typical.actions)),
            (f"simulated from its action costs: {seconds_text(simulated.makespan)}", list(simulated.actions)),
            *shown,
        ]
    elif not run.unmeasured:
        notes.append("The measured timeline is recorded by `partita run … --trace DIR`.")
    end = max((line[-1].end for _, lines in shown for line in lines if line), default=0.0)
    if not 0 < end < 1e12:
        return None
    drawn = [timeline(title, lines, chunks, end) for title, lines in shown]
    measured = run.history.series.get("step_seconds")
    usual = measured.usual if measured is not None else None
    if usual is not None:
        change = usual / prediction.step_time - 1
        notes.append(
            f"A step takes {seconds_text(usual)} (median of the last), {change:+.0%} compared with the prediction; "
            f"bubble {prediction.timeline.bubble:.1%}, exposed communication {prediction.exposed_communication:.1%}."
        )
    return _section("Timeline of a step", *drawn, legend([lines for _, lines in shown]), *_notes(notes))


def memory(run: Run) -> Markup | None:
    """The bound of each rank, and its measured peak."""
    peaks = run.history.peaks
    bounds: Sequence[int] = ()
    if run.compiled is not None:
        summary = run.compiled.summary
        bounds = [summary.peak_memory[summary.mesh.pipe_rank(rank)] for rank in range(summary.ranks)]
    if peaks and bounds and len(peaks) != len(bounds):
        peaks = []  # of another mesh
    count = max(len(peaks), len(bounds))
    if not count:
        return None
    most = max((*peaks, *bounds, 1))
    rows = []
    for rank in range(min(count, MOST_ROWS)):
        own = [each[rank] if each else None for each in (bounds, peaks)]
        cells = [bytes_text(value) if value is not None else "" for value in own]
        bars = [
            tag("div", class_=f"c{i}", style=f"width:{100 * value / most:.2f}%")
            for i, value in enumerate(own)
            if value is not None
        ]
        rows.append((f"{rank}", *cells, tag("div", *bars, class_="bars")))
    keys = [
        tag("span", joined(tag("i", class_=f"c{i}"), label), class_="key")
        for i, label in enumerate(("bound", "measured"))
    ]
    notes = [f"{count - MOST_ROWS:,} more ranks are left out."] if count > MOST_ROWS else []
    gpu = run.record is not None and run.record.origin is not None and run.record.origin.gpu
    notes.append(
        "The measured peak is not known: no step is done, or all ranks share one process."
        if not peaks
        else "The bound holds for tensors; measured are torch's tensors on the GPU."
        if gpu
        else f"The bound holds for tensors; {PROCESS}."
    )
    table = _table(("rank", "bound", "measured", ""), rows, right={0, 1, 2})
    return _section("Memory by rank", table, tag("p", *keys, class_="legend"), *_notes(notes))


def collectives(run: Run) -> Markup | None:
    """What each source line sends."""
    if run.compiled is None:
        return None
    found = run.compiled.communication
    if not found.causes:
        return _section("Collectives by source line", tag("p", "No line of the file causes a collective."))
    names = short_names(each.tensor for cause in found.causes for each in cause.moved)
    parts: list[Markup] = []
    for cause in found.causes:
        span = cause.span
        if span is None:
            place, code = tag("span", "no source line"), ""
        else:
            file = PurePath(span.source.name).name
            place = tag("a", f"{file}:{span.line}", href=f"#{_anchor(file, span.line)}")
            code = span.source.line(span.line).strip()
        rows = [moved_row(each, names[each.tensor]) for each in cause.moved]
        headings = [column.heading for column in MOVED]
        parts.append(tag("h3", place, " ", tag("code", code)))
        parts.append(_table(headings, rows, right={i for i, column in enumerate(MOVED) if column.right}))
    for axis, cost in found.axes:
        sums = cost.busiest
        parts.append(tag("p", f"Along {axis}: {bytes_text(sums.bytes)}, {seconds_text(sums.seconds)}."))
    return _section("Collectives by source line", *parts, *_notes([f"Of {BUSIEST}; {RINGS}."]))


def evaluations(run: Run) -> Markup | None:
    """A row for each evaluation, the last first."""
    found = run.history.evaluations
    if not found:
        return None
    names = list(dict.fromkeys(name for each in found for name in each if name.startswith(EVAL)))
    rows = [
        (f"{each['step']:,}", *(_cell(each.get(name, "")) for name in names))
        for each in reversed(found[-MOST_EVALUATIONS:])
    ]
    headings = ("step", *(name.removeprefix(EVAL) for name in names))
    more = len(found) - len(rows)
    notes = [f"{more:,} earlier ones are left out."] if more else []
    return _section("Evaluations", _table(headings, rows, right=set(range(len(headings)))), *_notes(notes))


def samples(run: Run) -> Markup | None:
    """What the model has written after evaluations, the last first."""
    found = run.history.samples
    if not found:
        return None
    shown = list(reversed(found[-MOST_SAMPLES:]))
    parts = [
        tag("details", tag("summary", f"step {each.step:,}"), tag("pre", each.text), open=None if i else "")
        for i, each in enumerate(shown)
    ]
    more = len(found) - len(shown)
    return _section("Samples", *parts, *_notes([f"{more:,} earlier ones are left out."] if more else []))


def _cell(value: object) -> str:
    number = number_of(value)
    return "" if number is None else _short(number) if isfinite(number) else "not finite"


def files(run: Run) -> Markup | None:
    """The file itself, and those that it imports, with their lines numbered."""
    record = run.record
    if record is None or not record.files:
        return None
    parts: list[Markup] = []
    origin = record.origin
    if origin is not None and origin.overrides:
        parts.append(tag("p", "with ", *(tag("code", each, " ") for each in origin.overrides)))
    caused = _caused(run.compiled)
    first = origin.file if origin is not None else ""
    for path in sorted(record.files, key=lambda each: each != first):
        name = PurePath(path).name
        lines = [
            tag(
                "span",
                line,
                class_="sends" if (name, number) in caused else None,
                id=_anchor(name, number),
                title="causes collectives" if (name, number) in caused else None,
            )
            for number, line in enumerate(record.files[path].splitlines(), 1)
        ]
        listing = tag("pre", tag("code", *(joined(line, "\n") for line in lines)), class_="listing")
        parts.append(tag("details", tag("summary", name), listing, open="", id=f"file-{_plain(name)}"))
    return _section("The file", *parts)


def _caused(compiled: Compiled | None) -> set[tuple[str, int]]:
    causes = compiled.communication.causes if compiled is not None else ()
    return {(PurePath(each.span.source.name).name, each.span.line) for each in causes if each.span is not None}


def _anchor(file: str, line: int) -> str:
    return f"{_plain(file)}-{line}"


def _plain(name: str) -> str:
    """A name as part of an address."""
    return "".join(each if each.isascii() and each.isalnum() else "-" for each in name)


SECTIONS: tuple[Callable[[Run], Markup | None], ...] = (
    head, tiles, charts, evaluations, samples, timelines, memory, collectives, events, files,
)  # fmt: skip


def content(run: Run) -> Markup:
    """All of the page that changes."""
    missing = [] if run.compiled is not None else [f"Left out is what the compiler says, because {run.uncompiled}."]
    first, *others = (section(run) for section in SECTIONS)
    return joined(first, *_notes(missing), *others)


# ---------------------------------------------------------------- parts


def _section(title: str, *children: Markup) -> Markup:
    return tag("section", tag("h2", title), *children)


def _notes(notes: Sequence[str]) -> Iterator[Markup]:
    return (tag("p", note, class_="note") for note in notes)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> Markup:
    """A table that scrolls within itself where the page is narrow."""

    def cell(name: str, column: int, value: str) -> Markup:
        return tag(name, value, class_="right" if column in right else None)

    top = tag("tr", *(cell("th", i, heading) for i, heading in enumerate(headings)))
    body = [tag("tr", *(cell("td", i, value) for i, value in enumerate(row))) for row in rows]
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body)), class_="table", tabindex="0")


def _short(value: float) -> str:
    return f"{value:.4g}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:.4f}".rstrip("0").rstrip(".")


def _percent(value: float) -> str:
    return f"{value:.1%}"


TITLES = {
    "tokens_per_second": "tokens per second",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "step_seconds": "step time",
    "peak_memory": "peak memory, the largest of all ranks",
    "mfu": "MFU",
    "skipped": "steps skipped so far",
}
IN_BYTES = ("peak_memory",)
WRITTEN: dict[str, Callable[[float], str]] = {
    "tokens_per_second": count_text,
    "step_seconds": seconds_text,
    "peak_memory": bytes_text,
    "mfu": _percent,
    "skipped": plain_text,
}
