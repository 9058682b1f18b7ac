"""Standard output and error in any state: of any encoding, closed, or abandoned by their reader.

If that happens to those of a run, or a disk is full, the display ends but not the training.
"""

from __future__ import annotations

import codecs
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# Replacements for characters of ours that the terminal's encoding lacks; others become question marks.
PLAIN = str.maketrans(
    {
        "…": "...", "→": "->", "←": "<-", "↔": "<->", "×": "x", "·": ".", "–": "-", "—": "-", "−": "-",
        "≤": "<=", "≥": ">=", "≈": "~", "µ": "u", "μ": "u", "°": "deg", "±": "+-", "²": "2", "‘": "'", "’": "'",
        "“": '"', "”": '"', "•": "*", "∞": "inf", "█": "#", "▓": "#", "▒": "+", "░": ".", "▁": "_", "▏": "|",
    }
    | dict.fromkeys("─━═╌╍┄┅╸╺", "-")
    | dict.fromkeys("│┃║╎┆┊", "|")
    | dict.fromkeys("┌┐└┘├┤┬┴┼┏┓┗┛┣┫┳┻╋╔╗╚╝╠╣╦╩╬╭╮╰╯╞╡╪", "+")
)  # fmt: skip


def prepare() -> None:
    """Make standard output and error accept any text, whatever their encoding; and reopen them if they were closed, as
    otherwise the next file that is opened would take their place.
    """
    codecs.register_error("plain", _plain)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="plain")


def abandon(stream: TextIO) -> None:
    """Discard what a stream has buffered and all later output, so that Python does not report an error at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(PLAIN)
    return text.encode("ascii", "replace").decode("ascii"), error.end


class Tolerant:
    """A text stream that ignores write errors: after the first one, which is reported on `other`, it drops all text."""

    def __init__(self, stream: TextIO, name: str, other: TextIO | None) -> None:
        self._stream, self._name, self._other = stream, name, other

    def write(self, text: str) -> int:
        """Write and flush, or drop the text."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush, ignoring errors."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        abandon(self._stream)
        if self._other is not None:
            why = "its reader has exited" if error.errno == errno.EPIPE else str(error.strerror)
            with suppress(OSError):
                print(f"partita: {self._name} failed: {why}; the run continues", file=self._other, flush=True)


@contextmanager
def tolerate_output_errors() -> Iterator[None]:
    """Make both streams of this process ignore write errors."""
    out, errors = sys.stdout, sys.stderr
    lenient = cast(TextIO, Tolerant(errors, "standard error", None))
    sys.stdout = cast(TextIO, Tolerant(out, "standard output", lenient))
    sys.stderr = lenient
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, errors
