"""`partita run FILE`: trains, on this machine by itself or as one rank under torchrun or Slurm."""

from __future__ import annotations

import argparse
from pathlib import Path

from partita.cli.command import UsageError, command, status_of
from partita.cli.extras import missing
from partita.cli.source import add_python_argument, add_source_arguments, printable
from partita.cli.streams import tolerate_output_errors
from partita.cli.training.elastic import minimum_ranks
from partita.cli.training.rank import run_rank
from partita.cli.training.standalone import run_alone
from partita.dsl.advice.report import nearest
from partita.runtime.supervision.identity import rank_from_environment
from partita.runtime.supervision.termination import end_when_asked
from partita.runtime.tracking.tracker import TRACKERS
from partita.runtime.transports.registry import TRANSPORTS, InProcess

STALL_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    parser.set_defaults(needs="run")
    add_source_arguments(parser)
    add_python_argument(parser)
    option = parser.add_argument
    option("--run-dir", metavar="DIR", help="directory for metrics.jsonl and checkpoints (default: runs/NAME)")
    what = "default: nccl where there is a GPU for each rank, else gloo; virtual: all ranks in one process"
    option("--transport", choices=tuple(TRANSPORTS), help=what)
    what = "restart all ranks after a failure, up to N times"
    option("--restarts", type=_count, default=0, metavar="N", help=what)
    what = "when ranks are gone for good, go on with the others, if there are N; and with more when they return"
    option("--elastic", type=minimum_ranks, metavar="min=N", help=what)
    what = f"end a run that makes no progress for this long (default: {STALL_SECONDS:g})"
    option("--stall-timeout", type=_seconds, default=STALL_SECONDS, metavar="SECONDS", help=what)
    what = "end this long after Ctrl-C, SIGTERM or SIGUSR1, saved or not (default: as long as saving makes progress)"
    option("--grace", type=_seconds, metavar="SECONDS", help=what)
    option("--changed-data", action="store_true", help="resume from a checkpoint even if the data files have changed")
    what = f"hand the metrics to these as well: {', '.join(TRACKERS)}"
    option("--track", type=_trackers, default=(), metavar="NAME,…", help=what)
    option("--trace", type=Path, metavar="DIR", help="record the timeline of up to 20 steps, and draw it there")


def _count(text: str) -> int:
    count = int(text)
    if not 0 <= count <= 1_000:
        raise argparse.ArgumentTypeError("from 0 to 1,000")
    return count


def _trackers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in TRACKERS:
            near = nearest(name, TRACKERS)
            help = f"did you mean `{near}`?" if near else f"there are {', '.join(TRACKERS)}"
            raise argparse.ArgumentTypeError(f"there is no tracker `{printable(name)}`; {help}")
    return names


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 1e6:
        raise argparse.ArgumentTypeError("from 1 to 1,000,000 seconds")
    return seconds


@command("run", add_arguments, "train", "start", "launch", "torchrun")
def run(arguments: argparse.Namespace) -> int:
    """Train. Returns 0; 1 with diagnostics; 2 for wrong usage; 3 if a rank failed; 130 after Ctrl-C, 143 after SIGTERM,
    138 after SIGUSR1. Raises UsageError.

    A rank of the supervisor returns a status of `partita.runtime.supervision.statuses`.
    """
    end_when_asked()
    try:
        identity = rank_from_environment()
    except ValueError as error:
        raise UsageError(str(error)) from error
    for name in arguments.track:
        problem = missing(name, f"--track {name}")
        if problem is not None:
            raise UsageError(problem)
    transport, traced = arguments.transport, arguments.trace is not None
    in_process = transport is not None and isinstance(TRANSPORTS[transport], InProcess)
    if in_process and identity is not None:
        raise UsageError(f"--transport {transport} runs all ranks in one process; start it without a launcher")
    if in_process and traced:
        raise UsageError(
            f"--trace needs ranks that run concurrently; --transport {transport} runs them one after another"
        )
    if arguments.elastic is not None and (in_process or traced):
        other = "--trace" if traced else f"--transport {transport}"
        raise UsageError(f"--elastic changes the number of processes, and {other} needs one that stays")
    with tolerate_output_errors():
        return status_of(lambda: run_alone(arguments) if identity is None else run_rank(arguments, identity))
