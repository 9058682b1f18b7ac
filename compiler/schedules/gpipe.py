"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator, register, whole_stage
from partita.compiler.schedules.schedule import (
    FORWARD,
    WHOLE_BACKWARD,
    Action,
    Schedule,
    loop_placement,
)
from partita.dsl.builtins import MICROBATCHES, OVER


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Every rank runs the forwards of all microbatches, then the backwards of all.

    Live activations: `microbatches` on every rank. Idle for P−1 forwards and backwards of M, as one_f_one_b
    is. Backwards go in ascending order of microbatches, where the paper's picture shows them reversed:
    gradients then add up in the same order as in every other schedule, and the length is the same.
    """
    order = tuple(Action(kind, 0, m) for kind in (FORWARD, WHOLE_BACKWARD) for m in range(microbatches))
    bound = live(ranks, 1, microbatches)
    return Schedule("gpipe", microbatches, loop_placement(ranks, 1), (order,) * ranks, bound)


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """All of them, on every rank."""
    return (microbatches,) * ranks


register(
    Generator(
        "gpipe",
        (MICROBATCHES, OVER),
        order=gpipe,
        live=live,
        bubble=whole_stage,
        representative=lambda ranks, microbatches: microbatches,
        # It holds all microbatches, so that it is asked about few.
        planned=lambda ranks, turns, microbatches: (1,) if microbatches <= 2 * ranks else (),
    )
)
