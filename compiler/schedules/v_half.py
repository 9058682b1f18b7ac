"""V-Half: half of the activations of 1F1B, in a V.

Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362 §3.2.
"""

from __future__ import annotations

from partita.compiler.schedules.generator import Generator, register
from partita.compiler.schedules.patterns import repeated
from partita.compiler.schedules.schedule import Schedule, v_placement
from partita.dsl.config.builtins import MICROBATCHES, OVER


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Steps of two slots down the V and of one up it: activations live for 6P slots of a rank, and for 12P in ZB-V.

    No rank holds more than 2⌊P/2⌋ + 2 activations, half as many as with `zb_v`. At equal costs, with free transfers and
    P microbatches or more, 3P−7 slots are lost if P is even, and 3P−4 otherwise.
    """
    return repeated("v_half", ranks, microbatches, (2, 1, 2, 1))


register(
    Generator(
        "v_half",
        (MICROBATCHES, OVER),
        order=v_half,
        chunks=2,
        placement=v_placement,
        split=True,
        role="compared",
    )
)
