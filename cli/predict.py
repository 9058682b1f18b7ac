"""`partita predict FILE`: the outputs of a trained model, for all rows of some data."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from partita.cli.command import command, writing
from partita.cli.inference import add_data_argument, add_trained_arguments, use
from partita.cli.training.places import folder_of
from partita.dsl.spec import Spec

if TYPE_CHECKING:
    from partita.runtime.inference.ranks import LocalRanks
    from partita.runtime.inference.weights import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. None may be a prefix of one of torchrun's, which would consume it."""
    add_trained_arguments(parser)
    add_data_argument(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.npz", help="the archive to write")
    what = "those to compute, with commas between them (default: all)"
    parser.add_argument("--outputs", default="", metavar="NAMES", help=what)


@command("predict", add_arguments, "infer", "outputs", "apply")
def run(arguments: argparse.Namespace) -> int:
    """Write the outputs. Returns 0, or 3 if a rank failed. Raises Refused, and UsageError if none can be written."""
    return use(arguments, _predict)


def _predict(arguments: argparse.Namespace, spec: Spec, here: LocalRanks | None, say: Report) -> None:
    from partita.runtime.checkpoint.exchange import check_place
    from partita.runtime.data.formats import NPZ
    from partita.runtime.inference.archive import write_archive
    from partita.runtime.inference.predicting import Predictor
    from partita.runtime.inference.rows import data_of
    from partita.runtime.inference.weights import load_weights

    folder, first = folder_of(arguments), here is None or here.first
    names = [name.strip() for name in arguments.outputs.split(",") if name.strip()]
    _, train = spec.trained
    with writing(arguments.output):
        if first:
            check_place(arguments.output, NPZ)  # before everything is computed
        predictor = Predictor(spec, names, arguments.allow_python, here)
        dataset, count = data_of(spec, folder, arguments.data).opened(train, predictor.inputs, arguments.allow_python)
        read = load_weights(spec, folder, predictor.outputs.ranks, say, arguments.place, arguments.weights)
        outputs = predictor.of_data(dataset, count)
        if not first:
            return
        write_archive(arguments.output, outputs)
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in outputs.items())
    print(f"{arguments.output}: {shapes}, from {read.path}")
