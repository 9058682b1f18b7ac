"""`partita schedule FILE`: the predicted timeline of one step, its bubble, and live activations by rank; of a program,
or of a schedule without one (`partita.cli.standalone_schedule`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from partita.cli import standalone_schedule
from partita.cli.command import command
from partita.cli.number_format import microbatches_text, plain_text, queues_text, seconds_text
from partita.cli.output import add_output, deliver, json_text, text_of
from partita.cli.pictures import Picture, check_drawable, save
from partita.cli.source import add_source_arguments, load_file
from partita.compiler.analysis.time import predict
from partita.compiler.pipeline import compile_spec
from partita.compiler.schedules.forms import WRITERS
from partita.compiler.schedules.hardware_queues import queues

if TYPE_CHECKING:
    from rich.console import Console

    from partita.compiler.schedules.schedule import Schedule
    from partita.compiler.schedules.timeline import Timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_source_arguments(parser)
    what = "to a file: .svg, .png, .json for a Chrome trace, .sched, or torch's .csv"
    add_output(parser, "bubble, makespan, peak_live and actions", what)
    standalone_schedule.add_arguments(parser)


@command("schedule", add_arguments)
def run(arguments: argparse.Namespace) -> None:
    """Compile, simulate and print. Raises UsageError for incompatible options, or if OUT cannot be written."""
    if arguments.output is not None and not arguments.json and Path(arguments.output).suffix not in WRITERS:
        check_drawable(Path(arguments.output))
    if standalone_schedule.requested(arguments):
        return present(arguments, *standalone_schedule.build_schedule(arguments), number=plain_text)
    state = compile_spec(load_file(arguments))
    prediction = predict(state, exposed=False)
    needed = queues([rank.instructions for rank in state.plan.ranks])
    present(arguments, state.schedule, prediction.timeline, needed, step=prediction.step_time)


def present(
    arguments: argparse.Namespace,
    schedule: Schedule,
    timeline: Timeline,
    needed: int,
    number: Callable[[float], str] = seconds_text,
    step: float | None = None,
) -> None:
    """Print a timeline and the table of ranks, at the width of the console, or write it to a file, in the requested
    form. Raises UsageError if it cannot be written.

    `needed` are the queues of a GPU that the schedule needs; `number` formats times; `step` is the time of a program's
    full step, including reductions and the update.
    """
    if arguments.json:
        from partita.cli.pictures.terminal import as_json

        whole = {"queues": needed} if step is None else {"queues": needed, "step_time": step}
        deliver(json_text(as_json(schedule, timeline) | whole), arguments.output)
    elif arguments.output is None:
        from partita.cli.pictures.terminal import draw, legend, rank_table

        def show(console: Console) -> None:
            name, rest = headline(schedule, timeline, number, step).split(":", 1)
            console.print(f"[bold]{name}[/]:{rest}\n")
            console.print(draw(schedule, timeline, console.width))
            console.print(legend(schedule))
            console.print(rank_table(schedule, timeline, number))
            if schedule.ranks > 1:
                console.print(f"on GPUs {queues_text(needed)}")

        deliver(text_of(show))
    elif (write := WRITERS.get(Path(arguments.output).suffix)) is not None:
        deliver(write(schedule), arguments.output)
    else:
        title = headline(schedule, timeline, number, step)
        save([Picture(title, timeline, schedule, timed=number is seconds_text)], Path(arguments.output))


def headline(
    schedule: Schedule,
    timeline: Timeline,
    number: Callable[[float], str] = seconds_text,
    step: float | None = None,
) -> str:
    """`one_f_one_b: 4 ranks, 8 microbatches; step 95.5 ms (microbatches 92.8 ms), bubble 25.9%`."""
    chunks = f" × {schedule.own_chunks} chunks" if schedule.own_chunks > 1 else ""
    whole = number(timeline.makespan)
    if step is not None:
        whole = f"{number(step)} (microbatches {whole})"
    bound_text = ""
    if schedule.search is not None:
        what, cost = ("cost", timeline.cost) if schedule.search.minimize == "bubble" else ("whole", timeline.makespan)
        bound = schedule.search.least
        above = f"+{max(0.0, cost / bound - 1):.1%}" if bound else ""
        cheaper = "" if above in ("", "+0.0%") else "; a cheaper order may exist"
        bound_text = f"; {what} {number(cost)}, lower bound {number(bound)}{above and f' ({above}{cheaper})'}"
    return (
        f"{schedule.name}: {schedule.ranks} rank{'s' * (schedule.ranks > 1)}{chunks}, "
        f"{microbatches_text(schedule.microbatches, schedule.slices)}; "
        f"step {whole}, bubble {timeline.bubble:.1%}{bound_text}"
    )
