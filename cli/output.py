"""Where the result of a command goes: to the terminal, or with `-o OUT` to a file; as text or, with `--json`, JSON."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from partita.cli.command import writing

if TYPE_CHECKING:
    from rich.console import Console

# Columns of output that does not go to a terminal.
WIDTH = 110


def add_output(
    parser: argparse.ArgumentParser,
    result: str = "the same",
    output: str | None = "write to a file instead of the terminal",
) -> None:
    """Adds `--json`, which prints a `result` as JSON, and unless `output` is None `-o OUT`."""
    parser.add_argument("--json", action="store_true", help=f"{result} as JSON")
    if output is not None:
        parser.add_argument("-o", "--output", metavar="OUT", help=output)


def text_of(show: Callable[[Console], None], output: str | None = None) -> str:
    """What `show` prints: with the width and colors of the terminal, or plain in 110 columns."""
    from rich.console import Console

    terminal = output is None and sys.stdout.isatty()
    buffer = io.StringIO()
    show(Console(file=buffer, force_terminal=terminal, width=None if terminal else WIDTH, highlight=False))
    return buffer.getvalue()


def json_text(result: object) -> str:
    """A result as JSON."""
    return json.dumps(result, indent=2) + "\n"


def deliver(text: str, output: str | None = None) -> None:
    """Write a result to OUT, or print it. Raises UsageError if the file cannot be written."""
    if output is None:
        sys.stdout.write(text)
    else:
        with writing(output):
            Path(output).write_text(text, encoding="utf-8")


def deliver_either(arguments: argparse.Namespace, result: object, show: Callable[[Console], None]) -> None:
    """Deliver a result as JSON or as what `show` prints, by the arguments of `add_output`."""
    deliver(json_text(result) if arguments.json else text_of(show, arguments.output), arguments.output)
