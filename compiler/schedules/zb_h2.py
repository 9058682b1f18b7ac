"""ZB-H2: no bubble at equal costs, for nearly twice the live activations of 1F1B.

Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 §2.1, figure 3.
"""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator, register
from partita.compiler.schedules.lagged import one_chunk
from partita.compiler.schedules.schedule import Schedule
from partita.dsl.config.builtins import MICROBATCHES, OVER


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """2(P−r)−1 warm-up forwards and a lag of 2r on rank r: forwards fill the time until the first B, and W the drain.

    Live activations: min(M, 2P−1) on every rank. With free transfers the bubble is max(0, (P−1)(F + B − 2W)), zero at
    equal costs.
    """
    warm_ups = [2 * (ranks - rank) - 1 for rank in range(ranks)]
    return one_chunk("zb_h2", microbatches, warm_ups, range(0, 2 * ranks, 2), live(ranks, 1, microbatches))


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """min(M, 2P−1) on every rank."""
    return (min(microbatches, 2 * ranks - 1),) * ranks


register(
    Generator(
        "zb_h2",
        (MICROBATCHES, OVER),
        order=zb_h2,
        split=True,
        live=live,
        lag=lambda ranks: 2 * (ranks - 1),
        bubble=lambda stage: max(0.0, stage.forward + stage.backward - 2 * stage.weight),
        planned=lambda ranks, layers, microbatches: (1,),
        role="compared",
    )
)
