"""A rehearsal: a step on zeros before the first step, which sends no pipeline messages and whose results are discarded.

Kernels that a GPU runs for the first time are compiled, loaded and tuned, and NCCL connects; the host of each rank
waits for all this. In the first step other ranks would wait as well, and a lack of memory would show in the middle of a
joint operation. Collectives along the mesh's axes are real: ranks of one program post the same ones in the same order,
and without messages none waits for another stage.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from partita.runtime.kernels.dtypes import DTYPES
from partita.runtime.rank import Rank
from partita.runtime.transports.transport import ProcessEnd


def leaves_nothing(rank: Rank) -> bool:
    """Whether a step of the rank can be computed without changing what it keeps: it updates no other group, keeps no
    gradients of steps before, and is not captured.
    """
    program = rank.plan.program
    return not (rank.extra_replicas or program.delay or program.paired or program.captured)


def rehearse(rank: Rank, transport: ProcessEnd) -> Iterator[None]:
    """Compute a step of a rank that `leaves_nothing`, wait for all ranks, and discard it."""
    training, pace = rank.training, rank.training.pace
    batch = {
        each.name: torch.zeros(each.type.shape, dtype=DTYPES[each.type.dtype]) for each in rank.plan.program.inputs
    }
    if pace is not None:
        pace.begin()
        pace.mark()
    transport.still = True
    yield from training.compute(0, lambda _: batch, (), 1)
    transport.still = False
    transport.barrier()  # when nothing uses any more what is let go of
    training.discard()
    if pace is not None:
        pace.end()  # the first that it does not count
