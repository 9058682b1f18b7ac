"""The head of a run's page: what the run is, whether it goes on, and the numbers of now."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from math import inf, isfinite

from attrs import frozen

from partita.cli.number_format import bytes_text, count_text, percent_text, seconds_text, short_text
from partita.cli.page import markup
from partita.cli.page.markup import Markup, joined, prose, tag
from partita.cli.page.run import Run
from partita.cli.traffic import mesh_text
from partita.runtime.metrics import number_of
from partita.runtime.progress import duration

RUNNING, FINISHED, FAILED, STOPPED = "running", "finished", "failed", "stopped"
# Medians of the last steps, where one step says little.
USUAL = ("tokens_per_second", "rows_per_second", "step_seconds", "mfu")
TILES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", short_text),
    ("eval loss", "eval_loss", short_text),
    ("tokens/s", "tokens_per_second", count_text),
    ("rows/s", "rows_per_second", count_text),
    ("step time", "step_seconds", seconds_text),
    ("MFU", "mfu", percent_text),
    ("peak memory", "peak_memory", bytes_text),
)


@frozen
class Fault:
    """Why the last failure was, if the record says so, when (Unix time), and what each rank was doing."""

    cause: str
    time: float | None
    ranks: tuple[tuple[str, str, str], ...]


def fault_of(run: Run) -> Fault | None:
    """The last failure; None if there was none, or its record is not valid."""
    try:
        record = json.loads(run.fault or "")
        time = number_of(record.get("unix_time"))
        ranks = tuple((str(each["rank"]), str(each["step"]), str(each["doing"])) for each in record["ranks"])
        return Fault(str(record["cause"]), time if time is not None and isfinite(time) else None, ranks)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def status(run: Run) -> str | None:
    """Whether a run goes on, or how it has ended; None if that cannot be known."""
    if run.held:
        return RUNNING
    steps, fault = run.steps, fault_of(run)
    finished = steps is not None and run.history.step >= steps
    if fault is not None and (not finished if fault.time is None else fault.time >= (run.history.last or -inf)):
        return FAILED
    return FINISHED if finished else STOPPED if run.held is False and steps is not None else None


def head(run: Run) -> Markup:
    """Name, status, mesh, progress, times."""
    words, now, steps = [], status(run), run.steps
    if run.compiled is not None:
        summary = run.compiled.summary
        words.append(f"{count_text(summary.parameters)} parameters; {mesh_text(summary.mesh)}")
        words.append(f"schedule {run.compiled.state.schedule.name}")
    bar = None
    if steps:
        bar = tag("div", tag("div", style=f"width:{min(100.0, 100 * run.history.step / steps):.1f}%"), class_="bar")
    fault = fault_of(run) if now == FAILED else None
    return tag(
        "header",
        tag("h1", run.name, " ", tag("span", now, class_=f"pill {now}") if now else None),
        tag("p", "; ".join(words)) if words else None,
        tag("p", prose(fault.cause), class_="fault") if fault is not None else None,
        bar,
        tag("p", joined(*_times(run, now)), class_="when"),
    )


def _times(run: Run, now: str | None) -> list[Markup]:
    """When the run started, how long it has taken, and how long it will."""
    began, last = run.history.began, run.history.last
    if began is None or last is None:
        return []
    try:
        moment = datetime.fromtimestamp(began, UTC)
    except (ValueError, OverflowError, OSError):
        return []
    # The reader's own time, if there is a script.
    started = tag("time", f"{moment:%Y-%m-%d %H:%M} UTC", datetime=f"{moment:%Y-%m-%dT%H:%M:%SZ}")
    parts = ["started ", started, f" · {duration(max(0.0, last - began))}"]
    left = run.history.seconds_left(run.steps) if now == RUNNING and run.steps else None
    return [*map(Markup, parts), *([Markup(f" · {duration(left)} left")] if left is not None else [])]


def tiles(run: Run) -> Markup:
    """The numbers of now."""
    history, steps = run.history, run.steps
    entries = [("step", f"{history.step:,}" + (f" of {steps:,}" if steps else ""))]
    for label, name, written in TILES:
        series = history.series.get(name)
        if series is not None:
            value = series.usual if name in USUAL else series.last
            entries.append((label, written(value) if value is not None and isfinite(value) else "not finite"))
    if run.compiled is not None:
        entries.append(("predicted step", seconds_text(run.compiled.summary.prediction.step_time)))
    return markup.tiles(entries)
