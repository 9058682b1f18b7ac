"""`from_file`: a schedule that a user has written as text, one line a rank."""

from __future__ import annotations

from attrs import evolve

from partita.compiler.schedules.generator import Generator, Sizes, register
from partita.compiler.schedules.policy import POLICY
from partita.compiler.schedules.schedule import WEIGHT, Schedule
from partita.compiler.schedules.text import PLACEMENTS, placement_text, read
from partita.dsl.builtins import OVER, PLACEMENT, Beside, Setting
from partita.dsl.source import Source
from partita.dsl.spec import Call


def from_file(ranks: int, chunks: int, microbatches: int, path: Source, placement: str | None = None) -> Schedule:
    """The orders of the file (`partita.compiler.schedules.text`), of as many live activations as they reach.

    Raises ValueError where the file is not for so many ranks, and Refused (E0506) where it is no schedule.
    """
    found = read(path).ranks
    if found != ranks:
        lines = f"{found} line{'s' * (found > 1)} of actions"
        raise ValueError(f"`{path.name}` has {lines}, but the pipeline has {ranks} rank{'s' * (ranks > 1)}")
    return read(path, PLACEMENTS[placement](ranks, chunks) if placement else None)


def _written(call: Call) -> Schedule:
    """What the file says."""
    return read(call.arguments["path"])


def _proxy(call: Call, sizes: Sizes) -> Call:
    """An order is written for one size: the small copy has its chunks, placement and kinds of actions."""
    schedule = _written(call)
    split = any(action.kind == WEIGHT for line in schedule.actions for action in line)
    placed = call.arguments["placement"] or placement_text(schedule.placement)
    kept = {"over": call.arguments["over"], "placement": placed if placed in PLACEMENTS else "loop"}
    return evolve(call, name=POLICY.name, arguments={**kept, "chunks": sizes.chunks, "split_backward": split})


register(
    Generator(
        "from_file",
        (Setting("path", Beside()), evolve(PLACEMENT, default=None), OVER),
        order=from_file,
        chunks=None,
        written=_written,
        proxy=_proxy,
    )
)
