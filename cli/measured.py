"""The output of `partita run --trace DIR`: pictures of the times recorded there by the ranks, and a summary line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from partita.cli.command import status_of
from partita.cli.number_format import seconds_text
from partita.cli.pictures import Picture, save

if TYPE_CHECKING:
    from partita.compiler.program import Program
    from partita.compiler.schedules.timeline import Timeline

TRACE, PICTURE = "trace.json", "timeline.svg"


def forget(directory: Path, program: Program) -> None:
    """Remove the files of an earlier run, so that they are not taken for new ones."""
    from partita.runtime.tracing.stopwatch import path_of

    for name in (TRACE, PICTURE):
        (directory / name).unlink(missing_ok=True)
    for rank in range(program.mesh.ranks):
        path_of(directory, rank).unlink(missing_ok=True)


def draw(directory: Path, program: Program) -> None:
    """Write the trace and the picture of a measured run, and print the measured and the simulated step time."""
    from partita.runtime.tracing.measurement import measure
    from partita.runtime.tracing.stopwatch import Marks, path_of

    paths = [path_of(directory, rank) for rank in range(program.mesh.ranks)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        print(f"partita: cannot draw the trace: {directory} has no {missing[0]}{more}", file=sys.stderr)
        return
    trace = measure(program, [Marks.read(path) for path in paths])
    typical = trace.typical

    def picture_of(title: str, timeline: Timeline, name: str = "", start: float = 0.0) -> Picture:
        return Picture(title, timeline, program.schedule, name, start, mesh=program.mesh)

    title = f"simulated from its action costs: {seconds_text(trace.simulated.makespan)}"
    simulated = picture_of(title, trace.simulated, start=typical.start)
    steps = (picture_of("measured", each.timeline, f"step {each.number}", each.start) for each in trace.steps)
    above = picture_of(f"measured: {seconds_text(typical.timeline.makespan)}", typical.timeline)
    # What cannot be written is said, and ends nothing.
    status_of(lambda: save([*steps, simulated], directory / TRACE))
    status_of(lambda: save([above, simulated], directory / PICTURE))
    print(
        f"measured step {seconds_text(trace.seconds)} (median of {len(trace.steps)}), simulated from its action costs "
        f"{seconds_text(trace.simulated.makespan)} ({trace.difference:+.1%}); {directory / TRACE}"
    )
