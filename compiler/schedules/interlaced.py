"""The interlaced pipeline: 1F1B for vocabularies that all ranks share, whose passes run on all ranks at once.

Lin et al., nnScaler: Constraint-Guided Parallelization Plan Generation for Deep Learning Training (OSDI 2024), as in
the comparison of Yeung et al. (arXiv 2411.05288 §4): S and T of a microbatch follow each other without anything between
them, so that all ranks wait for each other in every microbatch, and half as many microbatches again are in flight.
"""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator, register, whole_stage
from partita.compiler.schedules.schedule import FORWARD, FULL_BACKWARD, Action, Schedule, loop_placement
from partita.dsl.config.builtins import MICROBATCHES, OVER

PASSES = "S and T"


def interlaced(ranks: int, microbatches: int) -> Schedule:
    """Forwards until half the ranks' number more are in flight than in 1F1B; then backwards alone, until the passes
    over the vocabulary keep step with them; then both alternate, and neighbouring ranks begin with different ones.

    Live activations: min(M, P−r + P/2) on rank r.
    """
    orders = tuple(
        tuple(Action(kind, 0, m) for kind, m in _order(ranks, rank, microbatches) if kind != PASSES)
        for rank in range(ranks)
    )
    return Schedule("interlaced", microbatches, loop_placement(ranks, 1), orders, live(ranks, 1, microbatches))


def passes(ranks: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """S and T follow every backward, or the forward after it; the first ones follow the forwards of the warm-up."""
    orders = [[kind for kind, _ in _order(ranks, rank, microbatches)] for rank in range(ranks)]
    return tuple(
        tuple(i - m for m, i in enumerate(i for i, kind in enumerate(order) if kind == PASSES)) for order in orders
    )


def _order(ranks: int, rank: int, microbatches: int) -> list[tuple[str, int]]:
    """The order of one rank, by kind and microbatch, with the vocabulary passes S and T merged into one entry."""
    warm_up = min(microbatches, ranks - rank + ranks // 2)
    first = min(microbatches, ranks - rank)
    alone = max(0, warm_up - first - (ranks - rank - 1) // 2)
    pair = (FORWARD, FULL_BACKWARD) if rank % 2 == ranks % 2 else (FULL_BACKWARD, FORWARD)
    kinds = [FORWARD] * warm_up + [PASSES] * first + [FULL_BACKWARD, PASSES] * alone
    kinds += [*pair, PASSES] * (microbatches - warm_up) + [FULL_BACKWARD, PASSES] * microbatches
    left = dict.fromkeys(kinds, 0)
    order = []
    for kind in kinds:
        if left[kind] < microbatches:
            order.append((kind, left[kind]))
            left[kind] += 1
    return order


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """min(M, P−r + P/2) on rank r."""
    return tuple(min(microbatches, ranks - rank + ranks // 2) for rank in range(ranks))


register(
    Generator(
        "interlaced",
        (MICROBATCHES, OVER),
        order=interlaced,
        live=live,
        bubble=whole_stage,
        slack=0,
        passes=passes,
    )
)
