"""Charts of numbers over steps: data, which uPlot draws in the browser (`page.js`), and the same numbers as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite, isnan

from attrs import field, frozen

from partita.cli.number_format import Unit, unit_of
from partita.cli.page.history import Series
from partita.cli.page.markup import Group, Markup, table, tag

# More values than this are drawn as the mean and the range of that many groups of steps.
MOST_POINTS = 1000
# A range of positive values that is wider than this is drawn on a logarithmic scale.
LOGARITHMIC = 100.0
# A level that is farther than this many times from all values is only said: it would flatten them.
FAR = 3.0
# What uPlot has ticks for.
LARGEST = 1e30


@frozen
class Point:
    """A value, or several of neighboring steps: their mean and range."""

    step: float
    value: float
    least: float
    most: float


@frozen(eq=False)
class Line:
    """A line of a chart."""

    label: str
    series: Series


@frozen(eq=False)
class Chart:
    """What a chart shows, and how: a constant `level`, which has a label, beside its lines; `written` writes a value,
    and `units`, of which there is at least one, are what the axis may count in, by name, in ascending order.
    """

    title: str
    lines: Sequence[Line]
    written: Callable[[float], str]
    units: Sequence[Unit] = (("", 1.0),)
    level: tuple[str, float] | None = None
    size: str = ""
    points: Sequence[tuple[Line, Sequence[Point]]] = field(init=False)

    @points.default
    def _points(self) -> Sequence[tuple[Line, Sequence[Point]]]:
        drawn = [(line, points(line.series)) for line in self.lines]
        return [(line, own) for line, own in drawn if own]

    def figure(self) -> Markup:
        """The place of the chart, with its data. There is something to draw."""
        ends = [value for _, own in self.points for point in own for value in (point.least, point.most)]
        low, high = min(ends), max(ends)
        name, size = unit_of(high, self.units)
        nonfinite = sum(sum(map(isnan, line.series.values)) for line in self.lines)
        notes = [f"{nonfinite:,} not finite"] if nonfinite else []
        data: dict[str, object] = {"lines": [_data(line, own, size) for line, own in self.points]}
        if self.level is not None and isfinite(self.level[1]):
            label, level = self.level
            near = low / FAR <= level <= high * FAR
            data |= {"level": (label, _rounded(level / size))} if near else {}
            notes.append(f"{label} {self.written(level)}" + ("" if near else ", off the scale"))
        # Whether it may be logarithmic, and is at first.
        data["logarithmic"] = high / low > LOGARITHMIC if low > 0 else None
        return tag(
            "figure",
            tag("figcaption", tag("b", self.title + (f", {name}" if name else "")), tag("small", "; ".join(notes))),
            tag(
                "div",
                class_="plot",
                role="img",
                aria_label=f"{self.title} over steps: {'; '.join(' '.join(row[1:]) for row in self.rows())}",
                data_chart=json.dumps(data, separators=(",", ":")),
            ),
            class_=f"chart {self.size}".strip(),
        )

    def rows(self) -> Iterator[tuple[str, ...]]:
        """What each line shows: the chart's title, its own label, the first, last, least and most value."""
        for line, own in self.points:
            ends = min(point.least for point in own), max(point.most for point in own)
            yield self.title, line.label, *map(self.written, (own[0].value, own[-1].value, *ends))


HEADINGS = ("number", "of", "first", "last", "least", "most", "")


def numbers(charts: Iterable[Chart]) -> Markup:
    """What charts show as a table, with a small picture of each line: for a page without scripts, and without eyes."""
    rows = [(*row, _sparkline(own)) for each in charts for row, (_, own) in zip(each.rows(), each.points, strict=True)]
    return table("The numbers of the charts", HEADINGS, [Group(rows)], set(range(2, 6)))


def points(series: Series, limit: int = MOST_POINTS) -> list[Point]:
    """The values of a series that can be drawn, in at most `limit` groups of steps."""
    pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if abs(v) <= LARGEST]
    if len(pairs) <= limit:
        return [Point(step, value, value, value) for step, value in pairs]
    buckets = []
    for i in range(limit):
        group = pairs[i * len(pairs) // limit : (i + 1) * len(pairs) // limit]
        values = [value for _, value in group]
        mean = sum(value / len(values) for value in values)
        buckets.append(Point(sum(step for step, _ in group) / len(group), mean, min(values), max(values)))
    return buckets


def _sparkline(own: Sequence[Point]) -> Markup:
    """A line, from its least to its most value, without an axis."""
    values, steps = [point.value for point in own], [point.step for point in own]
    across, up = (max(each) - min(each) or 1.0 for each in (steps, values))
    places = [f"{100 * (p.step - steps[0]) / across:.1f} {19 - 18 * (p.value - min(values)) / up:.1f}" for p in own]
    return tag(
        "svg",
        tag("path", d=f"M{'L'.join(places)}" + "h.1" * (len(own) == 1)),
        class_="spark",
        viewBox="0 0 100 20",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _data(line: Line, own: Sequence[Point], size: float) -> list[object]:
    """A line's label, its steps and values, and their ranges if any has one."""
    names = ("value", "least", "most") if any(point.least < point.most for point in own) else ("value",)
    columns = [[_rounded(getattr(point, name) / size) for point in own] for name in names]
    return [line.label, [round(point.step) for point in own], *columns]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
