"""`partita init NAME`: writes a file to start from, for users without a checkout of Partita.

`partita init CONFIG.json` writes the model of a config of Hugging Face.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.resources import files
from pathlib import Path

from partita.cli.command import SUMMARIES, Command, register
from partita.cli.families import from_config
from partita.cli.source import printable, report
from partita.dsl.diagnostic import Refused

START = "start.par"
CONFIG = "config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    what = (
        "the name of the file, with or without `.par`; or a config.json of Hugging Face, or the directory that has it"
    )
    parser.add_argument("name", metavar="NAME", help=what)
    what = "the file to write from a config (default: its `model_type` and `.par`)"
    parser.add_argument("-o", "--output", metavar="OUT", help=what)
    what = "settings of a config that are to be left out, separated by commas"
    parser.add_argument("--ignore", metavar="KEY,…", type=lambda text: text.split(","), default=[], help=what)


def run(arguments: argparse.Namespace) -> int:
    """Write the file. Returns 0; 1 if a config cannot be said; or 2 if the file exists or cannot be written."""
    given = Path(arguments.name)
    inside = os.path.join(arguments.name, CONFIG)
    config = Path(inside) if os.path.isfile(inside) else given if given.suffix == ".json" else None
    if config is None and (arguments.output is not None or arguments.ignore):
        print("partita: --output and --ignore are for a config.json: `partita init CONFIG.json`", file=sys.stderr)
        return 2
    if config is None:
        return _write(given, files("partita.specs").joinpath(START).read_text(encoding="utf-8"), START)
    try:
        kind, text = from_config(config, tuple(arguments.ignore))
    except Refused as refused:
        report(refused.diagnostics)
        return 1
    return _write(Path(arguments.output or kind), text)


def _write(path: Path, text: str, name: str | None = None) -> int:
    """Write a text, in which the file is called `name`."""
    if not path.name.removesuffix(".par").strip("."):
        print("partita: missing file name: `partita init NAME`", file=sys.stderr)
        return 2
    path = path.with_name(f"{path.name.removesuffix('.par')}.par")
    shown = printable(str(path))
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text.replace(name, path.name) if name else text)
    except FileExistsError:
        print(f"partita: {shown} already exists, and is left unchanged", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"partita: cannot write {shown}: {reason}", file=sys.stderr)
        return 2
    if name:
        print(f"wrote {shown}; `partita run {shown}` trains it on two processes of this machine")
    else:
        print(f"wrote {shown}; `partita checkpoint import DIR TENSORS {shown} --as hf` reads its weights")
    return 0


register(
    Command(
        "init",
        SUMMARIES["init"],
        add_arguments,
        run,
        others=("new", "create"),
    )
)
