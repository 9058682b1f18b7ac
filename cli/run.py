"""`partita run FILE`: trains, on this machine by itself or as one rank under torchrun or Slurm."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from partita.cli.command import SUMMARIES, Command, register
from partita.cli.extras import missing
from partita.cli.source import add_python_argument, add_source_arguments, printable
from partita.cli.tolerant import tolerate_output_errors
from partita.cli.training.elastic import Minimum
from partita.cli.training.rank import run_rank
from partita.cli.training.standalone import run_alone
from partita.dsl.advice.report import nearest
from partita.runtime.supervision.identity import rank_from_environment
from partita.runtime.supervision.termination import end_when_asked
from partita.runtime.tracking.tracker import TRACKERS
from partita.runtime.transports.registry import TRANSPORTS, InProcess

STALL_SECONDS = 600.0
TRACKER_NAMES = tuple(TRACKERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    parser.set_defaults(needs="run")
    add_source_arguments(parser)
    add_python_argument(parser)
    parser.add_argument(
        "--run-dir", metavar="DIR", help="directory for metrics.jsonl and checkpoints (default: runs/NAME)"
    )
    parser.add_argument(
        "--transport",
        choices=tuple(TRANSPORTS),
        help="default: nccl where there is a GPU for each rank, else gloo; virtual: all ranks in one process",
    )
    parser.add_argument(
        "--restarts", type=_count, default=0, metavar="N", help="restart all ranks after a failure, up to N times"
    )
    parser.add_argument(
        "--elastic",
        type=Minimum.parsed,
        metavar="min=N",
        help="when ranks are gone for good, go on with the others, if there are N; and with more when they return",
    )
    parser.add_argument(
        "--stall-timeout",
        type=_seconds,
        default=STALL_SECONDS,
        metavar="SECONDS",
        help=f"end a run that makes no progress for this long (default: {STALL_SECONDS:g})",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        metavar="SECONDS",
        help="end this long after Ctrl-C, SIGTERM or SIGUSR1, saved or not (default: as long as saving makes progress)",
    )
    parser.add_argument(
        "--changed-data",
        action="store_true",
        help="resume from a checkpoint even if the data files have changed",
    )
    parser.add_argument(
        "--track",
        type=_trackers,
        default=(),
        metavar="NAME,…",
        help=f"hand the metrics to these as well: {', '.join(TRACKER_NAMES)}",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="DIR", help="record the timeline of up to 20 steps, and draw it there"
    )


def _count(text: str) -> int:
    count = int(text)
    if not 0 <= count <= 1_000:
        raise argparse.ArgumentTypeError("from 0 to 1,000")
    return count


def _trackers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in TRACKER_NAMES:
            near = nearest(name, TRACKER_NAMES)
            help = f"did you mean `{near}`?" if near else f"there are {', '.join(TRACKER_NAMES)}"
            raise argparse.ArgumentTypeError(f"there is no tracker `{printable(name)}`; {help}")
    return names


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 1e6:
        raise argparse.ArgumentTypeError("from 1 to 1,000,000 seconds")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Train. Returns 0; 1 with diagnostics; 2 for wrong usage; 3 if a rank failed; 130 after Ctrl-C, 143 after SIGTERM,
    138 after SIGUSR1.

    A rank of the supervisor returns a status of `partita.runtime.supervision.statuses`.
    """
    end_when_asked()
    try:
        identity = rank_from_environment()
    except ValueError as error:
        print(f"partita: {error}", file=sys.stderr)
        return 2
    for name in arguments.track:
        problem = missing(name, f"--track {name}")
        if problem is not None:
            print(f"partita: {problem}", file=sys.stderr)
            return 2
    asked = arguments.transport
    alone = asked is not None and isinstance(TRANSPORTS[asked], InProcess)
    if alone and (identity is not None or arguments.trace is not None):
        print(
            f"partita: --transport {asked} runs all ranks in one process; start it without a launcher"
            if identity is not None
            else f"partita: --trace needs ranks that run concurrently; --transport {asked} runs them one after another",
            file=sys.stderr,
        )
        return 2
    if arguments.elastic is not None and (alone or arguments.trace is not None):
        other = "--trace" if arguments.trace is not None else f"--transport {asked}"
        print(f"partita: --elastic changes the number of processes, and {other} needs one that stays", file=sys.stderr)
        return 2
    with tolerate_output_errors():
        if identity is not None:
            return run_rank(arguments, identity)

        return run_alone(arguments)


register(
    Command(
        "run",
        SUMMARIES["run"],
        add_arguments,
        run,
        others=("train", "start", "launch", "torchrun"),
    )
)
