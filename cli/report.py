"""`partita report RUN -o OUT.html`: a run as one page, for a browser."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from partita.cli.command import SUMMARIES, Command, register
from partita.cli.page.document import document
from partita.cli.page.opened import add_run_argument, opened
from partita.cli.source import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run_argument(parser)
    parser.add_argument("-o", "--output", metavar="OUT", help="the page (default: RUN.html, in this directory)")


def run(arguments: argparse.Namespace) -> int:
    """Write the page. Returns 0, or 2 if there is no such run or OUT cannot be written."""
    found = opened(arguments.run_dir)
    if found is None:
        return 2
    output = Path(arguments.output or f"{found.name}.html")
    try:
        output.write_text(document(found, live=False), encoding="utf-8")
    except OSError as error:
        print(f"partita: cannot write {printable(str(output))}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"wrote {printable(str(output))}")
    return 0


register(
    Command(
        "report",
        SUMMARIES["report"],
        add_arguments,
        run,
        others=("html", "dashboard"),
    )
)
