"""Where the result of a command goes: to the terminal, or with `-o OUT` to a file."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Columns of output that does not go to a terminal.
WIDTH = 110


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `-o OUT`."""
    parser.add_argument("-o", "--output", metavar="OUT", help="write to a file instead of the terminal")


def text_of(show: Callable[[Console], None], output: str | None) -> str:
    """What `show` prints: with the width and colors of the terminal, or plain in 110 columns."""
    from rich.console import Console

    terminal = output is None and sys.stdout.isatty()
    buffer = io.StringIO()
    show(Console(file=buffer, force_terminal=terminal, width=None if terminal else WIDTH, highlight=False))
    return buffer.getvalue()


def deliver(text: str, output: str | None) -> int:
    """Write a result to OUT, or print it. Returns the exit status: 2 if the file cannot be written."""
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"partita: cannot write {output}: {error.strerror}", file=sys.stderr)
        return 2
    return 0
