"""Pictures of timelines, one file of this directory per format; `terminal` writes text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partita.cli.command import UsageError, writing
from partita.cli.extras import missing
from partita.cli.pictures import chrome
from partita.cli.pictures.picture import Picture

__all__ = ["SUFFIXES", "Picture", "check_drawable", "save"]

SUFFIXES = (".svg", ".png", ".json")


def check_drawable(path: Path) -> None:
    """Raises UsageError if no picture can be written to a file of this name, and says what to do about it."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"cannot draw {path}: the name must end in {', '.join(SUFFIXES)} (a Chrome trace)")
    problem = missing("plot", f"drawing {path}") if path.suffix != ".json" else None
    if problem is not None:
        raise UsageError(f"{problem}, or name a .json file (a Chrome trace)")


def save(pictures: Sequence[Picture], path: Path) -> None:
    """Draw pictures below each other on one time scale. Raises UsageError if they cannot be drawn or written."""
    check_drawable(path)
    if path.suffix == ".json":
        content = chrome.draw(pictures)
    else:
        from partita.cli.pictures import figure  # matplotlib takes a second to import

        content = figure.svg(pictures) if path.suffix == ".svg" else figure.png(pictures)
    with writing(path):
        path.write_bytes(content)
