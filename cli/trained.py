"""The trained model of a command: `FILE [key=value …] [--run-dir RUN_OR_CHECKPOINT]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from partita.cli.source import add_python_argument, add_source_arguments
from partita.runtime.addresses import place_of


def add_trained_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE, overrides, and where its weights are."""
    parser.set_defaults(needs="run")
    add_source_arguments(parser)
    add_python_argument(parser)
    parser.add_argument(
        "--run-dir",
        "--from",
        dest="place",
        type=place_of,
        metavar="RUN",
        help="a run directory, a directory of checkpoints or a single one, or its address (default: where `partita run "
        "FILE` saves)",
    )
    parser.add_argument(
        "--weights",
        choices=("trained", "ema"),
        default="trained",
        help="those that were trained (default), or the mean that `ema` keeps of them",
    )


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Which data."""
    parser.add_argument(
        "--data",
        type=place_of,
        metavar="DATA",
        help="a .npz with an array for each input, or a file of the kind that FILE trains on, or its address (default: "
        "what FILE evaluates)",
    )


def folder_of(arguments: argparse.Namespace) -> Path:
    """The directory of FILE, to which paths in it are relative."""
    return Path(arguments.file).resolve().parent
