"""Numbers on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from math import isfinite

from partita.dsl.limits import DIGITS
from partita.dsl.syntax.units import shortened


def count(text: str) -> int:
    """A positive integer."""
    if not (text.isdecimal() and len(text) <= DIGITS and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"`{shortened(text)}` is not a positive integer")
    return int(text)


def up_to(limit: int) -> Callable[[str], int]:
    """A positive integer of at most `limit`."""

    def limited(text: str) -> int:
        value = count(text)
        if value > limit:
            raise argparse.ArgumentTypeError(f"{shortened(text)} is more than {limit:,}")
        return value

    return limited


def numbers(text: str, names: Collection[str]) -> dict[str, float]:
    """Numbers by name, such as `F=18.5,B=18.1`."""
    values = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        values[known(key.strip(), names)] = number(value)
    return values


def known(name: str, names: Collection[str]) -> str:
    """The name, if it is one of these."""
    if name not in names:
        raise argparse.ArgumentTypeError(f"`{name[:40]}` is not one of {', '.join(names)}")
    return name


def number(text: str) -> float:
    """A finite, non-negative number."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"`{text}` is not a non-negative number")
    return value
