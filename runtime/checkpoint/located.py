"""What directory of checkpoints, and which of them, a path or address that a user names stands for. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from partita.dsl.diagnostic import Refused, refuse
from partita.runtime.addresses import Address, PathOrUrl, exists, place_of
from partita.runtime.checkpoint.address_store import steps_in
from partita.runtime.checkpoint.folders import unreadable
from partita.runtime.checkpoint.manifest import NAME
from partita.runtime.checkpoint.settings import DIRECTORY
from partita.runtime.checkpoint.store import commit_name, steps_of
from partita.runtime.run_directory import RunDirectory


def located(location: PathOrUrl) -> tuple[PathOrUrl, int | None]:
    """The directory of checkpoints that a path stands for, and the step if it is one of them.

    Raises Refused (E0807; E0602, E0617 and E0819 for addresses).
    """
    if isinstance(location, Address):
        return _at(location)
    for path in (location, location / DIRECTORY):
        if steps_in(path):
            return path, None
    resolved = location.resolve()
    for step in steps_in(resolved.parent):
        if resolved.name == commit_name(step):
            return location.parent if location.name == resolved.name else resolved.parent, step
    recorded = _recorded(location)
    if recorded is not None and steps_in(recorded):
        return recorded, None
    raise _none_in(location)


def _none_in(location: PathOrUrl) -> Refused:
    help = "`partita run FILE` makes some, if its train block says `checkpoint = every(100)`; `--run-dir` names others"
    return refuse("E0807", f"there is no checkpoint in {location}", help=help)


def _at(address: Address) -> tuple[Address, int | None]:
    steps = steps_of([address.name])
    if steps:  # where nothing can be listed, it can be named
        try:
            if exists(address / NAME):
                return address.parent, steps[0]
        except OSError as error:
            raise unreadable(address, error) from error
    for place in (address, address / DIRECTORY):
        if steps_in(place):
            return place, None
    raise _none_in(address)


def _recorded(directory: Path) -> PathOrUrl | None:
    """Where the run in a directory has its checkpoints, as it has recorded itself."""
    if not directory.is_dir():
        return None
    with RunDirectory.open(directory) as opened:
        record = opened.record()
    return place_of(record.checkpoints, directory) if record is not None and record.checkpoints is not None else None
