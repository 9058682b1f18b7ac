"""`partita report RUN -o OUT.html`: a run as one page, for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from partita.cli.command import command, writing
from partita.cli.page.document import document
from partita.cli.page.run import add_run_argument, opened
from partita.cli.source import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run_argument(parser)
    parser.add_argument("-o", "--output", metavar="OUT", help="the page (default: RUN.html, in this directory)")


@command("report", add_arguments, "html", "dashboard")
def run(arguments: argparse.Namespace) -> None:
    """Write the page. Raises UsageError if there is no such run or OUT cannot be written."""
    training_run = opened(arguments.run_dir)
    output = Path(arguments.output or f"{training_run.name}.html")
    shown = printable(str(output))
    with writing(shown):
        output.write_text(document(training_run, live=False), encoding="utf-8")
    print(f"wrote {shown}")
