"""What directory of checkpoints, and which of them, a path that a user names stands for. Does not need torch."""

from __future__ import annotations

from pathlib import Path

from partita.dsl.diagnostic import refuse
from partita.runtime.checkpoint.settings import DIRECTORY
from partita.runtime.checkpoint.store import commit_name, steps_in
from partita.runtime.run_directory import RunDirectory


def located(given: Path) -> tuple[Path, int | None]:
    """The directory of checkpoints that a path stands for, and the step if it is one of them.

    Raises Refused (E0807).
    """
    for path in (given, given / DIRECTORY):
        if steps_in(path):
            return path, None
    resolved = given.resolve()
    for step in steps_in(resolved.parent):
        if resolved.name == commit_name(step):
            return given.parent if given.name == resolved.name else resolved.parent, step
    recorded = _recorded(given)
    if recorded is not None and steps_in(recorded):
        return recorded, None
    raise refuse("E0807", f"there is no checkpoint in {given}")


def _recorded(directory: Path) -> Path | None:
    """Where the run in a directory has its checkpoints, as it has recorded itself."""
    if not directory.is_dir():
        return None
    with RunDirectory.open(directory) as opened:
        record = opened.record()
    return Path(record.checkpoints) if record is not None and record.checkpoints is not None else None
