"""Schedules with two chunks per rank in a V, given as the kind and chunk of each next action."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partita.compiler.schedules.schedule import FORWARD, FULL_BACKWARD, Action, Schedule, v_placement

# Kind and chunk of an action; its microbatch is the next one of that kind and chunk. `F+` is a forward that overlaps
# with the full backward that follows it.
Step = tuple[str, int]
PAIRED = "F+"


def in_a_v(
    name: str,
    ranks: int,
    microbatches: int,
    minimum: int,
    steps: Callable[[int, int, int], Iterator[Step]],
    bound: tuple[int, ...],
) -> Schedule:
    """The schedule whose order on each rank is `steps(ranks, microbatches, rank)`.

    Published rules need at least `minimum` microbatches. For fewer, the order for `minimum` is taken and the actions
    of missing microbatches are dropped (as torch does for ZB-V); a valid order stays valid. Nothing overlaps then.
    """
    orders, pairs = [], []
    for rank in range(ranks):
        order: list[Action] = []
        paired = set()
        following: dict[Step, int] = {}
        for kind, chunk in steps(ranks, max(microbatches, minimum), rank):
            real = FORWARD if kind == PAIRED else kind
            # A full backward counts as both B and W.
            parts = ("B", "W") if real == FULL_BACKWARD else (real,)
            m = following.get((parts[0], chunk), 0)
            for part in parts:
                following[part, chunk] = m + 1
            if m < microbatches:
                if kind == PAIRED:
                    paired.add(len(order))
                order.append(Action(real, chunk, m))
        orders.append(tuple(order))
        pairs.append(frozenset(paired))
    overlapping = tuple(pairs) if microbatches >= minimum and any(pairs) else ()
    return Schedule(name, microbatches, v_placement(ranks), tuple(orders), bound, pairs=overlapping)
