"""`partita init NAME`: writes a file to start from, for users without a checkout of Partita."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path

from partita.cli.command import SUMMARIES, Command, register
from partita.cli.source import printable

START = "start.par"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("name", metavar="NAME", help="the name of the file, with or without `.par`")


def run(arguments: argparse.Namespace) -> int:
    """Write the file. Returns 0, or 2 if it exists or cannot be written."""
    path = Path(arguments.name)
    if not path.name.removesuffix(".par").strip("."):
        print("partita: missing file name: `partita init NAME`", file=sys.stderr)
        return 2
    path = path.with_name(f"{path.name.removesuffix('.par')}.par")
    shown = printable(str(path))
    text = files("partita.specs").joinpath(START).read_text(encoding="utf-8").replace(START, path.name)
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        print(f"partita: {shown} already exists, and is left unchanged", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        print(f"partita: cannot write {shown}: {reason}", file=sys.stderr)
        return 2
    print(f"wrote {shown}; `partita run {shown}` trains it on two processes of this machine")
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
