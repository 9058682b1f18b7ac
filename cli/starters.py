"""The files to start from that are installed with Partita: those of `specs/` and of its zoo, by name.

A starter is copied together with what it reads: the files that it imports, and data that is installed beside it.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import PurePosixPath

USUAL = "start"
FOLDERS = (files("partita.specs"), files("partita.specs").joinpath("zoo"))
# In quotation marks, what a file imports or reads. What is not installed is the user's own data.
_READ = re.compile(r'"([^"\n]+\.(?:par|npz))"')


def starter_names() -> tuple[str, ...]:
    """The names of all starters: first those of `specs/`, then those of the zoo."""
    return tuple(
        name.removesuffix(".par")
        for folder in FOLDERS
        for name in sorted(each.name for each in folder.iterdir())
        if name.endswith(".par")
    )


def starter(name: str) -> str:
    """The text of a starter by its name."""
    found = (folder.joinpath(f"{name}.par") for folder in FOLDERS)
    return next(each for each in found if each.is_file()).read_text(encoding="utf-8")


def read_by(text: str) -> dict[str, bytes]:
    """The installed files that the text of a starter names, by their paths relative to it."""
    found = {}
    for name in _READ.findall(text):
        for each in (folder.joinpath(*PurePosixPath(name).parts) for folder in FOLDERS):
            if each.is_file():
                found[name] = each.read_bytes()
    return found
