"""A fast estimate of the cost of orders: the simulator's times without instructions.

A transfer starts when its producer ends; it waits neither for the previous transfer on its channel nor for its
receiver. So an estimate never exceeds the simulated cost, and usually equals it. A search compares many orders by
estimate and the best ones by simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf

from attrs import define, field

from partita.compiler.schedules.conditions import StageTimes
from partita.compiler.schedules.schedule import KINDS, Action

_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}

# Checking whether a rank can proceed costs as much as visiting this many actions.
VISIT = 4

# A rank's order: 4·chunk + kind for each action. Microbatches are implicit, since they ascend within chunk and kind.
Codes = tuple[int, ...]
# The longest time that any rank is occupied and the end of the last action, in the order in which they count, and the
# sum of all ranks' occupied times.
Value = tuple[float, float, float]


def code(kind: str, chunk: int) -> int:
    """The code of an action."""
    return len(KINDS) * chunk + _NUMBERS[kind]


def codes(actions: Iterable[Action]) -> Codes:
    """The codes of a rank's actions."""
    return tuple(code(action.kind, action.chunk) for action in actions)


def decoded(order: Codes) -> tuple[Action, ...]:
    """The actions of a rank's codes."""
    ran = dict.fromkeys(order, 0)
    actions = []
    for each in order:
        chunk, kind = divmod(each, len(KINDS))
        actions.append(Action(KINDS[kind], chunk, ran[each]))
        ran[each] += 1
    return tuple(actions)


@define
class Estimate:
    """Estimates orders for one placement of stages. With `whole`, the end of the last action comes first in a value.

    `tables` has for each rank, by code, the seconds of an action, the list of ends that it waits for, the seconds from
    there, and the list in which its own end is (−1 for none). `steps` counts the actions visited.
    """

    placement: Sequence[Sequence[int]]
    prices: StageTimes
    whole: bool = False
    steps: int = 0
    tables: list[tuple[list[float], list[int], list[float], list[int]]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        # There is a list of ends of actions for each stage and direction: F of stage s in 2s, B in 2s + 1.
        last = sum(map(len, self.placement)) - 1
        prices = self.prices
        self.tables = []
        for stages in self.placement:
            seconds, sources, way, targets = [], [], [], []
            for s in stages:
                seconds += [prices.forward[s], prices.backward[s], prices.weight[s], prices.whole[s]]
                send_forward = (2 * s - 2, prices.send_forward[s - 1]) if s else (-1, 0.0)
                send_backward = (2 * s + 3, prices.send_backward[s]) if s < last else (2 * s, 0.0)
                for source, time in (send_forward, send_backward, (-1, 0.0), send_backward):
                    sources.append(source)
                    way.append(time)
                targets += [2 * s, 2 * s + 1, -1, 2 * s + 1]
            self.tables.append((seconds, sources, way, targets))

    def __call__(self, orders: Sequence[Codes]) -> Value:
        """The value of the ranks' orders; infinite if they deadlock."""
        count = len(orders)
        ends: list[list[float]] = [[] for _ in range(2 * sum(map(len, self.placement)))]
        clocks, starts, positions = [0.0] * count, [0.0] * count, [0] * count
        waiting = [-1] * len(ends)  # the rank that waits for the next entry of a list
        ready = deque(range(count))
        while ready:
            rank = ready.popleft()
            seconds, sources, way, targets = self.tables[rank]
            order, clock = orders[rank], clocks[rank]
            begin = position = positions[rank]
            length = len(order)
            while position < length:
                code = order[position]
                into = targets[code]
                if into >= 0:
                    source = sources[code]
                    own = ends[into]
                    if source >= 0:
                        source_ends = ends[source]
                        number = len(own)
                        if number >= len(source_ends):
                            waiting[source] = rank
                            break
                        arrival = source_ends[number] + way[code]
                        if arrival > clock:
                            clock = arrival
                    if not position:
                        starts[rank] = clock
                    clock += seconds[code]
                    own.append(clock)
                    if waiting[into] >= 0:
                        ready.append(waiting[into])
                        waiting[into] = -1
                else:
                    clock += seconds[code]
                position += 1
            positions[rank], clocks[rank] = position, clock
            self.steps += position - begin + VISIT
        if any(position < len(order) for position, order in zip(positions, orders, strict=True)):
            return inf, inf, inf
        times = [clock - start for clock, start in zip(clocks, starts, strict=True)]
        worst = (max(clocks), max(times)) if self.whole else (max(times), max(clocks))
        return *worst, sum(times)
