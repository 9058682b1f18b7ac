"""ZB-V: no bubble at equal costs within the memory of 1F1B, with two chunks per rank in a V.

Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362 §3 and appendix; Zero Bubble Pipeline
Parallelism, arXiv 2401.10241v1 §6. The order is that of the authors' code, `zbv.py`, as is that of torch's ZBV.
"""

from __future__ import annotations

from collections.abc import Iterator

from partita.compiler.schedules.generator import Generator, register
from partita.compiler.schedules.schedule import Schedule, v_placement
from partita.compiler.schedules.v import Step, in_a_v
from partita.dsl.config.builtins import MICROBATCHES, OVER


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Chunk 0 goes down the ranks and chunk 1 back up: rank 0 has the first and the last stage.

    Live activations: min(2P, 2M, M+r+1) on rank r, of stages half as large: as many bytes as the first rank of 1F1B
    holds. At equal costs, with free transfers and M ≥ 2P−1, no rank waits between its first and its last action.
    """
    return in_a_v("zb_v", ranks, microbatches, 2 * ranks - 1, _steps, live(ranks, 2, microbatches))


def live(ranks: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """min(2P, 2M, M+r+1) on rank r."""
    return tuple(min(2 * ranks, 2 * microbatches, microbatches + rank + 1) for rank in range(ranks))


def _steps(ranks: int, microbatches: int, rank: int) -> Iterator[Step]:
    """The order on a rank for 2P−1 microbatches or more."""
    # The pipeline fills: down the V, then up.
    for _ in range(2 * (ranks - rank) - 1):
        yield "F", 0
    for _ in range(rank):
        yield from (("F", 1), ("F", 0))
    for _ in range(ranks - rank):
        yield from (("F", 1), ("B", 1), ("W", 1))
    # Steady state: a forward and a backward of each chunk alternate while there are forwards.
    rest = microbatches - (2 * ranks - rank - 1)
    for i in range(microbatches - ranks):
        if i < rest:
            yield "F", 0
        yield from (("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1))
    # The pipeline drains: B first, since other ranks wait for it.
    for _ in range(rank):
        yield from (("B", 0), ("B", 1))
    for _ in range(ranks - rank):
        yield from (("B", 0), ("W", 0))
    for _ in range(rank):
        yield "W", 1
    for _ in range(rank):
        yield "W", 0


register(
    Generator(
        "zb_v",
        (MICROBATCHES, OVER),
        order=zb_v,
        chunks=2,
        placement=v_placement,
        split=True,
        live=live,
        lag=lambda ranks: 2 * (ranks - 1),
        bubble=lambda stage: 0.0,
        planned=lambda ranks, layers, microbatches: (2,) if 2 * ranks <= layers else (),
        role="varied",
    )
)
