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

# The width of what goes to no terminal.
WIDTH = 110


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """`-o OUT`."""
    parser.add_argument("-o", "--output", metavar="OUT", help="write to a file instead of the terminal")


def text_of(show: Callable[[Console], None], output: str | None) -> str:
    """What is shown on a console: as wide as the terminal, with its colours, or plain in 110 columns."""
    from rich.console import Console

    terminal = output is None and sys.stdout.isatty()
    buffer = io.StringIO()
    show(Console(file=buffer, force_terminal=terminal, width=None if terminal else WIDTH, highlight=False))
    return buffer.getvalue()


def deliver(text: str, output: str | None) -> int:
    """Write a result to OUT, or print it. The exit status: 2 where the file cannot be written."""
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"partita: cannot write {output}: {error.strerror}", file=sys.stderr)
        return 2
    return 0
