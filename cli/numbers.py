"""Numbers on the command line."""

from __future__ import annotations

import argparse
from math import isfinite


def count(text: str) -> int:
    """A count from 1 up."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"`{text}` is no count from 1 up")
    return int(text)


def number(text: str) -> float:
    """A finite number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"`{text}` is no number from 0 up")
    return value
