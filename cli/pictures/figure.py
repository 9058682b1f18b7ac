"""A timeline as SVG or PNG: a row for each rank, with its actions above, its copies to the host's memory and back, if
there are any, and its live activations below.

The rectangles of one color in a row are one path, so that a picture of tens of thousands is drawn in a second or two.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path

from partita.cli.number_format import unit_of
from partita.cli.pictures.picture import COLOURS, NAMES, Picture, colour, computed, kinds_in
from partita.compiler.schedules.schedule import LOAD, OFFLOAD
from partita.compiler.schedules.timeline import Interval

WIDTH, MARGIN = 14.0, 0.9  # inches: of a picture, and of both its sides together
POINTS = 72.0  # per inch
LETTER = 0.62  # the width of a letter or digit, relative to the font size
LIVE = (120, 90, 170)
# Text is kept as text, and identifiers use a fixed salt, so that equal timelines give equal files.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "partita",
    "font.size": 8.0,
    "font.sans-serif": ["DejaVu Sans"],  # and any other, if it is missing: named again with each text
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}
# The vertical extent of actions and of live activations within a row of height 1, which grows downwards; and of copies
# in each direction, where a picture has any.
ACTIONS, ACTIVATIONS = (0.06, 0.66), (0.70, 0.94)
WITH_COPIES = {"": (0.06, 0.46), OFFLOAD: (0.48, 0.57), LOAD: (0.58, 0.67)}


def svg(pictures: Sequence[Picture]) -> bytes:
    """The pictures as SVG."""
    return _drawn(pictures, format="svg", metadata={"Date": None})


def png(pictures: Sequence[Picture]) -> bytes:
    """The pictures as PNG."""
    return _drawn(pictures, format="png", dpi=150, metadata={"Software": None})


def _drawn(pictures: Sequence[Picture], **options: Any) -> bytes:
    rows = [len(picture.timeline.actions) for picture in pictures]
    row = 0.36 if sum(rows) <= 32 else 0.26  # inches
    row *= 1.4 if any(picture.timeline.copies for picture in pictures) else 1.0
    heights = [row * count for count in rows]
    above, between, below = 0.35, 0.65, 0.65
    height = above + sum(heights) + between * (len(rows) - 1) + below
    end = max(picture.timeline.makespan for picture in pictures)
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        top = height - above
        for picture, own in zip(pictures, heights, strict=True):
            left, width = 0.7 * MARGIN / WIDTH, 1 - 1.4 * MARGIN / WIDTH
            axes = figure.add_axes((left, (top - own) / height, width, own / height))
            _panel(axes, picture, end, row)
            top -= own + between
        figure.legend(handles=_legend(pictures), loc="lower center", ncols=10, frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, **options)
    return buffer.getvalue()


def _panel(axes: Axes, picture: Picture, end: float, row: float) -> None:
    """Draw a picture; `end` is the end of its time axis in seconds, `row` the height of a row in inches."""
    unit, size = unit_of(end) if picture.timed else ("", 1.0)
    factor = 1 / size
    timeline = picture.timeline
    axes.set_xlim(0.0, end * factor or 1.0)
    axes.set_ylim(len(timeline.actions), 0)
    axes.set_title(" ".join(filter(None, (picture.title, picture.name))), loc="left")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g} {unit}".rstrip())
    axes.set_yticks(np.arange(len(timeline.actions)) + 0.36, [f"rank {rank}" for rank in range(len(timeline.actions))])
    axes.tick_params(axis="y", length=0)
    points = POINTS * (WIDTH - 1.4 * MARGIN) / end if end else 0.0  # per second
    border = min(0.5, 0.05 * points * _shortest(timeline.actions))
    letters = min(7.0, POINTS * row * 0.4)
    peak = max(timeline.peak_live, default=0)
    bands = WITH_COPIES if timeline.copies else {"": ACTIONS}
    for rank, line in enumerate(timeline.actions):
        shades: dict[tuple[tuple[int, int, int], tuple[float, float]], list[Interval]] = {}
        for action, interval in computed(timeline.copies[rank] if timeline.copies else ()):
            shades.setdefault((colour(action, picture.schedule.chunks), bands[action.kind]), []).append(interval)
        for action, interval in computed(line):
            shades.setdefault((colour(action, picture.schedule.chunks), bands[""]), []).append(interval)
            fits = interval.duration * points / (LETTER * letters)
            text = next((each for each in picture.labels(interval) if len(each) + 0.5 < fits), None)
            if text is not None:
                middle = (interval.start + interval.end) / 2 * factor
                axes.text(middle, rank + sum(bands[""]) / 2, text, size=letters, ha="center", va="center_baseline")
        for (shade, band), intervals in shades.items():
            _fill(axes, _rectangles(intervals, rank, factor, band), shade, edgecolors="white", linewidths=border)
        if peak:
            _fill(axes, _steps(timeline.live(rank), rank, peak, factor), LIVE, linewidths=0)
            text = str(timeline.peak_live[rank])
            axes.text(1.004, rank + sum(ACTIVATIONS) / 2, text, transform=axes.get_yaxis_transform(), va="center")


def _rectangles(intervals: Sequence[Interval], rank: int, factor: float, band: tuple[float, float]) -> Path:
    """One path around all intervals, in a part of the row's height."""
    top, bottom = (rank + each for each in band)
    starts, ends = np.array([[each.start, each.end] for each in intervals]).T * factor
    x = np.stack([starts, ends, ends, starts, starts], axis=1)
    y = np.broadcast_to([top, top, bottom, bottom, top], x.shape)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(np.stack([x, y], axis=2).reshape(-1, 2), np.tile(codes, len(x)))


def _steps(counts: Sequence[tuple[float, int]], rank: int, peak: int, factor: float) -> Path:
    """The area under a count, which is constant between times."""
    top, bottom = (rank + each for each in ACTIVATIONS)
    times, heights = np.array(counts).T
    x = np.repeat(times * factor, 2)[1:]
    y = bottom - (bottom - top) * np.repeat(heights / peak, 2)[:-1]
    corners = np.array([[x[-1], bottom], [x[0], bottom]])
    return Path(np.concatenate([np.stack([x, y], axis=1), corners]), closed=False)


def _fill(axes: Axes, path: Path, shade: Iterable[int], **options: Any) -> None:
    axes.add_collection(
        PathCollection([path], facecolors=[tuple(part / 255 for part in shade)], **options), autolim=False
    )


def _shortest(lines: Sequence[Sequence[Interval]]) -> float:
    """The first decile of all durations: borders must not cover actions of that length."""
    durations = sorted(interval.duration for line in lines for interval in line)
    return durations[len(durations) // 10] if durations else 0.0


def _legend(pictures: Sequence[Picture]) -> list[Patch]:
    lines = [line for p in pictures for line in (*p.timeline.actions, *p.timeline.copies)]
    marks = [(COLOURS[kind], f"{kind} {NAMES[kind]}") for kind in kinds_in(lines)]
    if any(max(picture.timeline.peak_live, default=0) for picture in pictures):
        marks.append((LIVE, "live activations, their peak at the right"))
    return [Patch(color=(r / 255, g / 255, b / 255), label=text) for (r, g, b), text in marks]
