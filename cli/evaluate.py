"""`partita evaluate FILE`: loss and metrics of a trained model on a whole data set."""

from __future__ import annotations

import argparse
import json

from partita.cli.command import SUMMARIES, Command, register
from partita.cli.source import load_or_report, report, say
from partita.cli.trained import add_data_argument, add_trained_arguments, folder_of
from partita.dsl.diagnostic import Refused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    add_trained_arguments(parser)
    add_data_argument(parser)
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print loss and metrics. Returns 0; 1 with diagnostics."""
    given = load_or_report(arguments)
    if given is None:
        return 1
    from partita.runtime.inference.evaluating import evaluated
    from partita.runtime.inference.rows import data_of

    folder, python = folder_of(arguments), arguments.allow_python
    try:
        data = data_of(given, folder, arguments.data)
        found = evaluated(given, folder, data, say, arguments.place, python, arguments.weights)
    except Refused as refused:
        report(refused.diagnostics)
        return 1
    if arguments.json:
        numbers = {"loss": found.loss, **found.metrics}
        print(json.dumps({"rows": found.rows, "checkpoint": str(found.checkpoint), "numbers": numbers}, indent=2))
        return 0
    numbers_text = "  ".join(f"{name} {value:.6g}" for name, value in (("loss", found.loss), *found.metrics.items()))
    rows = f"{found.rows:,} rows, " if found.rows is not None else ""
    print(f"{numbers_text}  ({rows}{found.checkpoint})")
    return 0


register(Command("evaluate", SUMMARIES["evaluate"], add_arguments, run, others=("eval", "test", "score")))
