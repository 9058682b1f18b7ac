"""Standard output and error as commands find them: of any encoding, closed, or left by their reader."""

from __future__ import annotations

import codecs
import os
import sys
from typing import TextIO

# What stands for signs of ours where the terminal's encoding lacks them; for others a question mark does.
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
    """Make standard output and error take any text, whatever their encoding; and be there, if they were closed: else
    the next file that is opened takes their place.
    """
    codecs.register_error("plain", _plain)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="plain")


def abandon(stream: TextIO) -> None:
    """Let what a stream still holds, and all to come, go nowhere: Python would complain of it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(PLAIN)
    return text.encode("ascii", "replace").decode("ascii"), error.end
