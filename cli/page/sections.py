"""The sections of a run's page, in order. Each is None if there is nothing to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from pathlib import PurePath
from typing import TypeAlias

from partita.cli.number_format import UNITS, bytes_text, count_text, percent_text, plain_text, seconds_text, short_text
from partita.cli.page.chart import Chart, Line, numbers
from partita.cli.page.head import fault_of, head, tiles
from partita.cli.page.history import EVAL, Series
from partita.cli.page.listing import anchor, listings
from partita.cli.page.markup import Group, Markup, joined, prose, table, tag
from partita.cli.page.run import Run
from partita.cli.page.timeline import legend, timeline, with_ends
from partita.cli.traffic import BUSIEST, MOVED, RINGS, moved_row, short_names
from partita.compiler.schedules.timeline import Interval
from partita.dsl.grouping import grouped
from partita.runtime.metrics import number_of

MOST_ROWS = 256
MOST_EVALUATIONS, LAST_EVALUATIONS = 500, 5
MOST_SAMPLES = 20
# Timelines that differ by more than this have scales of their own.
COMPARABLE = 3.0
Titled: TypeAlias = "Sequence[tuple[str, Sequence[Sequence[Interval]]]]"
PROCESS = "measured is the whole process, including Python and its libraries: on CPUs torch does not count tensors"


def charts(run: Run) -> Markup | None:
    """A chart for each number, and a table of what they show."""
    history = run.history
    prediction = run.compiled.summary.prediction if run.compiled is not None else None
    levels = {} if prediction is None else {
        f"{prediction.unit}_per_second": prediction.rate,
        "step_seconds": prediction.step_time,
    }  # fmt: skip
    names = history.names
    drawn = []
    for name in sorted(names, key=lambda each: (each != "loss", each not in RATES, each in SMALL)):
        lines = [
            Line("training", history.series.get(name, Series())),
            Line("evaluation", history.series.get(EVAL + name, Series())),
        ]
        size = "large" if name == "loss" else "small" if name in SMALL else ""
        level = ("predicted", levels[name]) if name in levels else None
        written, units = KINDS.get(name, NUMBER)
        drawn.append(Chart(TITLES.get(name, name), lines, written, units, level, size))
    nonempty = [each for each in drawn if each.points]
    if not nonempty:
        return None
    notes = ["Drag across a chart to see those steps alone, double-click for all."]
    if "mfu" not in names:
        notes.append(
            "MFU is left out: it needs a mesh that names the device on which the run computes, and ranks that are "
            "processes."
        )
    return _section(
        "Training",
        tag("noscript", tag("p", "The charts need JavaScript; their numbers are below.")),
        tag("div", *(each.figure() for each in nonempty), class_="charts"),
        *_notes(notes),
        tag("details", tag("summary", "the numbers"), numbers(nonempty)),
    )


def events(run: Run) -> Markup | None:
    """Steps that were left out, slow ranks, the last failure."""
    rows = [(f"{event.step:,}", prose(event.text)) for event in run.history.events]
    parts = [table("Events", ("step", "what happened"), [Group(rows)], right={0})] if rows else []
    if run.history.left_out:
        parts.append(tag("p", f"and {run.history.left_out:,} more"))
    fault = fault_of(run)
    if fault is not None:
        parts.append(tag("p", joined("the last failure: ", prose(fault.cause)), class_="fault"))
        if fault.ranks:
            headings = ("rank", "step", "doing")
            parts.append(table("The ranks at the failure", headings, [Group(fault.ranks[:MOST_ROWS])], right={0, 1}))
    elif run.fault is not None:
        parts.append(tag("pre", run.fault))
    return _section("Events", *parts) if parts else None


def timelines(run: Run) -> Markup | None:
    """The predicted timeline of a step, below the measured one if there is one."""
    if run.compiled is None:
        return None
    summary, schedule = run.compiled.summary, run.compiled.state.schedule
    prediction = summary.prediction
    title = f"predicted on {run.compiled.state.device.name}: {seconds_text(prediction.step_time)}"
    predicted: Titled = [(title, with_ends(prediction.timeline.actions, prediction.ends))]
    measured: Titled = []
    notes = [run.unmeasured] if run.unmeasured else []
    if run.measured is not None:
        typical, simulated = run.measured.typical.timeline, run.measured.simulated
        measured = [
            (f"measured: {seconds_text(typical.makespan)}, step {run.measured.typical.number}", typical.actions),
            (f"simulated from its action costs: {seconds_text(simulated.makespan)}", simulated.actions),
        ]
    elif not run.unmeasured:
        notes.append("The measured timeline is recorded by `partita run … --trace DIR`.")
    ends = [_end(shown) for shown in (measured or predicted, predicted)]
    if not all(1e-12 < end < 1e12 for end in ends):
        return None
    between = None
    if _apart(ends[0] / ends[1]):
        words = f"{_times(ends[0] / ends[1])} the prediction{_crowd(run)}; each has its own scale."
        between = tag("p", words, class_="note")
    else:
        ends = [max(ends)] * 2
    drawn = [
        [timeline(title, lines, schedule.chunks, end, "rank" if len(lines) == summary.ranks else "pipe")
         for title, lines in shown]
        for shown, end in zip((measured, predicted), ends, strict=True)
    ]  # fmt: skip
    series = run.history.series.get("step_seconds")
    usual = series.usual if series is not None else None
    if usual is not None:
        ratio = usual / prediction.step_time
        compared = (
            f"{_times(ratio)} the prediction" if _apart(ratio) else f"{ratio - 1:+.0%} compared with the prediction"
        )
        notes.append(
            f"A step takes {seconds_text(usual)} (median of the last), {compared}{'' if measured else _crowd(run)}; "
            f"bubble {prediction.timeline.bubble:.1%}, exposed communication {prediction.exposed_communication:.1%}."
        )
    key = legend([lines for _, lines in (*measured, *predicted)], schedule.chunks)
    return _section("Timeline of a step", *drawn[0], between, *drawn[1], key, *_notes(notes))


def _end(shown: Titled) -> float:
    return max((line[-1].end for _, lines in shown for line in lines if line), default=0.0)


def _apart(ratio: float) -> bool:
    return not 1 / COMPARABLE <= ratio <= COMPARABLE


def _times(ratio: float) -> str:
    return f"≈{float(f'{ratio:.2g}'):,g}×"


def _crowd(run: Run) -> str:
    """That ranks share cores, if they do."""
    origin = run.origin
    ranks = run.compiled.summary.ranks if run.compiled is not None else 0
    if origin is None or origin.gpu or not origin.cores or ranks <= origin.cores:
        return ""
    return f"; {ranks:,} ranks on {origin.cores:,} core{'s' * (origin.cores > 1)}"


def memory(run: Run) -> Markup | None:
    """The bound of each rank, and its measured peak."""
    peaks = run.history.peaks
    bounds: Sequence[int] = ()
    if run.compiled is not None:
        summary = run.compiled.summary
        bounds = [summary.peak_memory[summary.mesh.pipe_rank(rank)] for rank in range(summary.ranks)]
    if peaks and bounds and len(peaks) != len(bounds):
        peaks = []  # of another mesh
    columns = [(name, values) for name, values in (("bound", bounds), ("measured", peaks)) if values]
    if not columns:
        return None
    gpu = run.origin is not None and run.origin.gpu
    # On a CPU they are of different things.
    scales = [max(1, *(each for _, values in (columns if gpu else [own]) for each in values)) for own in columns]
    count = len(columns[0][1])
    rows = []
    for rank in range(min(count, MOST_ROWS)):
        cells = [str(rank)]
        for i, (_, values) in enumerate(columns):
            bar = tag("div", style=f"width:{100 * values[rank] / scales[i]:.2f}%", class_=f"c{i}")
            cells += [bytes_text(values[rank]), tag("div", bar, class_="level")]
        rows.append(cells)
    headings = ["rank", *(heading for name, _ in columns for heading in (name, ""))]
    notes = [f"{count - MOST_ROWS:,} more ranks are left out."] if count > MOST_ROWS else []
    notes.append(
        "The measured peak is not known: no step is done, or all ranks share one process."
        if not peaks
        else "The bound holds for tensors; measured are torch's tensors on the GPU."
        if gpu
        else f"The bound holds for tensors; {PROCESS}. Each has its own scale."
    )
    return _section("Memory by rank", table("Memory by rank", headings, [Group(rows)], {0, 1, 3}), *_notes(notes))


def collectives(run: Run) -> Markup | None:
    """What each source line sends."""
    if run.compiled is None:
        return None
    communication = run.compiled.communication
    title = "Collectives by source line"
    if not communication.causes:
        return _section(title, tag("p", "No line of the file causes a collective."))
    names = short_names(each.tensor for cause in communication.causes for each in cause.moved)
    groups, joins = [], False
    for cause in communication.causes:
        span = cause.span
        place, code = tag("span", "no source line"), ""
        if span is not None:
            file = PurePath(span.source.name).name
            place = tag("a", f"{file}:{span.line}", href=f"#{anchor(file, span.line)}")
            code = span.source.line(span.line).strip()
        # Equal rows of several tensors are one.
        equal = grouped(cause.moved, lambda each: moved_row(each, ""))
        joins |= len(equal) < len(cause.moved)
        rows = [moved_row(own[0], ", ".join(names[each.tensor] for each in own)) for own in equal.values()]
        groups.append(Group(rows, joined(place, " ", tag("code", code))))
    right = {i for i, column in enumerate(MOVED) if column.right}
    shown = table(title, [column.heading for column in MOVED], groups, right)
    sums = [
        tag("p", f"Along {axis}: {bytes_text(cost.busiest.bytes)}, {seconds_text(cost.busiest.seconds)}.")
        for axis, cost in communication.axes
    ]
    each = " Where a row names several tensors, the numbers are of each." if joins else ""
    return _section(title, shown, *sums, *_notes([f"Of {BUSIEST}; {RINGS}.{each}"]))


def evaluations(run: Run) -> Markup | None:
    """The last evaluations and the best one; all of them are folded."""
    records = run.history.evaluations
    if not records:
        return None
    names = list(dict.fromkeys(name for each in records for name in each if name.startswith(EVAL)))
    columns = [_column([number_of(each.get(name)) for each in records]) for name in names]
    losses = [number_of(each.get(f"{EVAL}loss")) for each in records]
    best = min(
        (i for i, loss in enumerate(losses) if loss is not None and isfinite(loss)),
        key=lambda i: losses[i] or 0.0,
        default=None,
    )
    rows = [
        (f"{each['step']:,}", *(column[i] for column in columns), tag("b", "best") if i == best else "")
        for i, each in enumerate(records)
    ]
    headings = ("step", *(name.removeprefix(EVAL) for name in names), "")

    def shown(title: str, numbers: Iterable[int]) -> Markup:
        return table(title, headings, [Group([rows[i] for i in numbers])], set(range(len(names) + 1)))

    count = len(records)
    last = range(count - 1, max(-1, count - 1 - LAST_EVALUATIONS), -1)
    parts = [shown("The last evaluations", last if best is None or best in last else (*last, best))]
    if count > LAST_EVALUATIONS:
        folded = range(count - 1, max(-1, count - 1 - MOST_EVALUATIONS), -1)
        words = f"all {count:,}" if count <= MOST_EVALUATIONS else f"the last {MOST_EVALUATIONS} of {count:,}"
        parts.append(tag("details", tag("summary", words), shown("All evaluations", folded)))
    return _section("Evaluations", *parts)


def _column(values: Sequence[float | None]) -> list[str]:
    """The numbers of a column, with equally many decimals."""
    plain = all(value is None or not isfinite(value) or not value or 1e-3 <= abs(value) < 1e5 for value in values)
    return [
        "" if value is None else "not finite" if not isfinite(value) else f"{value:.4f}" if plain else f"{value:.3e}"
        for value in values
    ]


def samples(run: Run) -> Markup | None:
    """What the model has written after evaluations, the last first."""
    records = run.history.samples
    if not records:
        return None
    shown = list(reversed(records[-MOST_SAMPLES:]))
    parts = [
        tag("details", tag("summary", f"step {each.step:,}"), tag("pre", each.text), open=None if i else "")
        for i, each in enumerate(shown)
    ]
    more = len(records) - len(shown)
    return _section("Samples", *parts, *_notes([f"{more:,} earlier ones are left out."] if more else []))


def files(run: Run) -> Markup | None:
    """The file itself, and those that it imports."""
    parts = listings(run)
    if parts and run.origin is not None and run.origin.overrides:
        parts.insert(0, tag("p", "with ", *(joined(tag("code", each), " ") for each in run.origin.overrides)))
    return _section("The file", *parts) if parts else None


SECTIONS: tuple[Callable[[Run], Markup | None], ...] = (
    head, tiles, charts, evaluations, samples, timelines, memory, collectives, events, files,
)  # fmt: skip


def content(run: Run) -> Markup:
    """All of the page that changes."""
    missing = [] if run.compiled is not None else [f"Left out is what the compiler says, because {run.uncompiled}."]
    first, *others = (section(run) for section in SECTIONS)
    return joined(first, *_notes(missing), *others)


# ---------------------------------------------------------------- parts


def _section(title: str, *children: Markup | None) -> Markup:
    return tag("section", tag("h2", title), *children)


def _notes(notes: Sequence[str]) -> Iterator[Markup]:
    return (tag("p", prose(note), class_="note") for note in notes)


TITLES = {
    "tokens_per_second": "tokens per second",
    "rows_per_second": "rows per second",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "step_seconds": "step time",
    "peak_memory": "peak memory",
    "mfu": "MFU",
    "skipped": "steps skipped so far",
}
RATES = ("tokens_per_second", "rows_per_second")
SMALL = ("learning_rate", "peak_memory", "skipped")
# How numbers are written, and what their axes count in.
NUMBER = short_text, (("", 1.0),)
KINDS: dict[str, tuple[Callable[[float], str], Sequence[tuple[str, float]]]] = {
    **dict.fromkeys(RATES, (count_text, (("", 1.0), ("thousand", 1e3), ("million", 1e6)))),
    "step_seconds": (seconds_text, UNITS),
    "peak_memory": (bytes_text, (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30))),
    "mfu": (percent_text, (("%", 0.01),)),
    "skipped": (plain_text, (("", 1.0),)),
}
