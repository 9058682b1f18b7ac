"""Colours of diagnostics and data, on terminals that have them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

# Of the parts of a diagnostic, and of data that count, as parameters of the ANSI sequence that selects them.
CODES = {"error": "1;31", "warning": "1;33", "message": "1", "margin": "1;34", "help": "1;36", "counts": "32"}


def is_colored(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream gets colours: a terminal that is not dumb, unless `NO_COLOR`, `FORCE_COLOR`, `CLICOLOR_FORCE` or
    `CLICOLOR` say otherwise (no-color.org, bixense.com/clicolors).
    """
    if environment.get("NO_COLOR"):
        return False
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        if environment.get(name):
            return environment[name] != "0"
    if environment.get("CLICOLOR") == "0" or environment.get("TERM") == "dumb":
        return False
    return stream.isatty()


def colored(kind: str, text: str) -> str:
    """A part of a diagnostic, or of data, in its colour."""
    return f"\x1b[{CODES[kind]}m{text}\x1b[0m" if kind in CODES else text
