"""The forward-only order that evaluation runs; users do not name it."""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator
from partita.compiler.schedules.schedule import FORWARD, Action, Schedule, loop_placement


def forward_only(
    ranks: int, chunks: int, microbatches: int, placement: tuple[tuple[int, ...], ...] | None = None
) -> Schedule:
    """Forwards by groups of P microbatches, in each group chunk by chunk, so that a chunk's first microbatch
    comes back when the chunk before it has run the group.

    `placement` is that of the training schedule (loop_placement unless given). It cannot deadlock where every
    stage of a chunk comes before every stage of the next chunk: all ranks run one total order. Nothing stays
    alive.
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
