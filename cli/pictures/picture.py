"""What all formats show of a timeline, and in which colors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attrs import field, frozen

from partita.compiler.mesh import Mesh
from partita.compiler.schedules.schedule import COPIES, KINDS, Action, Schedule
from partita.compiler.schedules.timeline import Interval, Timeline

# The colors of kinds, as (red, green, blue); later chunks are lighter. P, R, S and U occur in measured steps only.
# Whatever colors somebody does not see, they differ, and black text on them can be read.
COLOURS = {
    "F": (95, 148, 238),
    "B": (233, 196, 40),
    "W": (236, 80, 30),
    "BW": (108, 220, 178),
    "O": (161, 97, 138),
    "L": (137, 88, 245),
    "P": (155, 155, 155),
    "R": (155, 155, 155),
    "S": (155, 155, 155),
    "U": (155, 155, 155),
}
LIGHTEST = 0.5  # how much of what is missing to white the last chunk has
NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "BW": "full backward",
    "O": "to the host",
    "L": "from the host",
    "P": "batch and prologue",
    "R": "reductions",
    "S": "statistics",
    "U": "update",
}


@frozen
class Picture:
    """One timeline. `title` says where it comes from (`measured`), `name` which part of that it is (`step 12`); it
    begins `start` seconds after the first one of its title. Unless `timed`, times are in a unit of the user's own.

    A row is a rank of the `mesh`, if there is one, else a rank of the pipeline, which the schedule speaks of.
    """

    title: str
    timeline: Timeline = field(repr=False)
    schedule: Schedule
    name: str = ""
    start: float = 0.0
    timed: bool = True
    mesh: Mesh | None = None

    def labels(self, interval: Interval) -> tuple[str, ...]:
        """The labels for an action of a row, longest first."""
        assert isinstance(interval.work, Action)
        rank = interval.rank if self.mesh is None else self.mesh.pipe_rank(interval.rank)
        return labels(interval.work, rank, self.schedule)


def colour(action: Action, chunks: int) -> tuple[int, int, int]:
    """Red, green and blue, from 0 to 255."""
    lighter = LIGHTEST * action.chunk / max(1, chunks - 1)
    red, green, blue = (round(part + (255 - part) * lighter) for part in COLOURS[action.kind])
    return red, green, blue


def labels(action: Action, rank: int, schedule: Schedule) -> tuple[str, ...]:
    """The labels for an action of a pipeline rank, longest first: `F0.3`, `F3`, `3`, `F`; of a pass over a shared
    vocabulary `S3`, `S`.
    """
    if action.kind not in (*KINDS, *COPIES):
        return (action.kind,)
    shared = schedule.passes(rank, action) if action.kind in KINDS else ""
    short = (f"{shared or action.kind}{action.microbatch}", *(() if shared else (str(action.microbatch),)))
    full = (str(action), *short) if schedule.own_chunks > 1 and not shared else short
    return (*full, (shared or action.kind)[0])


def kinds_in(lines: Iterable[Sequence[Interval]]) -> list[str]:
    """The kinds of actions in some rows, in the order of `NAMES`."""
    kinds = {action.kind for line in lines for action, _ in computed(line)}
    return [kind for kind in NAMES if kind in kinds]


def computed(line: Sequence[Interval]) -> Iterator[tuple[Action, Interval]]:
    """Yields the actions of a rank, with their times."""
    for interval in line:
        assert isinstance(interval.work, Action)
        yield interval.work, interval
