"""Standard output and error in any state: of any encoding, closed, or abandoned by their reader."""

from __future__ import annotations

import codecs
import os
import sys
from typing import TextIO

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
