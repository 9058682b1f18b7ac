"""The timeline of a step as SVG: a row for each rank, one path for all actions of a color."""

from __future__ import annotations

from collections.abc import Sequence

from partita.cli.number_format import seconds_text
from partita.cli.page.chart import ticks
from partita.cli.page.markup import Markup, joined, tag
from partita.cli.pictures.picture import COLOURS, NAMES, colour, computed
from partita.compiler.schedules.schedule import Action
from partita.compiler.schedules.timeline import Interval

WIDTH, ROW, GAP = 1000.0, 20.0, 3.0
MOST_ROWS = 64


def timeline(title: str, lines: Sequence[Sequence[Interval]], chunks: int, end: float) -> Markup:
    """A timeline whose axis is `end` seconds long. Of many ranks the first ones are drawn."""
    shown = lines[:MOST_ROWS]
    paths = [path for row, line in enumerate(shown) for path in _row(line, row, chunks, end)]
    svg = tag(
        "svg",
        *paths,
        viewBox=f"0 0 {WIDTH:g} {ROW * len(shown):g}",
        preserveAspectRatio="none",
        style=f"height:{ROW * len(shown):g}px",
        role="img",
        aria_label=title,
    )
    ranks = [tag("span", f"rank {rank}", style=f"height:{ROW:g}px") for rank in range(len(shown))]
    axis = [
        tag(
            "span",
            seconds_text(value) if value else "0",
            style=f"left:{100 * value / end:.2f}%",
            class_="end" if value > 0.9 * end else None,
        )
        for value in ticks(0.0, end, 4)
    ]
    more = f", the first {MOST_ROWS} of {len(lines)} ranks" if len(lines) > MOST_ROWS else ""
    return tag(
        "figure",
        tag("figcaption", tag("b", title), more),
        tag("div", tag("div", *ranks, class_="ranks"), tag("div", svg, tag("div", *axis, class_="x"), class_="rows")),
        class_="timeline",
    )


def legend(timelines: Sequence[Sequence[Sequence[Interval]]]) -> Markup:
    """What the colors are."""
    kinds = {action.kind for lines in timelines for line in lines for action, _ in computed(line)}
    found: dict[tuple[int, int, int], list[str]] = {}
    for kind, name in NAMES.items():
        if kind in kinds:
            found.setdefault(COLOURS[kind], []).append(name)
    keys = [
        tag("span", joined(tag("i", style=f"background:rgb{shade}"), ", ".join(names)), class_="key")
        for shade, names in found.items()
    ]
    return tag("p", *keys, class_="legend")


def with_ends(lines: Sequence[Sequence[Interval]], ends: Sequence[float]) -> list[tuple[Interval, ...]]:
    """Timelines of microbatches, each with what follows them once a step: after the last one on all ranks."""
    finished = max((line[-1].end for line in lines if line), default=0.0)
    return [
        (*line, Interval(rank, Action("U", 0, 0), finished, finished + end))
        for rank, (line, end) in enumerate(zip(lines, ends, strict=True))
    ]


def _row(line: Sequence[Interval], row: int, chunks: int, end: float) -> list[Markup]:
    shades: dict[tuple[int, int, int], list[str]] = {}
    top, height = row * ROW + GAP / 2, ROW - GAP
    for action, interval in computed(line):
        start, width = WIDTH * interval.start / end, WIDTH * interval.duration / end
        path = f"M{start:.2f} {top:g}h{width:.2f}v{height:g}h{-width:.2f}z"
        shades.setdefault(colour(action, chunks), []).append(path)
    return [tag("path", d="".join(paths), fill=f"rgb{shade}") for shade, paths in shades.items()]
