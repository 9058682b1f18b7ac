"""How many thread blocks (CTAs) of a GPU each group of ranks takes.

A kernel of NCCL occupies multiprocessors while it waits for its peers. Where several leave no room for another, for
which one of their peers waits in the same way, none gets on. So those of all groups that a rank is in fit on its device
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from attrs import frozen

from partita.compiler.instructions import Channel
from partita.compiler.mesh import Mesh

# NCCL moves 20 GB/s by a thread block on A100, 36.7 on H100 (its tuning table `perChMaxRingLL128Bws`), and has up to 32
# for a collective. NVLink has 300 and 450 GB/s, a port of a network up to 50.
COLLECTIVE, WITHIN, BETWEEN = 32, 16, 2


@frozen
class Blocks:
    """The most thread blocks of a group: of a collective, and of messages within a machine and between machines, which
    are those of the ranks.
    """

    machines: Sequence[int]
    collective: int
    within: int
    between: int

    def of_messages(self, ranks: Iterable[int]) -> int:
        """Of messages between these ranks."""
        return self.within if len({self.machines[each] for each in ranks}) == 1 else self.between


def allot(mesh: Mesh, channels: Iterable[Channel], machines: Sequence[int], multiprocessors: int) -> Blocks:
    """The blocks of a run's groups, the same on all ranks: along each mesh axis, of all ranks, and of each channel.
    `machines` are by rank. What would be more than a device has is lowered in proportion.
    """
    within: Counter[int] = Counter()
    between: Counter[int] = Counter()
    for channel in channels:
        for rank in range(mesh.ranks):
            if mesh.pipe_rank(rank) == channel.source:
                ends = rank, mesh.peer(rank, channel.destination)
                (within if machines[ends[0]] == machines[ends[1]] else between).update(ends)
    collectives = COLLECTIVE * (len(mesh.joined) + 1)
    demand = max(collectives + WITHIN * within[rank] + BETWEEN * between[rank] for rank in range(mesh.ranks))
    share = min(1.0, multiprocessors / demand)
    return Blocks(machines, *(max(1, int(each * share)) for each in (COLLECTIVE, WITHIN, BETWEEN)))
