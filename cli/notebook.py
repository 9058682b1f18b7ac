"""What notebooks show of the results of the Python API: `_repr_html_` of each kind, as the page of a run looks.

It is HTML alone, without scripts: it stays as it is in a saved notebook, and in one that is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.cli.number_format import bytes_text, seconds_text, short_text
from partita.cli.page.chart import Chart, Line, numbers
from partita.cli.page.history import Series
from partita.cli.page.listing import highlighted
from partita.cli.page.markup import Markup, joined, tag, tiles
from partita.cli.page.timeline import legend, timeline
from partita.cli.schedule import headline
from partita.compiler.report.summary import summarize

if TYPE_CHECKING:
    from partita.compiler.report.summary import Summary
    from partita.compiler.schedules.schedule import Schedule
    from partita.compiler.schedules.timeline import Timeline
    from partita.compiler.state import Compilation
    from partita.dsl.diagnostic import Diagnostic
    from partita.dsl.spec import Spec
    from partita.runtime.trained import Trained
    from partita.runtime.verification.verify import Verification

# The page's style, for what is in one element of another page.
CLASS = "partita-result"
PAGE = (Path(__file__).parent / "page" / "page.css").read_text(encoding="utf-8")
STYLE = f".{CLASS} {{\n{PAGE.replace(':root {', '& {').replace('body {', '& {')}\n}}"
MOST_CHARTS = 6


def html(result: Any) -> str:
    """A result, as HTML."""
    shown = SHOWN[type(result).__name__](result)
    return tag("div", tag("style", Markup(STYLE)), *shown, class_=CLASS)


def _spec(spec: Spec) -> Iterator[Markup]:
    yield tag("p", repr(spec))
    lines = (joined(tag("span", line), "\n") for line in highlighted(spec.source.text))
    yield tag("pre", tag("code", *lines), class_="listing scroll")


def _compilation(state: Compilation) -> Iterator[Markup]:
    yield tag("p", repr(state))
    summary = summarize(state)
    yield _numbers(summary)
    yield from _timeline(summary.prediction.timeline, state.schedule, summary.prediction.step_time)


def _summary(summary: Summary) -> Iterator[Markup]:
    yield tag("p", repr(summary))
    yield _numbers(summary)
    yield from _timeline(summary.prediction.timeline)


def _numbers(summary: Summary) -> Markup:
    figures = {
        "parameters": f"{summary.parameters:,}",
        "ranks": f"{summary.ranks:,}",
        "memory bound": bytes_text(max(summary.peak_memory)),
        "predicted step": seconds_text(summary.prediction.step_time),
        "bubble": f"{summary.timeline.bubble:.1%}",
    }
    return tiles(figures.items())


def _timeline(simulated: Timeline, schedule: Schedule | None = None, step: float | None = None) -> Iterator[Markup]:
    title = headline(schedule, simulated, seconds_text, step) if schedule is not None else "timeline"
    used = [interval.work for line in simulated.actions for interval in line]
    chunks = (
        schedule.chunks if schedule is not None else 1 + max((getattr(work, "chunk", 0) for work in used), default=0)
    )
    if simulated.makespan:
        yield timeline(title, simulated.actions, chunks, simulated.makespan)
        yield legend([simulated.actions], chunks)


def _verification(verification: Verification) -> Iterator[Markup]:
    yield tag("p", repr(verification))
    numbers = {
        "outcome": str(verification.outcome.value),
        "ranks": f"{verification.ranks:,}",
        "actions": f"{verification.actions:,}",
        "messages": f"{verification.messages:,}",
        "memory bound": bytes_text(max(verification.peak_memory, default=0)),
    }
    yield tiles(numbers.items())
    for each in (*verification.diagnostics, *verification.warnings):
        yield from _diagnostic(each)


def _diagnostic(diagnostic: Diagnostic) -> Iterator[Markup]:
    yield tag("pre", diagnostic.render())


def _trained(trained: Trained) -> Iterator[Markup]:
    yield tag("p", repr(trained))
    names = dict.fromkeys(name for record in trained for name, value in record.items() if isinstance(value, float))
    own = [name for name in names if not name.startswith("eval_")]
    shown = sorted(own, key=lambda name: name != "loss")[:MOST_CHARTS]
    yield numbers(Chart(name, list(_lines(name, trained)), short_text) for name in shown)


def _lines(name: str, records: Iterable[Mapping[str, Any]]) -> Iterator[Line]:
    """A number of training, and the same of evaluations."""
    for label, key in (("training", name), ("evaluation", f"eval_{name}")):
        series = Series()
        for record in records:
            if isinstance(record.get(key), float) and isfinite(record[key]):
                series.add(record["step"], record[key])
        if series.values:
            yield Line(label, series)


SHOWN: dict[str, Callable[[Any], Iterator[Markup]]] = {
    "Spec": _spec,
    "Compilation": _compilation,
    "Summary": _summary,
    "Timeline": _timeline,
    "Verification": _verification,
    "Diagnostic": _diagnostic,
    "Trained": _trained,
}
