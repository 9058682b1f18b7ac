"""The run that a command is about, by its directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from partita.cli.page.run import Run, is_run
from partita.cli.source import printable


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """RUN."""
    parser.add_argument("run_dir", metavar="RUN", help="the directory of a run: runs/NAME, or its --run-dir")


def opened(name: str) -> Run | None:
    """The run, read as far as it is; reports why there is none, or why it cannot be read."""
    problem = _problem(name)
    if problem is None:
        found = Run(Path(name))
        try:
            found.refresh()
            return found
        except OSError as error:
            problem = f"cannot read {name}: {error.strerror}"
    print(f"partita: {printable(problem)}", file=sys.stderr)
    return None


def _problem(name: str) -> str | None:
    """Why this is not the directory of a run."""
    if "\0" in name:
        return "the name of a directory has no NUL character"
    path = Path(name)
    try:
        if path.is_dir():
            if is_run(path):
                return None
            inside = sorted(each.name for each in path.iterdir() if is_run(each))
            help = f": did you mean {path / inside[0]}?" if inside else "; it has neither run.json nor metrics.jsonl"
            return f"{name} is not the directory of a run{help}"
        if path.suffix == ".par":
            return f"{name} is a file: RUN is the directory of a run, runs/{path.stem} unless --run-dir names another"
        return f"{name} is not a directory" if path.exists() else f"there is no directory {name}"
    except OSError as error:
        return f"cannot read {name}: {error.strerror}"
