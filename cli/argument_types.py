"""Numbers on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import isfinite

from partita.dsl.limits import DIGITS
from partita.dsl.units import shortened


def count(text: str) -> int:
    """A positive integer."""
    if not (text.isdecimal() and len(text) <= DIGITS and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"`{shortened(text)}` is not a positive integer")
    return int(text)


def up_to(most: int) -> Callable[[str], int]:
    """A positive integer of at most `most`."""

    def limited(text: str) -> int:
        value = count(text)
        if value > most:
            raise argparse.ArgumentTypeError(f"{shortened(text)} is more than {most:,}")
        return value

    return limited


def number(text: str) -> float:
    """A finite, non-negative number."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"`{text}` is not a non-negative number")
    return value
