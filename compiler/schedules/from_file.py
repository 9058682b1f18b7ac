"""`from_file`: a schedule that the user has written, in any of the forms of `partita.compiler.schedules.forms`."""

from __future__ import annotations

from attrs import evolve

from partita.compiler.schedules.forms import PLACEMENTS, placement_text, read
from partita.compiler.schedules.forms.written import ANY
from partita.compiler.schedules.generator import Generator, Sizes, register
from partita.compiler.schedules.interleaved_1f1b import INTERLEAVED
from partita.compiler.schedules.policy import POLICY
from partita.compiler.schedules.schedule import WEIGHT, Schedule
from partita.dsl.config.builtins import OVER_BOTH, PLACEMENT, SLICES, Keyword, Setting, TextFile
from partita.dsl.spec import Call
from partita.dsl.syntax.source import Source


def from_file(
    ranks: int,
    chunks: int,
    microbatches: int,
    path: Source,
    placement: str | None = None,
    summation: str | None = None,
    slices: int = 1,
) -> Schedule:
    """The schedule in the file; its bound is its own peak of live activations. With `summation` any, its backwards may
    run in any order of microbatches.

    Raises ValueError if the file is for another number of ranks or slices, and Refused (E0506) if it is not a schedule.
    """
    written = read(path)
    if written.slices != slices:
        many = f"{written.slices} slice{'s' * (written.slices > 1)}"
        raise ValueError(f"`{path.name}` cuts microbatches into {many}; say so by `slices = {written.slices}`")
    count = written.ranks
    if count != ranks:
        lines = f"{count} line{'s' * (count > 1)} of actions"
        raise ValueError(f"`{path.name}` has {lines}, but the pipeline has {ranks} rank{'s' * (ranks > 1)}")
    return read(path, PLACEMENTS[placement](ranks, chunks) if placement else None, summation != ANY)


def _written(call: Call) -> Schedule:
    """The schedule in the file."""
    return read(call.arguments["path"])


def _proxy(call: Call, sizes: Sizes) -> Call:
    """An order has a fixed size, so the proxy runs `policy` with the same kinds of actions and placement."""
    schedule = _written(call)
    split = any(action.kind == WEIGHT for line in schedule.actions for action in line)
    placed = call.arguments["placement"] or placement_text(schedule.own_placement)
    if schedule.slices > 1:
        arguments = {"over": call.arguments["over"], "slices": schedule.slices, "group": None}
        return evolve(call, name=INTERLEAVED.name, arguments={**arguments, "chunks": sizes.chunks})
    arguments = {"over": call.arguments["over"], "placement": placed if placed in PLACEMENTS else "loop"}
    return evolve(call, name=POLICY.name, arguments={**arguments, "chunks": sizes.chunks, "split_backward": split})


register(
    Generator(
        "from_file",
        (
            Setting("path", TextFile()),
            evolve(PLACEMENT, default=None),
            Setting("summation", Keyword(("ascending", ANY)), None),
            OVER_BOTH,
            SLICES,
        ),
        order=from_file,
        chunks=None,
        written=_written,
        proxy=_proxy,
    )
)
