"""Why orders take as long as they do: the blocks of actions on the critical path of an estimate.

Only a change within such a block can shorten the path, and best at its ends: what others wait for earlier, or what had
to wait itself later (as in job shops: Nowicki and Smutnicki, A Fast Taboo Search Algorithm for the Job Shop Problem,
Management Science 42(6), 1996).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import frozen

from partita.compiler.schedules.estimate import Codes, Estimate


@frozen
class Block:
    """Consecutive actions on the critical path: a rank, and the positions of the first and the last of them."""

    rank: int
    first: int
    last: int


def critical_blocks(orders: Sequence[Codes], estimate: Estimate) -> list[Block]:
    """The blocks of the rank whose time counts, from the last to the first. The orders must not deadlock."""
    ends: list[list[float]] = [[] for _ in range(2 * sum(map(len, estimate.placement)))]
    made_at: list[list[tuple[int, int]]] = [[] for _ in ends]  # the rank and position of each end
    waiting = [-1] * len(ends)
    causes: list[list[tuple[int, int] | None]] = [[] for _ in orders]  # of each action that waited: what for
    clocks, starts = [0.0] * len(orders), [0.0] * len(orders)
    ready = deque(range(len(orders)))
    while ready:
        rank = ready.popleft()
        seconds, sources, way, targets = estimate.tables[rank]
        own_causes, clock = causes[rank], clocks[rank]
        begin = len(own_causes)
        for position in range(begin, len(orders[rank])):
            each = orders[rank][position]
            into, source, cause = targets[each], sources[each], None
            if into >= 0:
                own = ends[into]
                if source >= 0:
                    if len(own) >= len(ends[source]):
                        waiting[source] = rank
                        break
                    arrival = ends[source][len(own)] + way[each]
                    if arrival > clock:
                        clock, cause = arrival, made_at[source][len(own)]
                if not position:
                    starts[rank] = clock
                own.append(clock + seconds[each])
                made_at[into].append((rank, position))
                if waiting[into] >= 0:
                    ready.append(waiting[into])
                    waiting[into] = -1
            clock += seconds[each]
            own_causes.append(cause)
        clocks[rank] = clock
        estimate.steps += len(own_causes) - begin
    from_start = [clock if estimate.whole else clock - start for clock, start in zip(clocks, starts, strict=True)]
    rank = max(range(len(orders)), key=from_start.__getitem__)
    position = last = len(orders[rank]) - 1
    blocks = []
    while True:
        cause = causes[rank][position]
        if cause is None and position:
            position -= 1
            continue
        blocks.append(Block(rank, position, last))
        if cause is None:
            return blocks
        rank, position = cause
        last = position
