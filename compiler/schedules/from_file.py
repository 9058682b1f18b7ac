"""`from_file`: a schedule that a user has written as text, one line a rank."""

from __future__ import annotations

from partita.compiler.schedules.schedule import Schedule
from partita.compiler.schedules.text import PLACEMENTS, read
from partita.dsl.source import Source


def from_file(ranks: int, chunks: int, microbatches: int, path: Source, placement: str | None = None) -> Schedule:
    """The orders of the file (`partita.compiler.schedules.text`), of as many live activations as they reach.

    Raises ValueError where the file is not for so many ranks, and Refused (E0506) where it is no schedule.
    """
    found = read(path).ranks
    if found != ranks:
        lines = f"{found} line{'s' * (found > 1)} of actions"
        raise ValueError(f"`{path.name}` has {lines}, but the pipeline has {ranks} rank{'s' * (ranks > 1)}")
    return read(path, PLACEMENTS[placement](ranks, chunks) if placement else None)
