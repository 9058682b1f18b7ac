"""ZB-H1: 1F1B with deferred W, which fills part of the bubble within the memory of 1F1B.

Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 §2.1, figure 3.
"""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator, register
from partita.compiler.schedules.lagged import one_chunk
from partita.compiler.schedules.schedule import Schedule
from partita.dsl.config.builtins import MICROBATCHES, OVER


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """P−r warm-up forwards and a lag of r on rank r.

    Live activations: min(M, P) on every rank, the peak of 1F1B's first rank. With free transfers the bubble is
    (P−1)(F + B − W), at equal costs a third of 1F1B's.
    """
    return one_chunk(
        "zb_h1",
        microbatches,
        [ranks - rank for rank in range(ranks)],
        range(ranks),
        live(ranks, 1, microbatches),
    )


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """min(M, P) on every rank."""
    return (min(microbatches, ranks),) * ranks


register(
    Generator(
        "zb_h1",
        (MICROBATCHES, OVER),
        order=zb_h1,
        split=True,
        live=live,
        lag=lambda ranks: ranks - 1,
        bubble=lambda stage: stage.forward + stage.backward - stage.weight,
        planned=lambda ranks, layers, microbatches: (1,),
        role="compared",
    )
)
