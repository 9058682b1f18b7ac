"""What all formats show of a timeline, and in which colors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import field, frozen

from partita.compiler.mesh import Mesh
from partita.compiler.schedules.schedule import COPIES, KINDS, Action, Schedule
from partita.compiler.schedules.timeline import Interval, Timeline

# The colors of kinds, as (red, green, blue); later chunks are lighter. P, R, S and U occur in measured steps only.
COLOURS = {
    "F": (70, 130, 220),
    "B": (60, 170, 120),
    "W": (215, 145, 60),
    "BW": (60, 170, 120),
    "O": (190, 110, 170),
    "L": (120, 120, 200),
    "P": (150, 150, 150),
    "R": (150, 150, 150),
    "S": (150, 150, 150),
    "U": (150, 150, 150),
}
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
    lighter = 0.6 * action.chunk / max(1, chunks - 1)
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


def computed(line: Sequence[Interval]) -> Iterator[tuple[Action, Interval]]:
    """Yields the actions of a rank, with their times."""
    for interval in line:
        assert isinstance(interval.work, Action)
        yield interval.work, interval
