"""Copies of the sources, which processes run whatever is installed.

A copy has the folders of the house, and beside them a package `partita` that is made of links to these, as an
installation maps them. Processes find that package first.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from attrs import frozen

from tests.files import ROOT, SHIPPED, parts

# What the tests and `verify` read.
COPIED = (
    *("api", *SHIPPED, "bench", "docs", "tests"),
    *("Makefile", "README.md", "constraints.txt", "pyproject.toml", "setup.py"),
)


@frozen
class Copy:
    """A copy of the sources in a folder of its own."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Copy:
        """Copy the sources."""
        copy, package = cls(folder), folder / "package" / "partita"
        ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy.tree / name, ignore=ignored)
            else:
                copy.tree.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, copy.tree / name)
        package.mkdir(parents=True)
        for part in parts(copy.tree):
            (package / part.name).symlink_to(part)
        return copy

    @property
    def tree(self) -> Path:
        """The folder of the copied files."""
        return self.folder / "tree"

    @property
    def environment(self) -> dict[str, str]:
        """That of a process that runs what the copy has."""
        return {**os.environ, "PYTHONPATH": str(self.folder / "package"), "OMP_NUM_THREADS": "1"}
