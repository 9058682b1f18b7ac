"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator, register, whole_stage
from partita.compiler.schedules.schedule import (
    FORWARD,
    FULL_BACKWARD,
    Action,
    Schedule,
    loop_placement,
    turn,
)
from partita.dsl.config.builtins import MICROBATCHES, OVER_BOTH, SLICES


def gpipe(ranks: int, microbatches: int, slices: int = 1) -> Schedule:
    """Every rank runs the forwards of all microbatches, or of all their slices, then the backwards of all.

    Live activations: M on every rank. The bubble is P−1 forwards and backwards, as in one_f_one_b. Backwards run in
    ascending order of microbatches, reversed from the paper's figure: gradients are then summed in the same order as in
    every other schedule, and the makespan is the same.
    """
    count = microbatches * slices
    order = tuple(Action(kind, 0, turn(kind, m, slices)) for kind in (FORWARD, FULL_BACKWARD) for m in range(count))
    bound = live(ranks, 1, count)
    return Schedule("gpipe", count, loop_placement(ranks, 1), (order,) * ranks, bound, slices=slices)


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """M on every rank."""
    return (microbatches,) * ranks


register(
    Generator(
        "gpipe",
        (MICROBATCHES, OVER_BOTH, SLICES),
        order=gpipe,
        live=live,
        bubble=whole_stage,
        representative=lambda ranks, microbatches: microbatches,
        # It keeps all microbatches live, so it is considered for few only.
        planned=lambda ranks, layers, microbatches: (1,) if microbatches <= 2 * ranks else (),
    )
)
