"""Pictures of timelines, one file of this directory per format; `terminal` writes text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from partita.cli.extras import missing
from partita.cli.pictures import chrome
from partita.cli.pictures.picture import Picture

__all__ = ["SUFFIXES", "Picture", "save", "unable"]

SUFFIXES = (".svg", ".png", ".json")


def unable(path: Path) -> str | None:
    """Why no picture can be written to a file of this name, and what to do about it; None if one can."""
    if path.suffix not in SUFFIXES:
        return f"cannot draw {path}: the name must end in {', '.join(SUFFIXES)} (a Chrome trace)"
    problem = missing("plot", f"drawing {path}") if path.suffix != ".json" else None
    return f"{problem}, or name a .json file (a Chrome trace)" if problem else None


def save(pictures: Sequence[Picture], path: Path) -> bool:
    """Draw pictures below each other on one time scale; if the file cannot be written, reports why."""
    content = _format(path.suffix)(pictures)
    try:
        path.write_bytes(content)
    except OSError as error:
        print(f"partita: cannot write {path}: {error.strerror}", file=sys.stderr)
        return False
    return True


def _format(suffix: str) -> Callable[[Sequence[Picture]], bytes]:
    if suffix == ".json":
        return chrome.draw
    # matplotlib takes a second to import.
    from partita.cli.pictures import figure

    return figure.svg if suffix == ".svg" else figure.png
