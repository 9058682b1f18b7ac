"""Schedules of two chunks a rank in a V, written as which kind of action of which chunk comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partita.compiler.schedules.schedule import FORWARD, WHOLE_BACKWARD, Action, Schedule, v_placement

# Kind and chunk of an action; its microbatch is the next one of that kind and chunk. `F+` and a chunk: a forward that
# overlaps with the whole backward that comes next.
Step = tuple[str, int]
PAIRED = "F+"


def in_a_v(
    name: str,
    ranks: int,
    microbatches: int,
    least: int,
    steps: Callable[[int, int, int], Iterator[Step]],
    bound: tuple[int, ...],
) -> Schedule:
    """The schedule whose order on each rank is `steps(ranks, microbatches, rank)`.

    The published rules want at least `least` microbatches. Of fewer, those that are not there are left out of the order
    for as many (torch does so for ZB-V): what is left is a part of a lawful order, and lawful. Nothing overlaps then.
    """
    orders, pairs = [], []
    for rank in range(ranks):
        order: list[Action] = []
        paired = set()
        following: dict[Step, int] = {}
        for kind, chunk in steps(ranks, max(microbatches, least), rank):
            real = FORWARD if kind == PAIRED else kind
            # A whole backward counts as B and as W.
            parts = ("B", "W") if real == WHOLE_BACKWARD else (real,)
            m = following.get((parts[0], chunk), 0)
            for part in parts:
                following[part, chunk] = m + 1
            if m < microbatches:
                if kind == PAIRED:
                    paired.add(len(order))
                order.append(Action(real, chunk, m))
        orders.append(tuple(order))
        pairs.append(frozenset(paired))
    overlapping = tuple(pairs) if microbatches >= least and any(pairs) else ()
    return Schedule(name, microbatches, v_placement(ranks), tuple(orders), bound, pairs=overlapping)
