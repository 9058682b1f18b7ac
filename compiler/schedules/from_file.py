"""`from_file`: a schedule that a user has written as text, one line a rank."""

from __future__ import annotations

from partita.compiler.schedules.schedule import Schedule, loop_placement, v_placement
from partita.compiler.schedules.text import read
from partita.dsl.source import Source


def from_file(ranks: int, chunks: int, microbatches: int, path: Source, placement: str = "loop") -> Schedule:
    """The orders of the file (`partita.compiler.schedules.text`), of as many live activations as they reach.

    Raises ValueError where the file is not for so many ranks, and Refused (E0506) where it is no schedule.
    """
    found = read(path).ranks
    if found != ranks:
        lines = f"{found} line{'s' * (found > 1)} of actions"
        raise ValueError(f"`{path.name}` has {lines}, and the pipeline has {ranks} rank{'s' * (ranks > 1)}")
    return read(path, loop_placement(ranks, chunks) if placement == "loop" else v_placement(ranks, chunks))
