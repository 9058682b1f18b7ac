"""Standard input of ranks: they are not in the foreground group of a terminal, and may not read it themselves."""

from __future__ import annotations

import os
import threading

INPUT = "PARTITA_INPUT"  # the descriptor from which a rank reads it
PIECE = 1 << 16


def forwarded_input() -> int:
    """The descriptor of a pipe into which standard input goes: ranks, which are not in the foreground group of a
    terminal, may not read it themselves.
    """
    reading, writing = os.pipe()

    def forward() -> None:
        while piece := os.read(0, PIECE):
            os.write(writing, piece)
        os.close(writing)

    threading.Thread(target=forward, daemon=True).start()
    return reading
