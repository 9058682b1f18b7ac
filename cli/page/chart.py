"""Charts of numbers over steps, as SVG that stretches with the page; labels are HTML, so they keep their size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, inf, isfinite, isnan, log, log10

from attrs import frozen

from partita.cli.page.history import Series
from partita.cli.page.markup import Markup, joined, tag

WIDTH, HEIGHT = 600.0, 200.0
# More values than this are drawn as the mean and the range of that many groups of steps.
MOST_POINTS = 300
# A range of positive values that is wider than this is drawn on a logarithmic scale.
LOGARITHMIC = 100.0


@frozen
class Point:
    """A value, or several of neighboring steps: their mean and range."""

    step: float
    value: float
    least: float
    most: float


@frozen(eq=False)
class Line:
    """A line of a chart. `level` is a constant instead of a series."""

    label: str
    series: Series | None = None
    level: float | None = None


def points(series: Series, most: int = MOST_POINTS) -> list[Point]:
    """The finite values of a series, in at most `most` groups of steps."""
    pairs = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if isfinite(v)]
    if len(pairs) <= most:
        return [Point(step, value, value, value) for step, value in pairs]
    found = []
    for i in range(most):
        group = pairs[i * len(pairs) // most : (i + 1) * len(pairs) // most]
        values = [value for _, value in group]
        mean = sum(value / len(values) for value in values)
        found.append(Point(sum(step for step, _ in group) / len(group), mean, min(values), max(values)))
    return found


def ticks(least: float, most: float, count: int = 4, unit: float = 1000.0) -> list[float]:
    """Round numbers from `least` to `most`: about `count`, 1, 2 or 5 times a power of ten apart, of what they are
    written in: powers of `unit`, 1000 or 1024.
    """
    rough = (most - least) / count
    if not (0 < rough < inf):
        return [least]
    prefix = (unit / 1000) ** max(0, floor(log(max(abs(least), abs(most)), unit)))
    power = 10.0 ** floor(log10(rough / prefix)) * prefix
    step = next((each * power for each in (1, 2, 5) if each * power >= rough * 0.999), 10 * power)
    first, last = ceil(least / step - 1e-9), floor(most / step + 1e-9)
    return [number * step for number in range(first, last + 1)][:20]


@frozen
class Scale:
    """From values to positions between 0 and 1."""

    least: float
    most: float
    logarithmic: bool = False
    unit: float = 1000.0

    def at(self, value: float) -> float:
        """The position of a value."""
        if self.logarithmic:
            return log10(value / self.least) / log10(self.most / self.least)
        return (value - self.least) / (self.most - self.least)

    @property
    def ticks(self) -> list[float]:
        """The values that are labelled."""
        if not self.logarithmic:
            return ticks(self.least, self.most, unit=self.unit)
        powers = range(ceil(log10(self.least) - 1e-9), floor(log10(self.most) + 1e-9) + 1)
        found = [10.0**power for power in powers][:: max(1, ceil(len(powers) / 5))]
        return found or [self.least]


def scale_of(values: Sequence[float], unit: float = 1000.0) -> Scale:
    """A scale for values, with some room above and below."""
    least, most = min(values), max(values)
    if least > 0 and most / least > LOGARITHMIC:
        return Scale(least, most, logarithmic=True)
    room = 0.04 * (most - least) or abs(most) * 0.1 or 1.0
    if not isfinite(room) or not isfinite(most + room) or not isfinite(least - room):
        return Scale(-1.0, 1.0)
    return Scale(least - room, most + room, unit=unit)


def chart(title: str, lines: Sequence[Line], written: Callable[[float], str], unit: float = 1000.0) -> Markup | None:
    """A chart with its title; None if there is nothing finite to draw. `written` writes a value, in powers of
    `unit`.
    """
    drawn = [(line, points(line.series) if line.series is not None else []) for line in lines]
    found = [point for _, own in drawn for point in own]
    if not found:
        return None
    levels = [line.level for line in lines if line.level is not None and isfinite(line.level)]
    ends = [value for point in found for value in (point.least, point.most)]
    if max(map(abs, (*ends, *levels))) > 1e300:
        return None
    x, y = _steps([point.step for point in found]), scale_of((*ends, *levels), unit)
    shapes = [*_grid(y)]
    for number, (line, own) in enumerate(drawn):
        shapes.extend(_line(number, own, x, y))
        if line.level is not None and isfinite(line.level):
            height = _rounded(HEIGHT * (1 - y.at(line.level)))
            shapes.append(tag("path", d=f"M0 {height}H{WIDTH:g}", class_=f"line level c{number}"))
    svg = tag(
        "svg",
        *shapes,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title} over steps",
    )
    shown = [
        {
            "label": line.label,
            "points": [[round(x.at(p.step), 4), round(p.step), written(p.value)] for p in own],
        }
        for line, own in drawn
        if own
    ]
    labels = [tag("span", written(value), class_="y", style=f"top:{100 * (1 - y.at(value)):.2f}%") for value in y.ticks]
    plot = tag(
        "div", svg, *labels, tag("div", class_="cross"), tag("div", class_="tip"), class_="plot",
        data_lines=json.dumps(shown),
    )  # fmt: skip
    notes = ["logarithmic" if y.logarithmic else "", _unsound(lines)]
    caption = "; ".join(each for each in notes if each)
    return tag(
        "figure",
        tag("figcaption", tag("b", title), *_legend(drawn), tag("small", caption) if caption else None),
        plot,
        tag("div", *_step_labels(x), class_="x"),
        class_="chart",
    )


def _steps(steps: Sequence[float]) -> Scale:
    """The scale of steps, from the first to the last."""
    least, most = min(steps), max(steps)
    return Scale(least, most) if most > least else Scale(least - 1, least + 1)


def _grid(y: Scale) -> Iterator[Markup]:
    for value in y.ticks:
        height = _rounded(HEIGHT * (1 - y.at(value)))
        yield tag("path", d=f"M0 {height}H{WIDTH:g}", class_="grid")


def _line(number: int, own: Sequence[Point], x: Scale, y: Scale) -> Iterator[Markup]:
    """The range of groups, if there are any, and the line through values or means."""

    def at(step: float, value: float) -> str:
        return f"{_rounded(WIDTH * x.at(step))} {_rounded(HEIGHT * (1 - y.at(value)))}"

    if any(point.least < point.most for point in own):
        around = [at(p.step, p.most) for p in own] + [at(p.step, p.least) for p in reversed(own)]
        yield tag("path", d=f"M{'L'.join(around)}Z", class_=f"range c{number}")
    if len(own) == 1:
        place = at(own[0].step, own[0].value)
        yield tag("path", d=f"M{place}h0", class_=f"dot c{number}")
    elif own:
        yield tag("path", d=f"M{'L'.join(at(p.step, p.value) for p in own)}", class_=f"line c{number}")


def _legend(drawn: Sequence[tuple[Line, Sequence[Point]]]) -> Iterator[Markup]:
    shown = [(number, line) for number, (line, own) in enumerate(drawn) if own or line.level is not None]
    for number, line in shown if len(shown) > 1 else ():
        yield tag("span", joined(tag("i", class_=f"c{number}"), line.label), class_="key")


def _step_labels(x: Scale) -> Iterator[Markup]:
    for value in ticks(x.least, x.most, 5):
        if value == round(value):
            place = 100 * x.at(value)
            yield tag("span", f"{value:,.0f}", style=f"left:{place:.2f}%", class_="end" if place > 95 else None)


def _unsound(lines: Sequence[Line]) -> str:
    count = sum(sum(map(isnan, line.series.values)) for line in lines if line.series is not None)
    return f"{count:,} not finite" if count else ""


def _rounded(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
