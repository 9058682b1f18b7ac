"""The forward-only order of evaluation; not selectable by users."""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator
from partita.compiler.schedules.schedule import FORWARD, Action, Schedule, loop_placement


def forward_only(
    ranks: int, chunks: int, microbatches: int, placement: tuple[tuple[int, ...], ...] | None = None
) -> Schedule:
    """Forwards in groups of P microbatches, chunk by chunk within a group: a group's first microbatch returns to the
    first rank just as the previous chunk finishes the group there.

    `placement` is that of the training schedule (default: loop_placement). It cannot deadlock if every stage of a chunk
    precedes every stage of the next chunk, since all ranks then run one total order. No activations stay live.
    """
    order = tuple(
        Action(FORWARD, chunk, m)
        for start in range(0, microbatches, ranks)
        for chunk in range(chunks)
        for m in range(start, min(start + ranks, microbatches))
    )
    return Schedule(
        "forward_only",
        microbatches,
        placement or loop_placement(ranks, chunks),
        (order,) * ranks,
        (0,) * ranks,
        training=False,
    )


FORWARD_ONLY = Generator("forward_only", order=forward_only, chunks=None)
