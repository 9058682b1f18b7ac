"""1F1B: forwards fill the pipeline, then forwards and backwards alternate (PipeDream-Flush).

Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503; Megatron-LM's schedule without
interleaving (arXiv 2104.04473 §2.2). With slices of the sequence it is Seq1F1B: Sun et al., arXiv 2406.03488.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def one_f_one_b(ranks: int, microbatches: int, slices: int = 1) -> Schedule:
    """P−r−1 warm-up forwards on rank r, then alternating forwards and backwards, then the remaining backwards.

    Live activations: min(M, P−r) on rank r. At equal costs the bubble is P−1 forwards and backwards.

    The same with S slices of each microbatch, S−1 more of which warm up: the first backward is that of the last slice.
    Live then are min(M·S, P−r+S−1) slices, and the bubble is P−1 forwards and backwards of a slice.
    """
    count = microbatches * slices
    forwards = [Action(FORWARD, 0, m) for m in range(count)]
    backwards = [Action(FULL_BACKWARD, 0, turn(FULL_BACKWARD, m, slices)) for m in range(count)]
    actions = tuple(alternate(forwards, backwards, ranks - rank + slices - 2) for rank in range(ranks))
    bound = tuple(min(count, ranks - rank + slices - 1) for rank in range(ranks))
    return Schedule("one_f_one_b", count, loop_placement(ranks, 1), actions, bound, slices=slices)


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """min(M, P−r) on rank r."""
    return tuple(min(microbatches, ranks - rank) for rank in range(ranks))


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then alternating forwards and backwards, then the remaining backwards."""
    steady = forwards[warm_up:]
    pairs = [action for pair in zip(steady, backwards, strict=False) for action in pair]
    return (*forwards[:warm_up], *pairs, *backwards[len(steady) :])


register(
    Generator(
        "one_f_one_b",
        (MICROBATCHES, OVER_BOTH, SLICES),
        others=("1f1b", "dapple", "pipedream", "seq1f1b"),
        order=one_f_one_b,
        live=live,
        bubble=whole_stage,
        planned=lambda ranks, layers, microbatches: (1,),
        role="varied",
    )
)
