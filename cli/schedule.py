"""`partita schedule FILE`: the predicted timeline of one step, its bubble, and live activations by rank."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from partita.cli.source import add_source_arguments, compile_or_report

if TYPE_CHECKING:
    from rich.console import Console

    from partita.compiler.schedules.schedule import Schedule
    from partita.compiler.timeline import Timeline

SUMMARY = "show the timeline of one step: bubble, makespan, peak live activations by rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_source_arguments(parser)
    parser.add_argument("--json", action="store_true", help="bubble, makespan, peak_live and actions as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Compile, simulate and print. 0, or 1 with diagnostics."""
    state = compile_or_report(arguments)
    if state is None:
        return 1
    from partita.compiler.summary import timeline

    assert state.schedule is not None
    predicted = timeline(state)
    if arguments.json:
        from partita.cli.timeline import as_json

        print(json.dumps(as_json(state.schedule, predicted), indent=2))
    else:
        from rich.console import Console

        colour = sys.stdout.isatty()
        show(state.schedule, predicted, Console(width=None if colour else 110, highlight=False))
    return 0


def show(schedule: Schedule, timeline: Timeline, console: Console) -> None:
    """Print the timeline and the table of ranks, as wide as the console."""
    from partita.cli.figures import seconds_text
    from partita.cli.timeline import draw, legend, rank_table

    chunks = f" × {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    console.print(
        f"[bold]{schedule.name}[/]: {schedule.ranks} rank{'s' * (schedule.ranks > 1)}{chunks}, "
        f"{schedule.microbatches} microbatch{'es' * (schedule.microbatches > 1)}; "
        f"step {seconds_text(timeline.makespan)}, bubble {timeline.bubble:.1%}\n"
    )
    console.print(draw(schedule, timeline, console.width))
    console.print(legend(schedule))
    console.print(rank_table(schedule, timeline))
