"""A timeline for the terminal, one row per rank, colored by kind and shaded by chunk; and as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from rich.table import Table
from rich.text import Text

from partita.cli.number_format import seconds_text
from partita.cli.pictures.picture import NAMES, colour, computed, labels
from partita.compiler.schedules.forms import json_form as written
from partita.compiler.schedules.schedule import COPIES, Action, Schedule
from partita.compiler.schedules.timeline import Interval, Timeline

# What fills an action after its label, so that kinds differ without colors too.
FILLS = {"F": "─", "B": "-", "W": "~", "BW": "═", "O": "›", "L": "‹"}
IDLE = "·"
# The passes over a vocabulary that all ranks share.
SHARED = {"inputs": "E, G lookup", "outputs": "S, T output"}


def draw(schedule: Schedule, timeline: Timeline, width: int) -> Text:
    """The rows of all ranks in `width` columns.

    A column shows what the rank does in the middle of its time span; an action is labeled with as much of kind, chunk
    and microbatch as fits. Copies to the host's memory and back that take any time have rows of their own below
    their rank's.
    """
    margin = len(f"rank {schedule.ranks - 1} ")
    columns = max(10, width - margin)
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    picture = Text(no_wrap=True)
    rows: list[tuple[str, Sequence[Interval]]] = []
    for rank, line in enumerate(timeline.actions):
        rows.append((f"rank {rank}", line))
        copies = timeline.copies[rank] if timeline.copies else ()
        for kind, name in zip(COPIES, ("  out", "  in"), strict=True):
            own = [each for action, each in computed(copies) if action.kind == kind and each.duration]
            rows += [(name, own)] if own else []
    for name, row in rows:
        picture.append(name.ljust(margin))
        drawn = 0
        for action, interval in computed(row):
            start, end = ceil(interval.start * scale - 0.5), ceil(interval.end * scale - 0.5)
            if start < end:
                picture.append(IDLE * (start - drawn), "dim")
                label = _label(action, interval.rank, schedule, end - start)
                picture.append(label, "black on rgb({},{},{})".format(*colour(action, schedule.chunks)))
                drawn = end
        picture.append(IDLE * (columns - drawn), "dim")
        picture.append("\n")
    return picture


def legend(schedule: Schedule) -> Text:
    """The legend of the picture."""
    kinds = {action.kind for line in schedule.actions for action in line}
    marks = [f"{kind}{FILLS[kind]} {name}" for kind, name in NAMES.items() if kind in kinds]
    numbers = "numbers: microbatch" if schedule.own_chunks == 1 else "numbers: (chunk.)microbatch"
    shared = [text for parts, text in SHARED.items() if getattr(schedule.spread, parts, False)]
    return Text("   ".join((*marks, *shared, f"{IDLE} idle", numbers)), "dim")


def _label(action: Action, rank: int, schedule: Schedule, width: int) -> str:
    """The longest label of the action that fits, if possible with a column between it and the next action."""
    names = labels(action, rank, schedule)
    label = next((name for name in names if len(name) < width), names[-1])
    return label.ljust(width, FILLS[action.kind])


def as_json(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """The object of `schedule --json`, a stable format: numbers of the timeline, the schedule for `from_file`
    (`partita.compiler.schedules.forms.json_form`), and the report of a search.
    """
    result: dict[str, Any] = {
        "bubble": timeline.bubble,
        "makespan": timeline.makespan,
        "peak_live": list(timeline.peak_live),
        **written.as_json(schedule),
    }
    if schedule.search is None:
        return result
    lower_bound = schedule.search.least
    search = {"found": schedule.search.family, "minimize": schedule.search.minimize}
    if schedule.search.minimize != "bubble":
        return {**result, **search, "cost": timeline.makespan, "least_cost": lower_bound}
    bubble = max(0.0, 1 - max(timeline.busy) / lower_bound) if lower_bound else 0.0
    return {**result, **search, "cost": timeline.cost, "least_cost": lower_bound, "least_bubble": bubble}


def rank_table(schedule: Schedule, timeline: Timeline, number: Callable[[float], str] = seconds_text) -> Table:
    """A row for each rank: stages, busy time, idle share of the step, and live activations."""
    table = Table("rank", "stages", box=None)
    for heading in ("busy", "idle", "peak live", "bound"):
        table.add_column(heading, justify="right")
    for rank, stages in enumerate(schedule.placement):
        busy = timeline.busy[rank]
        idle = 1 - busy / timeline.makespan if timeline.makespan else 0.0
        table.add_row(
            str(rank),
            ", ".join(map(str, stages)),
            number(busy),
            f"{idle:.1%}",
            str(timeline.peak_live[rank]),
            str(schedule.bound[rank]),
        )
    return table
