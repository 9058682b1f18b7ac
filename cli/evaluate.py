"""`partita evaluate FILE`: loss and metrics of a trained model on a whole data set."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from partita.cli.command import SUMMARIES, Command, register
from partita.cli.inference import add_transport_argument, use
from partita.cli.trained import add_data_argument, add_trained_arguments, folder_of
from partita.dsl.spec import Spec
from partita.runtime.telemetry import plain

if TYPE_CHECKING:
    from partita.runtime.inference.ranks import Here
    from partita.runtime.inference.weights import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    add_trained_arguments(parser)
    add_transport_argument(parser)
    add_data_argument(parser)
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print loss and metrics. Returns 0; 1 with diagnostics; 2 for wrong usage; 3 if a rank failed."""
    return use(arguments, _evaluate)


def _evaluate(arguments: argparse.Namespace, given: Spec, here: Here | None, say: Report) -> int:
    from partita.runtime.inference.evaluating import evaluated
    from partita.runtime.inference.rows import data_of

    folder, python = folder_of(arguments), arguments.allow_python
    data = data_of(given, folder, arguments.data)
    found = evaluated(given, folder, data, say, arguments.place, python, arguments.weights, here)
    if here is not None and not here.first:
        return 0
    numbers = {"loss": found.loss, **found.metrics}
    if arguments.json:
        told = {name: plain(value) for name, value in numbers.items()}
        print(json.dumps({"rows": found.rows, "checkpoint": str(found.checkpoint), "numbers": told}, indent=2))
        return 0
    numbers_text = "  ".join(f"{name} {value:.6g}" for name, value in numbers.items())
    rows = f"{found.rows:,} row{'s' if found.rows > 1 else ''}, " if found.rows is not None else ""
    print(f"{numbers_text}  ({rows}{found.checkpoint})")
    return 0


register(Command("evaluate", SUMMARIES["evaluate"], add_arguments, run, others=("eval", "test", "score")))
