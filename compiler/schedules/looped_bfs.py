"""Looped BFS: every chunk runs all microbatches before the next one begins.

Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953 §4. Made for data parallelism with sharded
state: each chunk's parameters are gathered, and its gradients reduced, once a step.
"""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator, register, whole_stage
from partita.compiler.schedules.schedule import (
    FORWARD,
    WHOLE_BACKWARD,
    Action,
    Schedule,
    loop_placement,
)
from partita.dsl.builtins import CHUNKS, MICROBATCHES, OVER


def looped_bfs(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """All microbatches of the first chunk forward, then of the next; backward from the last chunk to the
    first.

    Live activations: M·V on every rank. With M ≥ P the pipeline idles, at equal costs, for (P−1)/V of a
    microbatch's time; with one chunk it is gpipe.
    """
    forwards = [Action(FORWARD, chunk, m) for chunk in range(chunks) for m in range(microbatches)]
    backwards = [Action(WHOLE_BACKWARD, chunk, m) for chunk in reversed(range(chunks)) for m in range(microbatches)]
    order = (*forwards, *backwards)
    bound = live(ranks, chunks, microbatches)
    return Schedule("looped_bfs", microbatches, loop_placement(ranks, chunks), (order,) * ranks, bound)


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """All of them, on every rank."""
    return (microbatches * chunks,) * ranks


# It keeps more than what `plan` considers, and ends no sooner.
register(
    Generator("looped_bfs", (MICROBATCHES, CHUNKS, OVER), order=looped_bfs, chunks=None, live=live, bubble=whole_stage)
)
