"""Looped BFS: every chunk runs all microbatches before the next chunk starts.

Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953 §4. Designed for data parallelism with sharded state:
each chunk's parameters are gathered, and its gradients reduced, once per step.
"""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator, register, whole_stage
from partita.compiler.schedules.schedule import (
    FORWARD,
    FULL_BACKWARD,
    Action,
    Schedule,
    loop_placement,
)
from partita.dsl.config.builtins import CHUNKS, MICROBATCHES, OVER


def looped_bfs(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """All forwards chunk by chunk, then all backwards from the last chunk to the first.

    Live activations: M·V on every rank. At equal costs with M ≥ P, the bubble is (P−1)/V of a microbatch's time. With
    one chunk it is gpipe.
    """
    forwards = [Action(FORWARD, chunk, m) for chunk in range(chunks) for m in range(microbatches)]
    backwards = [Action(FULL_BACKWARD, chunk, m) for chunk in reversed(range(chunks)) for m in range(microbatches)]
    order = (*forwards, *backwards)
    bound = live(ranks, chunks, microbatches)
    return Schedule("looped_bfs", microbatches, loop_placement(ranks, chunks), (order,) * ranks, bound)


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """M·V on every rank."""
    return (microbatches * chunks,) * ranks


# `plan` omits it: it needs more memory than those considered and is no faster.
register(
    Generator("looped_bfs", (MICROBATCHES, CHUNKS, OVER), order=looped_bfs, chunks=None, live=live, bubble=whole_stage)
)
