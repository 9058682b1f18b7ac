"""The timeline of a step: a row for each rank as SVG, one path for all actions of a color, and numbers upon it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10

from partita.cli.number_format import unit_of
from partita.cli.page.markup import Markup, joined, tag
from partita.cli.pictures.picture import COLOURS, NAMES, colour, computed, kinds_in
from partita.compiler.schedules.schedule import KINDS, Action
from partita.compiler.schedules.timeline import Interval
from partita.dsl.grouping import grouped

WIDTH, ROW, GAP = 1000.0, 20.0, 3.0
MOST_ROWS = 64
# An action that is narrower, as a part of the axis, has no number on any screen, nor has any if that were more.
LEAST_NUMBERED, MOST_NUMBERS = 0.006, 2000


def timeline(title: str, lines: Sequence[Sequence[Interval]], chunks: int, end: float, row: str = "rank") -> Markup:
    """A timeline whose axis is `end` seconds long. Of many rows, which are called `row`, the first ones are drawn."""
    shown = lines[:MOST_ROWS]
    paths = [path for number, line in enumerate(shown) for path in _row(line, number, chunks, end)]
    svg = tag(
        "svg",
        *paths,
        viewBox=f"0 0 {WIDTH:g} {ROW * len(shown):g}",
        preserveAspectRatio="none",
        style=f"height:{ROW * len(shown):g}px",
        role="img",
        aria_label=title,
    )
    names = [tag("span", f"{row} {number}", style=f"height:{ROW:g}px") for number in range(len(shown))]
    more = f", the first {MOST_ROWS} of {len(lines)}" if len(lines) > MOST_ROWS else ""
    plot = tag("div", svg, _numbers(shown, end), tag("div", *_axis(end), class_="x"), class_="rows")
    return tag(
        "figure",
        tag("figcaption", tag("b", title), more),
        tag("div", tag("div", *names, class_="ranks"), plot),
        class_="timeline",
    )


def legend(timelines: Sequence[Sequence[Sequence[Interval]]], chunks: int) -> Markup:
    """What the colors and the numbers are."""
    by_shade = grouped(kinds_in(line for lines in timelines for line in lines), COLOURS.__getitem__)
    names = {shade: ", ".join(NAMES[kind] for kind in kinds) for shade, kinds in by_shade.items()}
    keys = [
        tag("span", joined(tag("i", style=f"background:rgb{shade}"), name), class_="key")
        for shade, name in names.items()
    ]
    words = "numbers: microbatch" + ("; lighter: later chunks" if chunks > 1 else "")
    return tag("p", *keys, tag("span", words, class_="key"), class_="legend")


def with_ends(lines: Sequence[Sequence[Interval]], ends: Sequence[float]) -> list[tuple[Interval, ...]]:
    """Timelines of microbatches, each with what follows them once a step: after the last one on all ranks."""
    finished = max((line[-1].end for line in lines if line), default=0.0)
    return [
        (*line, Interval(rank, Action("U", 0, 0), finished, finished + end))
        for rank, (line, end) in enumerate(zip(lines, ends, strict=True))
    ]


def ticks(end: float, count: int = 4) -> Sequence[float]:
    """Round numbers from 0 to `end`: about `count`, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** floor(log10(end / count))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= end / count * 0.999)
    return [number * step for number in range(ceil(end / step + 1e-9))]


def _axis(end: float) -> Iterator[Markup]:
    name, size = unit_of(end)
    for value in ticks(end):
        place = "end" if value > 0.9 * end else None if value else "start"
        yield tag("span", f"{value / size:g} {name}", style=f"left:{100 * value / end:.2f}%", class_=place)


def _row(line: Sequence[Interval], row: int, chunks: int, end: float) -> list[Markup]:
    def path(interval: Interval) -> str:
        start, width = WIDTH * interval.start / end, WIDTH * interval.duration / end
        return f"M{start:.2f} {row * ROW + GAP / 2:g}h{width:.2f}v{ROW - GAP:g}h{-width:.2f}z"

    shades = grouped(computed(line), lambda each: colour(each[0], chunks))
    return [tag("path", d="".join(path(own) for _, own in each), fill=f"rgb{shade}") for shade, each in shades.items()]


def _numbers(lines: Sequence[Sequence[Interval]], end: float) -> Markup | None:
    """The microbatches, as HTML: what is in the SVG is stretched. One that does not fit is not shown."""

    def place(row: int, interval: Interval) -> str:
        left, width = 100 * interval.start / end, 100 * interval.duration / end
        return f"left:{left:.2f}%;top:{ROW * row:g}px;width:{width:.2f}%"

    labels = [
        tag("span", str(action.microbatch), style=place(row, interval))
        for row, line in enumerate(lines)
        for action, interval in computed(line)
        if action.kind in KINDS and interval.duration >= LEAST_NUMBERED * end
    ]
    return tag("div", *labels, class_="numbers", aria_hidden="true") if len(labels) <= MOST_NUMBERS else None
