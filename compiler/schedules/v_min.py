"""V-Min: about a third of the activations of 1F1B, in a V.

Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362 §3.2.
"""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator, register
from partita.compiler.schedules.patterns import repeated
from partita.compiler.schedules.schedule import Schedule, v_placement
from partita.dsl.config.builtins import MICROBATCHES, OVER


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Steps of one slot, the shortest: activations live for 4P slots of a rank, and for 12P in ZB-V.

    No rank holds more than 2⌈(P+2)/3⌉ activations, a third of those of `zb_v`. At equal costs and with free transfers,
    at most 4P−5 slots are lost, from P = 4 on.
    """
    return repeated("v_min", ranks, microbatches, (1, 1, 1, 1))


register(
    Generator(
        "v_min",
        (MICROBATCHES, OVER),
        order=v_min,
        chunks=2,
        placement=v_placement,
        split=True,
        role="compared",
    )
)
