"""`partita evaluate FILE`: loss and metrics of a trained model on a whole data set."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from partita.cli.command import command
from partita.cli.inference import add_data_argument, add_trained_arguments, use
from partita.cli.output import add_output, deliver, json_text
from partita.cli.training.places import folder_of
from partita.dsl.spec import Spec
from partita.runtime.telemetry import plain

if TYPE_CHECKING:
    from partita.runtime.inference.ranks import LocalRanks
    from partita.runtime.inference.weights import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    add_trained_arguments(parser)
    add_data_argument(parser)
    add_output(parser, output=None)


@command("evaluate", add_arguments, "eval", "test", "score")
def run(arguments: argparse.Namespace) -> int:
    """Print loss and metrics. Returns 0, or 3 if a rank failed. Raises UsageError and Refused."""
    return use(arguments, _evaluate)


def _evaluate(arguments: argparse.Namespace, spec: Spec, here: LocalRanks | None, say: Report) -> None:
    from partita.runtime.inference.evaluating import evaluated
    from partita.runtime.inference.rows import data_of

    folder, python = folder_of(arguments), arguments.allow_python
    data = data_of(spec, folder, arguments.data)
    evaluation = evaluated(spec, folder, data, say, arguments.place, python, arguments.weights, here)
    if here is not None and not here.first:
        return
    numbers = {"loss": evaluation.loss, **evaluation.metrics}
    if arguments.json:
        plain_numbers = {name: plain(value) for name, value in numbers.items()}
        result = {"rows": evaluation.rows, "checkpoint": str(evaluation.checkpoint), "numbers": plain_numbers}
        return deliver(json_text(result))
    numbers_text = "  ".join(f"{name} {value:.6g}" for name, value in numbers.items())
    rows = f"{evaluation.rows:,} row{'s' if evaluation.rows > 1 else ''}, " if evaluation.rows is not None else ""
    print(f"{numbers_text}  ({rows}{evaluation.checkpoint})")
