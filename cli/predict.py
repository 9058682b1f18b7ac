"""`partita predict FILE`: the outputs of a trained model, for all rows of some data."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from partita.cli.command import SUMMARIES, Command, register
from partita.cli.inference import add_transport_argument, use
from partita.cli.trained import add_data_argument, add_trained_arguments, folder_of
from partita.dsl.spec import Spec

if TYPE_CHECKING:
    from partita.runtime.inference.ranks import Here
    from partita.runtime.inference.weights import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    add_trained_arguments(parser)
    add_transport_argument(parser)
    add_data_argument(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.npz", help="the archive to write")
    parser.add_argument(
        "--outputs", default="", metavar="NAMES", help="those to compute, with commas between them (default: all)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the outputs. Returns 0; 1 with diagnostics; 2 if nothing can be written, or for wrong usage; 3 if a rank
    failed.
    """
    return use(arguments, _predict)


def _predict(arguments: argparse.Namespace, given: Spec, here: Here | None, say: Report) -> int:
    from partita.runtime.checkpoint.exchange import check_place
    from partita.runtime.data.formats import NPZ
    from partita.runtime.inference.archive import write_archive
    from partita.runtime.inference.predicting import Predictor
    from partita.runtime.inference.rows import data_of
    from partita.runtime.inference.weights import load_weights

    folder, first = folder_of(arguments), here is None or here.first
    names = [name.strip() for name in arguments.outputs.split(",") if name.strip()]
    _, train = given.trained
    try:
        if first:
            check_place(arguments.output, NPZ)  # before everything is computed
        predictor = Predictor(given, names, arguments.allow_python, here)
        dataset, count = data_of(given, folder, arguments.data).opened(train, predictor.inputs)
        read = load_weights(given, folder, predictor.outputs.ranks, say, arguments.place, arguments.weights)
        found = predictor.of_data(dataset, count)
        if not first:
            return 0
        write_archive(arguments.output, found)
    except OSError as error:
        print(f"partita: cannot write {arguments.output}: {error.strerror}", file=sys.stderr)
        return 2
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items())
    print(f"{arguments.output}: {shapes}, from {read.path}")
    return 0


register(Command("predict", SUMMARIES["predict"], add_arguments, run, others=("infer", "outputs", "apply")))
